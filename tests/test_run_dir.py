"""The run directory: its files, its lock, its configuration and its journal."""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from benchmarks.mock_engine import mock_config
from retrain.algorithms.grpo import GRPO
from retrain.algorithms.reinforce import Reinforce
from retrain.config import RunConfig
from retrain.environment import Action, Environment, StepResult
from retrain.errors import MAX_TEXT, ConfigError, RunError
from retrain.observe import rollout_lines
from retrain.observe.causes import Causes
from retrain.observe.console import Console
from retrain.observe.journal import encode, read_lines
from retrain.observe.rollout_lines import encoded, hash_of, with_fate
from retrain.observe.run_dir import RunDirectory, read_events, read_metrics
from retrain.pipeline import train
from retrain.pipeline.meter import Meter
from retrain.pipeline.recorder import LONELY, Recorder
from retrain.supervision.locks import in_use
from retrain.types import Completion, Group, Message, Prompt, Trajectory, Turn
from tests.pipe_kit import kept_adapter, parts_with
from tests.run_dir_kit import config, group


def test_a_run_directory_holds_what_was_written(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.event("issued", ticket="0.7.0")
        run_dir.rollouts(encoded(group("ok", "timeout", answer="4")), step=3)
        run_dir.metrics({"step": 1, "loss": 0.5})
        assert run_dir.checkpoints.is_dir()
    (event,) = read_events(tmp_path / "run")
    assert event.pop("time") == pytest.approx(os.stat(tmp_path / "run").st_mtime, abs=60)
    assert event == {"event": "issued", "ticket": "0.7.0"}
    assert read_metrics(tmp_path / "run") == [{"step": 1, "loss": 0.5}]
    scored, failed = read_lines(tmp_path / "run" / "rollouts.jsonl")
    assert scored == {
        "ticket": "0.7.0",
        "index": 0,
        "step": 3,
        "prompt": {"tokens": 2, "hash": hash_of([1, 2])},
        "tools": ["search"],
        "messages": [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4!"}],
        "rewards": {"exact": 0.5},
        "reward": 0.25,
        "outcome": "ok",
        "error": None,
        "versions": [2],
        "tokens": 3,
        "stop_reasons": ["length"],
        "seconds": {"sample": 1.5},
        "answer": "4",
    }
    assert (failed["index"], failed["reward"], failed["error"]) == (1, None, "it broke\nat line 3")


def test_a_rollout_shows_which_weights_sampled_each_part_of_a_turn() -> None:
    mixed = Completion([1, 2, 3], [-1.0] * 3, "abc", "stop", 4, versions=(4, 4, 5))
    plain = Completion([7, 8], [-1.0] * 2, "de", "stop", 5)
    trajectory = Trajectory(Prompt("0.1.0", []), [Turn([1], mixed), Turn([1, 2], plain)])
    [line] = lines_of(trajectory)
    assert line["spans"] == [[[4, 2], [5, 1]], [[5, 2]]]
    assert line["versions"] == [4, 5]
    trajectory.turns.pop(0)
    assert "spans" not in lines_of(trajectory)[0]


def test_a_rollout_without_a_turn_shows_its_prompt_and_an_agents_has_its_result() -> None:
    asked: list[Message] = [{"role": "user", "content": "2+2"}]
    failed = Trajectory(Prompt("0.1.0", asked), outcome="infra_error")
    [line] = lines_of(failed)
    assert (line["prompt"], line["messages"]) == ({"text": "2+2"}, asked)
    said = Completion([7], [-1.0], "4", "stop", 0)
    own: list[Message] = [{"role": "user", "content": "add"}]
    agents = Trajectory(failed.prompt, [Turn([1], said, messages=own)], messages=own, result="5")
    [line] = lines_of(agents)
    assert (line["prompt"]["text"], line["messages"], line["result"]) == ("2+2", own, "5")


def lines_of(*trajectories: Trajectory) -> list[dict[str, Any]]:
    group = Group(trajectories[0].prompt, list(trajectories))
    return [json.loads(line) for line in with_fate(encoded(group), 1)]


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"rewards": {"a": 1, "b": True}, "reward": 2},
        {"rewards": {"a": np.float64(0.5)}, "reward": np.float32(0.5)},
        {"rewards": {"a": math.nan}, "reward": math.inf},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": '"'}]}]},
        {"messages": [{"role": 'a "quoted"\n', "content": "\ud800"}]},
        {"turns": [], "seconds": {}, "info": {"a": 1}},
        {"outcome": "timeout", "info": {"error": "late"}},
        {"seat": "X"},
        {"result": "4"},
        {"messages": []},
    ],
)
def test_a_line_is_the_same_however_it_is_encoded(change: dict[str, Any]) -> None:
    usual, odd = group("ok", "ok", answer="4").trajectories
    odd.rewards, odd.seconds = {"a": 0.1, "b": -1e-9}, {"sample": 1.5, "reward": 0.25}
    for name, value in change.items():
        setattr(odd, name, value)
    lines = [rollout_lines._line(t) for t in (usual, odd)]
    assert lines_of(usual, odd) == [
        json.loads(encode({**rollout_lines._shared(t), **line, "step": 1}))
        for t, line in zip((usual, odd), lines, strict=True)
    ]


def test_the_tally_counts_drops_outcomes_and_causes(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.event("dropped", ticket="0.1.0", cause="stale")
        run_dir.count(group("ok", "invalid", "invalid"))
        assert run_dir.tally.drops == {"stale": 1}
        assert run_dir.tally.outcomes == {"ok": 1, "invalid": 2}
        assert run_dir.tally.errors == {"it broke": 2}


def test_a_group_that_lost_all_but_one_rollout_is_counted_and_announced_once(
    tmp_path: Path,
) -> None:
    said: list[str] = []
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.tally.announce = said.append
        recorder = Recorder(run_dir, GRPO())
        for number, outcomes in enumerate((["ok"], ["ok", "ok", "invalid"], ["invalid"] * 2)):
            recorder.played(group(*outcomes, ticket=f"0.{number}.0"), 0.0)
        assert LONELY not in run_dir.tally.errors
        for number in (3, 4):
            recorder.played(group("infra_error", "ok", ticket=f"0.{number}.0"), 0.0)
        assert run_dir.tally.errors[LONELY] == 2
        assert said.count(LONELY) == 1
        alone = Recorder(run_dir, Reinforce())  # compares with the batch
        alone.played(group("infra_error", "ok", ticket="0.5.0"), 0.0)
        assert run_dir.tally.errors[LONELY] == 2


def test_the_error_of_an_agent_whose_rollout_is_scored_is_announced(tmp_path: Path) -> None:
    failed, said = list[str](), list[str]()
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.tally.announce, run_dir.tally.remark = failed.append, said.append
        scored = group("ok", "ok", "ok")
        scored.trajectories[0].info = {"truncated": "length", "error": "no city"}
        scored.trajectories[1].info = {"error": "of its own"}
        run_dir.count(scored)
        assert (run_dir.tally.outcomes, len(said), failed) == ({"ok": 3}, 1, [])
        assert "no city" in said[0]
        meter = Meter()
        meter.group(scored)
        counted = meter.evaluation()
        assert counted["eval/rollouts/truncated"] == 1
        assert "eval/rollouts/unusable" not in counted


def test_an_error_in_one_line_keeps_its_place_and_shows_where_it_is_cut() -> None:
    causes, place = Causes(), " (agent.py:7)"
    assert causes.add(f"1 validation error\ntotal\n  Field required{place}") == (
        f"1 validation error total Field required{place}"
    )
    assert causes.add(f"1 validation error\nother\n  Field required{place}") is None
    assert causes.add("1 validation error\ntotal (agent.py:8)") is not None
    long = causes.add("word " * 99 + place)
    assert long is not None
    assert (len(long), long.endswith(f"...{place}")) == (300, True)
    assert (causes.add("word " * 98) or "").endswith("...")
    for count in ("1,228", "94"):
        causes.add(f"the prompt has {count} tokens, expected fewer than 90{place}")
    assert sorted(causes.values()) == [1, 1, 1, 2, 2]
    for number in range(193):
        causes.add("new " * number)
    assert (causes.total(), len(causes) < 100) == (200, True)


def test_errors_that_differ_by_the_rollout_are_one_kind_and_announced_once(tmp_path: Path) -> None:
    said: list[str] = []
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        run_dir.tally.announce = said.append
        for ticket, folder in (("0.1.0", "retrain-agent-a1"), ("0.2.0", "retrain-agent-b2")):
            broken = group("infra_error")
            error = f"prompt {ticket}: no file /tmp/{folder}/x of <A object at 0x7f{folder[-2:]}>"
            broken.trajectories[0].info["error"] = error
            run_dir.count(broken)
        run_dir.tally.failed("another")
        assert list(run_dir.tally.errors.values()) == [2, 1]
    assert [text.split()[0] for text in said] == ["prompt", "another"]


def test_the_resolved_configuration_is_a_configuration_again(tmp_path: Path) -> None:
    given_config = config(name="été", staleness={"target": 2}, rewards=[{"type": "exact"}])
    RunDirectory.open(tmp_path / "run", given_config).close()
    loaded = yaml.safe_load((tmp_path / "run/config.yaml").read_text(encoding="utf-8"))
    assert RunConfig.model_validate(loaded) == given_config
    assert loaded["sampling"]["max_tokens"] == 256


def test_no_secret_reaches_the_configuration_on_disk(tmp_path: Path) -> None:
    secretive = config(
        environment={
            "type": "search",
            "api_key": "s3cret",
            "api_key_env": "SEARCH_KEY",
            "login": {"password": "s3cret"},
            "headers": {"Authorization": "s3cret", "Proxy-Authorization": "s3cret"},
            "variables": {"PGPASSWORD": "s3cret", "token": "s3cret"},
            "options": {"clientSecret": "s3cret", "api_keys": "s3cret"},
            "urls": ["https://me:s3cret@example.org/x"],
            "eos_token": "</s>",
        }
    )
    RunDirectory.open(tmp_path / "run", secretive).close()
    text = (tmp_path / "run/config.yaml").read_text()
    assert "s3cret" not in text
    assert "example.org/x" in text
    assert "</s>" in text
    assert "SEARCH_KEY" in text


def test_a_directory_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"file.*--run-dir"):
        RunDirectory.open(tmp_path / "file" / "run", config())


def test_two_processes_never_share_a_run_directory(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, config()):
        assert in_use(tmp_path)
        with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}"):
            RunDirectory.open(tmp_path, config(), resume=True)
    RunDirectory.open(tmp_path, config(), resume=True).close()


def test_flushed_lines_survive_a_kill_which_frees_the_lock(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from retrain.config import RunConfig; from retrain.observe.run_dir import RunDirectory\n"
        "config = RunConfig.model_validate({'prompts': {'type': 'list'}})\n"
        f"run_dir = RunDirectory.open(Path({str(tmp_path)!r}), config)\n"
        "run_dir.event('issued', ticket='0.0.0'); run_dir.metrics({'step': 1})\n"
        "end, begin = os.pipe()\n"
        "if os.fork() == 0: os.write(begin, b'.'); sys.exit(sys.stdin.read())\n"  # outlives the run
        "os.read(end, 1)\n"  # the child is there, and has let go of the lock
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE) as killed:
        assert killed.wait(60) == -9
        assert not in_use(tmp_path)
    with RunDirectory.open(tmp_path, config(), resume=True) as run_dir:
        assert run_dir.resumed
        assert [event["event"] for event in read_events(tmp_path)] == ["issued"]
        assert read_metrics(tmp_path) == [{"step": 1}]


def test_a_start_removes_what_killed_processes_left(tmp_path: Path) -> None:
    RunDirectory.open(tmp_path, config()).close()
    left = [
        "config.yaml.tmp", "report.html.tmp", "checkpoints/.step_21.partial/run.json",
        "checkpoints/.best", "voided/.metrics.jsonl.partial", ".scratch-x1/a",
    ]  # fmt: skip
    kept = ["notes.txt", "checkpoints/step_3/run.json", "checkpoints/.step_notes"]
    for name in (*left, *kept):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    with RunDirectory.open(tmp_path, config(), resume=True):
        pass
    gone = before - set(tmp_path.rglob("*"))
    assert gone == {tmp_path / name for name in left}
    assert not (tmp_path / ".scratch-x1").exists()


def test_the_fate_of_a_rollout_ends_its_line(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, config()) as run_dir:
        lines = encoded(group("ok"))
        run_dir.rollouts(lines, 4)
        run_dir.rollouts(lines, dropped='"odd"\n')
        run_dir.rollouts(lines)
    fates = [(r["step"], r.get("dropped")) for r in read_lines(tmp_path / "rollouts.jsonl")]
    assert fates == [(4, None), (None, '"odd"\n'), (None, None)]


@pytest.mark.parametrize("name", ["events.jsonl", "metrics.jsonl", ""])
def test_a_run_whose_files_are_deleted_fails(tmp_path: Path, name: str) -> None:
    run_dir = RunDirectory.open(tmp_path / "run", config())
    gone = tmp_path / "run" / name
    gone.unlink() if name else shutil.rmtree(gone)
    with pytest.raises(RunError, match=f"{gone} was deleted"):
        run_dir.metrics({"step": 1})
    run_dir.close()


def test_flush_may_run_in_a_thread_while_events_are_written(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, config()) as run_dir:
        threads = [threading.Thread(target=run_dir.flush) for _ in range(4)]
        for number in range(2000):
            if number % 500 == 0:
                threads[number // 500].start()
            run_dir.event("issued", ticket=number)
        for thread in threads:
            thread.join()
    assert [event["ticket"] for event in read_events(tmp_path)] == list(range(2000))


# the journal


def test_a_row_with_any_values_is_written_and_not_consumed() -> None:
    rollouts = group("ok", "ok", answer=10**400)
    values = iter([1, 2])
    metadata = {"values": values, "odd": {None: 1}, "m": math.nan}
    rollouts.trajectories = [
        replace(t, prompt=replace(t.prompt, metadata=metadata), reward=math.inf)
        for t in rollouts.trajectories
    ]
    for line in with_fate(encoded(rollouts), 1):
        written = json.loads(line, object_pairs_hook=unique)
        assert written["nonfinite"] == {"metadata.m": "nan", "reward": "inf"}
        assert written["answer"] == 10**400
    assert list(values) == [1, 2]


def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs)
    return dict(pairs)


async def test_records_tokens_writes_the_very_sequences_that_are_trained(tmp_path: Path) -> None:
    path = tmp_path / "run"
    short = mock_config(path, records={"tokens": True}, train={"total_train_steps": 3})
    adapter = kept_adapter(short)
    await train(short, parts=parts_with(short, adapter))
    streams = ("token_ids", "loss_mask", "logprobs", "versions")
    written: dict[int, list[dict[str, Any]]] = {}
    for line in read_lines(path / "rollouts.jsonl"):
        if line["step"] is not None:
            written.setdefault(line["step"], []).extend(line["sequences"])
    assert len(written) == len(adapter.batches) == 3
    for step, batch in enumerate(adapter.batches, start=1):
        trained = [{name: list(getattr(s, name)) for name in streams} for s in batch.samples]
        assert sorted(written[step], key=repr) == sorted(trained, key=repr)


class Hostile(Environment):
    """Loses the working directory, and fails in terminal escapes that never end."""

    async def step(self, action: Action) -> StepResult:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        if self.prompt.index == 0:
            raise ValueError("\x1b[2J\x1b]0;title\x07" + "x" * 50_000_000)
        return await super().step(action)


async def test_p5_neither_a_lost_working_directory_nor_a_huge_error_ends_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    path, out = tmp_path / "run", io.StringIO()
    hostile = mock_config(
        path,
        environment={"type": "tests.test_run_dir:Hostile"},
        train={"total_train_steps": 2},
        checkpoint={"every": 1},
    )
    result = await train(hostile, callbacks=[Console(out)])
    assert (result.status, (path / "report.html").exists()) == ("completed", True)
    assert [e["event"] for e in read_events(path)][-1] == "end"
    failed = [line for line in read_lines(path / "rollouts.jsonl") if line["error"]]
    assert {line["index"] for line in failed} == {0}
    assert max(len(line["error"]) for line in failed) < 2 * MAX_TEXT
    assert "\x1b" not in out.getvalue()
