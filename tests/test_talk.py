"""`retrain chat` and `retrain serve --openai`: what they load, how they answer, how they refuse."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
import yaml

import retrain
from retrain.agents.public import PublicServer
from retrain.cli.chat.subject import find_subject
from retrain.cli.chat.voice import opened
from retrain.cli.commands import command
from retrain.cli.run import main
from retrain.config import parse_config
from retrain.errors import ConfigError
from retrain.observe.card import model_card
from retrain.types import Turn

ROOT = Path(retrain.__file__).resolve().parent.parent
ASK = [{"role": "user", "content": "a="}]
KEYS = "train.total_train_steps=1 train.groups_per_step=2 checkpoint.every=1 backend.lora.r=4"
pytestmark = pytest.mark.xdist_group("talk")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one large step: its LoRA weights change what the model says."""
    folder = tmp_path_factory.mktemp("talk") / "run"
    path = folder.parent / "letters.py"
    path.write_text("def score(completion):\n    return len(set(completion))")
    reward = f"rewards=[{{type: {path}:score}}]"
    keys = [*KEYS.split(), "backend.learning_rate=0.3", "sampling.max_tokens=6", reward]
    assert main(["quickstart", "--run-dir", str(folder), *keys]) == 0
    return folder


@asynccontextmanager
async def served(named: str | Path, key: str | None = None) -> AsyncIterator[PublicServer]:
    server = PublicServer("127.0.0.1", 0, key)
    async with server.serving(), opened(find_subject(str(named)), "cpu", 1) as voice:
        server.present(voice.calls, voice.spell, str(named))
        yield server


async def logprobs(named: str | Path) -> list[float]:
    """What the official SDK gets, greedily, with its log-probs."""
    openai = pytest.importorskip("openai")
    async with (
        served(named, "sk-mine") as server,
        openai.AsyncOpenAI(base_url=server.url, api_key="sk-mine", max_retries=0) as client,
    ):
        with pytest.raises(openai.AuthenticationError):
            await client.with_options(api_key="sk-other").models.list()
        assert [model.id async for model in client.models.list()]
        asked = {"model": "any", "messages": ASK, "temperature": 0, "max_tokens": 5}
        asked["logprobs"] = True
        answer = await client.chat.completions.create(**asked)
        other = await client.chat.completions.create(**asked)
        assert answer.id != other.id
        assert answer.usage.completion_tokens <= 5
        parts = [part async for part in await client.chat.completions.create(**asked, stream=True)]
        streamed = "".join(p.choices[0].delta.content or "" for p in parts if p.choices)
        assert streamed == answer.choices[0].message.content
        return [token.logprob for token in answer.choices[0].logprobs.content]


async def test_a_run_is_served_with_its_adapter_and_a_model_without(run_dir: Path) -> None:
    trained = await logprobs(run_dir)
    assert trained != await logprobs("tiny")
    assert trained == await logprobs(run_dir / "checkpoints/step_1/adapter/checkpoint-1")


def test_the_config_of_the_run_counts_and_its_checkpoint_replaces_a_missing_export(
    run_dir: Path, tmp_path: Path
) -> None:
    found = find_subject(str(run_dir))
    step = find_subject(str(run_dir / "checkpoints/step_1"))
    assert step.adapter == run_dir / "checkpoints/step_1/adapter/checkpoint-1"
    assert step.sampling.max_tokens == 6
    assert (found.model, found.adapter) == ("tiny", run_dir / "final")
    assert find_subject(str(run_dir / "final")) == found
    assert found.sampling.max_tokens == 6
    assert found.base is not None
    assert (found.base.model, found.base.adapter) == ("tiny", None)
    copied = shutil.copytree(run_dir, tmp_path / "copy")
    shutil.rmtree(copied / "final")
    config = copied / "config.yaml"
    given = config.read_text()
    note, _, rest = given.partition("\n")
    place = f"{note.partition(' to ')[0]} to {tmp_path}"
    config.write_text(f"{place}\n{rest.replace('template: auto', 'template: mine.jinja')}")
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    assert find_subject(str(copied)).template == "{{ messages[0].content }}"
    config.write_text(given)
    adapter = find_subject(str(copied)).adapter
    assert adapter == copied / "checkpoints/step_1/adapter/checkpoint-1"
    shutil.rmtree(adapter)
    (copied / "checkpoints/step_2").mkdir()
    with pytest.raises(ConfigError, match="step_2"):
        find_subject(str(copied / "checkpoints/step_2"))
    with pytest.raises(ConfigError, match=r"neither an exported .* nor a complete checkpoint"):
        find_subject(str(copied))
    config.write_text(given.replace("type: trl", "type: tinker"))
    with pytest.raises(ConfigError, match="service"):
        find_subject(str(copied))


def turns() -> int:
    """Calls that are kept somewhere."""
    gc.collect()
    return sum(type(found) is Turn for found in gc.get_objects())


async def test_the_server_remembers_nothing_and_waits_for_its_model() -> None:
    server = PublicServer("127.0.0.1", 0, None)
    before = turns()
    async with server.serving(), httpx.AsyncClient(base_url=server.url) as http:
        early = await http.post("chat/completions", json={"messages": ASK})
        assert early.status_code == 503
        assert "loading" in early.json()["error"]["message"]
        async with opened(find_subject("tiny"), "cpu", 1) as voice:
            server.present(voice.calls, voice.spell, "tiny")
            for path, body in [
                ("chat/completions", {"messages": ASK, "n": 2, "max_tokens": 2}),
                ("completions", {"prompt": "a=", "max_tokens": 2}),
            ] * 5:
                assert (await http.post(path, json=body)).status_code == 200
            assert turns() == before
            long = [{"role": "user", "content": "a" * 10_000}]
            full = await http.post("chat/completions", json={"messages": long})
            assert (full.status_code, full.json()["error"]["code"]) == (
                400,
                "context_length_exceeded",
            )
            wrong = await http.post("completions", json={"prompt": [10**6]})
            assert wrong.status_code == 400
            assert (await http.post("reward", json={"reward": 1})).status_code == 404
            for header in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
                refused = await http.post(
                    "chat/completions", json={"messages": ASK}, headers=header
                )
                assert refused.status_code == 403


def test_the_model_card_has_the_records_of_the_run(run_dir: Path) -> None:
    _, head, body = (run_dir / "final/README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(head) == {
        "library_name": "peft",
        "pipeline_tag": "text-generation",
        "tags": ["retrain", "grpo"],
    }
    rows = dict(line.strip("| ").split(" | ", 1) for line in body.splitlines() if "| " in line)
    assert (rows["steps"], rows["algorithm"]) == ("1", "`grpo`")
    assert rows["reward"].startswith("`letters.py:score`")
    mixed = {"type": "mixture", "sources": [["a private row"]], "of": {"path": "/home/me/x.py"}}
    config = parse_config({"prompts": mixed, "algorithm": {"type": "/home/me/mine.py:Own"}})
    merged = model_card(config, [], [{"eval/step": 0, "eval/reward/mean": 0.5}], run_dir)
    assert "library_name" in merged
    assert "step 0 | reward/mean 0.500 |" in merged
    assert "private" not in merged
    assert "/home" not in merged


def test_a_conversation_in_a_pipe_is_one_reply_a_line(
    run_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "a=\nb=\n/reset\n\na=\nb=\n"
    end, begin = os.pipe()
    os.write(begin, lines.encode())
    os.close(begin)
    given = [str(run_dir), "--temperature", "0", "--max-tokens", "3", "--compare"]
    with open(end) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        assert command(["chat", *given]) == 0
    done = capsys.readouterr()
    said = done.out.splitlines()
    assert len(said) == 8, "the base model's reply, then the trained one's"
    assert [line.partition("> ")[0] for line in said] == ["base", "trained"] * 4
    assert said[0].partition("> ")[2] != said[1].partition("> ")[2]
    assert said[:4] == said[4:]  # the second conversation begins like the first
    assert f"loading {run_dir / 'final'}" in done.err


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("chat runs/none", "runs/none"),
        ("chat runs", "config.yaml"),
        ("chat /nowhere/at/all", "/nowhere/at/all"),
        ("chat tiny --compare", "whose base model is unknown"),
        ("chat tiny --temperature -1", "--temperature: got -1"),
        ("chat tiny --max-tokens 0", "--max-tokens: got 0"),
        ("serve --openai tiny --host 0.0.0.0", "without an API key"),
        ("serve --openai=tiny --port 99999", "--port: got 99999"),
        ("serve --openai tiny --tools mistrl", "did you mean mistral?"),
        ("serve --openai tiny --tools glm --show-tools system", "chat.tools.show: got system"),
    ],
)
def test_mistakes_are_found_before_a_model_loads(
    given: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "other").mkdir(parents=True)
    assert command(given.split()) == 2
    assert expected in capsys.readouterr().err


def test_a_taken_port_is_said_to_be_taken(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert command(["serve", "--openai", "tiny", "--port", port]) == 1
    printed = capsys.readouterr()
    assert "--port" in printed.err
    assert "loading" not in printed.out


def test_the_command_says_where_it_serves_and_ends_at_ctrl_c(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    answers: list[httpx.Response] = []
    end, begin = os.pipe()

    def client() -> None:
        with open(end) as lines:
            said.extend([lines.readline(), lines.readline()])
            url = said[1].partition(" at ")[2].split()[0]
            try:
                body = {"messages": ASK, "max_tokens": 2}
                answers.append(httpx.post(f"{url}/chat/completions", json=body))
            finally:
                os.kill(os.getpid(), signal.SIGINT)

    before = set(threading.enumerate())
    reading = threading.Thread(target=client)
    with open(begin, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        reading.start()
        assert command(["serve", "--openai", "tiny", "--port", "0"]) == 0
    reading.join()
    assert said[0] == "loading tiny\n"
    assert answers[0].json()["choices"][0]["message"]["role"] == "assistant"
    assert not [one for one in threading.enumerate() if one not in before and not one.daemon]
