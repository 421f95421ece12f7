"""Agents that know nothing of retrain: how they are named, and what contains them."""

from __future__ import annotations

import gc
import os
import re
import socket
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from environments.agent import Agent
from retrain import find_function, parse_config
from retrain.agents.server import EndpointServer
from retrain.assembly import assemble, sections
from retrain.check import bench, check_environment
from retrain.cli.run import main
from retrain.errors import AdapterError, ConfigError
from retrain.observe.run_dir import read_metrics
from retrain.supervision import boundary
from tests.agent_kit import AGENTS, CALL, PROMPT, ROOT, Echo, config_of, one, played, written


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    return written(tmp_path, AGENTS)


async def test_a_function_gets_what_it_declares_and_returns_what_rewards_see(agents: Path) -> None:
    named = await one({"run": f"{agents}:solve"})
    assert (named.outcome, named.completion, named.info) == ("ok", "a=policy", {})
    stopped = await one({"run": f"{agents}:solve"}, sampling={"stop": ["="]})
    assert stopped.completion == "apolicy"
    assert stopped.turns[0].completion.text == "a="  # the sampled tokens stay
    plain = await one({"run": f"{agents}:plain"}, endpoint={"reward": True})
    assert (plain.completion, plain.rewards) == ("a=a=", {"environment": 1.5})
    denied = await one({"run": f"{agents}:plain"})
    assert (denied.outcome, denied.rewards) == ("infra_error", {"environment": 0.0})
    assert plain.info["n"] == 1
    with pytest.raises(FileNotFoundError):
        os.stat(plain.info["folder"])
    apart = await one({"run": "own.py:in_process", "process": True}, base_dir=agents.parent)
    assert (apart.completion, apart.info) == ("a=", {"here": True})
    wrong = await one({"run": f"{agents}:thing"})
    assert wrong.outcome == "infra_error"
    assert "own.py:thing" in wrong.info["error"]


async def test_a_command_runs_in_its_own_folder_with_the_endpoint_in_its_environment(
    agents: Path,
) -> None:
    said = await one({"command": ["python", "own.py", "say", "{prompt}"]}, base_dir=agents.parent)
    assert (said.outcome, said.completion) == ("ok", "a=")
    assert said.info == {"exit_code": 0, "stderr": ""}
    filed = await one(
        {
            "command": [sys.executable, str(agents), "file", "{metadata}"],
            "stdin": "{{prompt}} ${prompt} {answer}\n",
            "files": {"sub/task.txt": "{prompt}!"},
            "env": {"OWN": "({model})"},
            "output": "out.txt",
            "exit_codes": [0, 7],
        }
    )
    assert filed.completion == '{"n": 1}{prompt} ${prompt} aaaa\na=!(policy)'
    assert filed.info == {"exit_code": 7, "stderr": "warned\n", "stdout": "log\n"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "`run`.*`command`"),
        ({"run": "own.py:solve", "command": ["sh"]}, "`run`.*`command`"),
        ({"command": ["python", "no.py"]}, "command.*no.py"),
        ({"command": ["python", "-u", "no.py", "{prompt}"]}, "command.*no.py"),
        ({"command": ["sh", "{metadata.kind}"]}, r"got \{metadata.kind\}"),
        ({"command": ["sh", "-c", "x", "{}"]}, r"got \{\}.*write \{\{\}\}"),
        ({"run": "own.py:nothing"}, "environment.run"),
        ({"run": "own.py:question"}, "requires question, expected any of prompt, messages"),
        ({"run": "own.py:solve", "stdin": "x"}, "environment.stdin.*`command`"),
        ({"command": ["sh"], "process": True}, "environment.process.*`run`"),
        ({"command": []}, "environment.command"),
        ({"command": ["no-such-program"]}, "'no-such-program'"),
        ({"command": ["sh", "{promt}"]}, r"command: got \{promt\}.*\{prompt\}"),
        ({"command": ["sh"], "env": {"A": "{b}"}}, r"write \{\{b\}\} for the braces themselves"),
        ({"command": ["sh"], "files": {"../x": ""}}, "'../x'"),
    ],
)
def test_a_mistake_in_the_agents_keys_is_an_error_before_the_run(
    agents: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Agent(**keys, base_dir=agents.parent)


@pytest.mark.parametrize(
    "keys",
    [
        {"command": ["python", "-m", "no.py"]},
        {"command": ["python", "-c", "{}"]},
        {"command": ["python", "-X", "dev", "own.py", "-o", "out.py", "{{}}", '{"a": {}}']},
        {"command": ["python", "new.py"], "files": {"new.py": "f'{x.y} {{metadata.z}}'"}},
    ],
)
def test_code_and_files_to_come_are_no_mistakes(agents: Path, keys: dict[str, Any]) -> None:
    Agent(**keys, base_dir=agents.parent)


@pytest.mark.parametrize(
    ("keys", "error"),
    [
        ({"run": "own.py:uses_sdk"}, r"^Agent.run raised ConnectionError: no \(own.py:LINE\)$"),
        (
            {"run": "own.py:uses_sdk", "process": True},
            r"exit code 1: own.py:uses_sdk raised ConnectionError: no \(own.py:LINE\)\nTraceback",
        ),
        (
            {"run": "own.py:client"},
            r"OPENAI_API_KEY is not set, .* \(own.py:\d+\). Pass .*, or set environment.process",
        ),
        (
            {"command": ["python", "own.py", "sdk"]},
            r"^Agent.run: python ended with exit code 1: ConnectionError: no \(own.py:LINE\)\nT",
        ),
        (
            {"command": ["python", "own.py", "crash"]},
            "^Agent.run: python ended with exit code 1: the model said$",
        ),
    ],
)
async def test_a_crash_is_an_outcome_that_names_the_line_of_the_users_file(
    agents: Path, monkeypatch: pytest.MonkeyPatch, keys: dict[str, Any], error: str
) -> None:
    sdk = agents.parent / "other" / "site-packages"  # not the run's own packages
    sdk.mkdir(parents=True)
    (sdk / "an_sdk.py").write_text("def post():\n    raise ConnectionError('no')\n")
    monkeypatch.setenv("PYTHONPATH", f"{sdk}{os.pathsep}{ROOT}")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.syspath_prepend(sdk)
    line = 1 + (CALL + AGENTS).splitlines().index("    an_sdk.post()")
    crashed = await one(keys, base_dir=agents.parent)
    assert crashed.outcome == "infra_error"
    assert re.search(error.replace("LINE", str(line)), crashed.info["error"])


@pytest.mark.parametrize("limit", [{"max_turns": 2}, {"max_tokens": 3}])
async def test_an_agent_that_fails_at_a_limit_is_scored_with_what_it_has(
    agents: Path, limit: dict[str, int]
) -> None:
    ended = await one({"run": f"{agents}:greedy"}, rollout=limit)
    assert (ended.outcome, ended.completion, len(ended.turns)) == ("ok", "a=", 2)
    assert ended.info["truncated"] == next(iter(limit))
    assert "429" in ended.info["error"]


@pytest.mark.parametrize("name", ["hangs", "swallows", "blocks"])
async def test_an_agent_that_never_ends_is_a_timeout(
    agents: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "STUCK_SECONDS", 0.1)
    late = await one({"run": f"{agents}:{name}"}, deadlines={"agent": 0.3, "close": 0.3})
    assert late.outcome == "timeout"
    assert "deadlines.agent = 0.3 s" in late.info["error"]
    find_function(f"{agents}:{name}", agents.parent, "").__globals__["RELEASED"].set()


async def test_calls_for_other_rollouts_and_late_ones_are_rejected_and_train_nothing(
    agents: Path,
) -> None:
    servers: list[EndpointServer] = []
    group = await played({"run": f"{agents}:leaves"}, size=2, server=servers)
    said = sorted([t.completion for t in group.trajectories])  # either may be the first
    assert said == ["a= [401, 401]", "a= []"]
    assert [len(t.turns) for t in group.trajectories] == [1, 1]
    assert servers[0].rejected == 2


async def test_a_sampler_that_fails_ends_the_group_while_its_agents_still_run(agents: Path) -> None:
    broken = Echo()
    broken.failure = AdapterError("the sampler is gone")
    with pytest.raises(AdapterError, match="the sampler is gone"):
        await played({"run": f"{agents}:hangs"}, size=3, model=broken)


async def test_hundreds_of_agents_play_at_once(agents: Path) -> None:
    group = await played({"run": f"{agents}:solve"}, size=200)
    assert {(t.outcome, t.completion) for t in group.trajectories} == {("ok", "a=policy")}


async def test_the_check_finds_an_agent_that_fails_for_strange_replies(agents: Path) -> None:
    good = await check_environment(partial(Agent, run=f"{agents}:solve"))
    assert [finding.what for finding in good if finding.good] == [
        "setup",
        "the agent completes 2 of 2 rows",
        "the agent ends without an error in 7 of 7 rollouts",
        "no task is leaked",
        "nothing blocks the event loop",
    ]
    picky = await check_environment(partial(Agent, run=f"{agents}:picky"))
    [bad] = [finding for finding in picky if not finding.good]
    assert bad.what.endswith("in 2 of 7 rollouts")
    assert bad.advice.count("ZeroDivisionError") == 1
    assert "'42' in row 0" in bad.advice
    assert "return the partial result" in bad.advice


@pytest.mark.parametrize(("agent", "ends", "warns"), [("unread", 1, 1), ("unsound", 0, 3)])
async def test_the_check_warns_of_an_agent_that_always_raises(
    agents: Path, agent: str, ends: int, warns: int
) -> None:
    """Although all its rollouts are scored."""
    findings = await check_environment(partial(Agent, run=f"{agents}:{agent}"))
    assert all(finding.good for finding in findings)
    _, rows, every, scored, *_ = findings
    assert f"{ends} of 2 rows" in rows.what
    assert f"{ends} of 7 rollouts" in every.what
    assert f"{7 - ends} rollouts" in scored.what
    assert sum(finding.warning for finding in findings) == warns
    assert scored.advice.count("own.py:") == 1 + (not ends)


@pytest.mark.parametrize(
    ("agent", "advice"),
    [
        (
            "never",
            "completes 0 of 2?the model at `base_url`?in every rollout?call the model at `base",
        ),
        ("lost", "own.py:?in every rollout?fix the agent"),
        (
            "second",
            "completes 1 of 2 rows?KeyError?if the model says 'hello' in row 1?Catch the error",
        ),
        ("hangs", "0.3 s?in every rollout?raise deadlines.agent?6 further rollouts were not tried"),
    ],
)
async def test_the_check_advises_by_the_error_and_says_what_it_waits_for(
    agents: Path, monkeypatch: pytest.MonkeyPatch, agent: str, advice: str
) -> None:
    monkeypatch.setattr(bench, "SLOW_SECONDS", 0.0)
    config, said = config_of(deadlines={"agent": 0.3}), list[str]()
    prompts = [PROMPT, replace(PROMPT, metadata={"n": 2})]
    make = partial(Agent, run=f"{agents}:{agent}")
    findings = await check_environment(make, prompts, config, said.append)
    text = "\n".join(str(finding) for finding in findings if not finding.good)
    for part in advice.split("?"):
        assert part in text
    assert text.count("\n  ") == 3 + (agent == "hangs"), "equal errors are one"
    waits = "waiting for the agent, where the model says 'hello' in row 0: at most 0.3 s"
    assert agent != "hangs" or any(waits in line for line in said)


QUICK = (
    'prompts=[{prompt: "a=", answer: a7y}]',
    "backend.learning_rate=1e-2",
    "algorithm.scale=group",
    "train.groups_per_step=2",
    "train.order=in_order",
    "staleness.target=0",
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trl", "tinker", "weaver"])
def test_the_included_agent_trains_on_every_backend(tmp_path: Path, backend: str) -> None:
    """The reward rises on trl; the others take the same steps."""
    pytest.importorskip("openai")
    short = {"trl": ["train.total_train_steps=9", *QUICK]}
    remote = [f"backend.type={backend}", "backend.url=local", "train.total_train_steps=2"]
    keys = [f"run_dir={tmp_path / 'run'}", *short.get(backend, [*remote, "algorithm.group_size=4"])]
    before = set(sys.modules)
    assert main([str(ROOT / "configs/agent.yaml"), *keys]) == 0
    for name in set(sys.modules) - before:
        if str(ROOT / "configs") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
    with warnings.catch_warnings():  # of connections of the agent's client, which it keeps open
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()
    rows = read_metrics(tmp_path / "run")
    assert all(row["rollouts/turns"] == 3 * row["rollouts/ok"] for row in rows)
    assert sum(row["endpoint/rejected"] for row in rows) == 0
    if backend == "trl":
        means = [row["reward/mean"] for row in rows]
        assert sum(means[-4:]) / 4 > sum(means[:4]) / 4 + 0.05


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"endpoint": {"public_url": "host:80"}}, "endpoint.public_url: .*begins.*http://"),
        ({"model": "tinny"}, "model: got 'tinny'"),
        ({"endpoint": {"port": "taken"}}, r"endpoint.*127.0.0.1:\d+"),
    ],
)
def test_a_mistake_in_the_run_of_an_agent_is_an_error_before_a_model_loads(
    sections: dict[str, Any], message: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if sections.get("endpoint", {}).get("port"):
            sections = {"endpoint": {"port": taken.getsockname()[1]}}
        agent = {"type": "agent", "command": ["sh"]}
        with pytest.raises(ConfigError, match=message):
            assemble(config_of(**{"environment": agent, **sections}))


def test_a_config_of_an_agent_needs_no_rewards_but_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = parse_config({"prompts": ["x"], "environment": {"type": "agent", "command": ["sh"]}})
    assert assemble(config).runs_agent
    monkeypatch.setattr(sections, "find_spec", lambda name: None if name == "uvicorn" else name)
    with pytest.raises(ConfigError, match=r"agent.*\(uvicorn\): .*\[agents\]"):
        assemble(config)
