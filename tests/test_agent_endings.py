"""How agents end: what the model did is a result, a fault is not, and nothing outlives one."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from environments.agent import Agent
from retrain import Finished, file_of, reward, run_program
from retrain.errors import UserCodeError
from retrain.rollout.endings import as_result
from retrain.scoring import WeightedReward
from retrain.supervision.crashes import ProgramError, kinds_of
from retrain.types import Completion, StopReason, Trajectory, Turn
from tests.agent_kit import AGENTS, ROOT, Echo, ended, one, played, written


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    return written(tmp_path, AGENTS)


ENDINGS = """
import json, socket, sys
class ValidationError(ValueError): ...  # as pydantic's, or jsonschema's
class TooLong(ValidationError): ...
class ServiceUnavailable(Exception): ...
def fails(prompt, base_url=None, api_key=None):
    said = call(prompt, base_url, api_key)
    if HOW == "caused":
        try:
            json.loads(said)
        except ValueError as error:
            raise RuntimeError("no city") from error
    if HOW == "handled":
        try:
            json.loads(said)
        except ValueError:
            raise KeyError("a mistake of the agent")
    raise {"rejected": TooLong, "other": KeyError, "away": ConnectionResetError,
           "down": ServiceUnavailable}[HOW]("not\\nvalid")
def first():
    json.loads("before any call")
if __name__ == "__main__":
    fails("a=")
"""
"""Agents that end with an exception after a reply; HOW says which."""
CRASHED = """Traceback (most recent call last):
  File "agent.py", line 1, in <module>
{}
"""


def ending(folder: Path, how: str, kind: str) -> dict[str, Any]:
    """The keys of such an agent: a function, one in its own process, or a command."""
    written(folder, f"HOW = {how!r}\n{ENDINGS}", f"{how}.py")
    if kind == "command":
        return {"command": ["python", f"{how}.py"], "base_dir": folder}
    return {"run": f"{how}.py:fails", "process": kind == "process", "base_dir": folder}


@reward
def one_point(completion: str, trajectory: Trajectory) -> float:
    """Of a rollout that is scored, by its conversation and the command's exit code."""
    assert trajectory.info.get("exit_code") in (None, 1)
    return float(completion == "a=")


async def how_it_ended(
    keys: dict[str, Any], stop_reason: StopReason = "stop", **sections: Any
) -> tuple[str, dict[str, Any]]:
    """The outcome of an agent whose replies end so, and its `info` without what it printed."""
    model = Echo()
    model.stop_reason = stop_reason
    rewards = [WeightedReward("one_point", 1.0, one_point)]
    [rollout] = (
        await played(partial(Agent, **keys), model=model, rewards=rewards, **sections)
    ).trajectories
    if rollout.outcome == "ok":
        assert rollout.rewards == {"environment": 0.0, "one_point": 1.0}
        assert rollout.info["error"]
    shown = {k: v for k, v in rollout.info.items() if k not in ("error", "stderr", "exit_code")}
    return rollout.outcome, shown


KINDS = ("function", "process", "command")


@pytest.mark.parametrize(
    ("how", "stop_reason", "on_error", "shown", "kinds"),
    [
        ("other", "length", "fail", {"truncated": "length"}, KINDS),
        ("caused", "stop", "fail", {"unusable": "JSONDecodeError"}, KINDS),
        ("rejected", "stop", "fail", {"unusable": "TooLong: not\nvalid"}, ["function"]),
        # In the output of a program, a class has no bases.
        ("rejected", "stop", "fail", {}, ["command"]),
        ("other", "stop", "score", {"unusable": "KeyError"}, ["function", "command"]),
        ("away", "length", "score", {}, KINDS),  # no reward for an outage
        ("down", "length", "score", {}, ["function"]),
        ("handled", "stop", "fail", {}, ["function", "command"]),
        ("other", "stop", "fail", {}, ["function", "command"]),
    ],
)
async def test_only_what_the_model_did_is_a_result_although_the_agent_fails(
    tmp_path: Path,
    how: str,
    stop_reason: StopReason,
    on_error: str,
    shown: dict[str, str],
    kinds: Sequence[str],
) -> None:
    for kind in kinds:
        keys = ending(tmp_path, how, kind) | {"on_error": on_error}
        outcome, info = await how_it_ended(keys, stop_reason)
        assert (outcome, list(info)) == ("ok" if shown else "infra_error", list(shown))
        assert all(text in info[key] for key, text in shown.items())


class RequestException(OSError):
    """As that of requests."""


class PageError(RequestException, json.JSONDecodeError):
    """As the JSONDecodeError of requests."""


@pytest.mark.parametrize(
    ("error", "stops", "info"),
    [
        (ValueError(), ["stop", "length"], {"truncated": "length"}),
        (ValueError(), ["length", "stop"], {}),
        (OSError(28, "disk full"), ["length"], {}),
        (MemoryError(), ["length"], {}),
        (ModuleNotFoundError(), ["length"], {}),
        (ProgramError("it", CRASHED.format("FileNotFoundError: no")), ["length"], {}),
        (ProgramError("it", CRASHED.format("KeyError: no")), ["length"], {"truncated": "length"}),
        (PageError("page", "", 0), ["stop"], {}),
        (
            ProgramError("it", CRASHED.format("requests.exceptions.JSONDecodeError: x")),
            ["stop"],
            {},
        ),
    ],
)
def test_only_the_last_reply_explains_an_error_and_not_one_of_the_machine(
    error: Exception, stops: list[StopReason], info: dict[str, Any]
) -> None:
    failed = UserCodeError("it failed")
    failed.__cause__ = error
    turns = [Turn([], Completion([], [], "", stop, 0)) for stop in stops]
    assert as_result(failed, turns, "fail") == info


async def test_an_agent_that_fails_before_its_first_call_or_is_late_is_a_fault(
    agents: Path,
) -> None:
    keys = {**ending(agents.parent, "other", "function"), "on_error": "score"}
    assert await how_it_ended({**keys, "run": "other.py:first"}) == ("infra_error", {})
    late = {"run": f"{agents}:hangs", "on_error": "score"}
    assert await how_it_ended(late, "length", deadlines={"agent": 0.3}) == ("timeout", {})


@pytest.mark.parametrize(
    "leaves",
    [
        "os.mkfifo('out.txt')",
        "os.symlink('/dev/zero', 'out.txt')",
        "os.mkdir('out.txt')",
        "os.remove('task.md')",
        "(open('other', 'w').write('x'), os.symlink('other', 'out.txt'))",
    ],
)
async def test_an_output_that_is_no_file_costs_only_its_rollout(
    tmp_path: Path, leaves: str
) -> None:
    written(tmp_path, f"call('a=')\n{leaves}\n", "leaves.py")
    keys = {"command": ["python", "leaves.py"], "output": "out.txt", "files": {"task.md": ""}}
    async with asyncio.timeout(60):
        left = await one(keys, base_dir=tmp_path)
    assert left.outcome == "infra_error"
    assert "out.txt" in left.info["error"]


async def test_a_large_output_is_cut_and_other_folders_stay_closed(tmp_path: Path) -> None:
    (tmp_path / "out.txt").write_text("x" * 2**20 + "end")
    assert await file_of(tmp_path, "out.txt") == b"x" * (2**20 - 3) + b"end"
    (tmp_path / "there").symlink_to(tmp_path.parent)
    with pytest.raises(OSError, match="symbolic link"):
        await file_of(tmp_path, f"there/{tmp_path.name}/out.txt")


async def test_a_result_of_a_process_that_is_no_file_costs_only_its_rollout(tmp_path: Path) -> None:
    text = """
    import os
    def large(prompt):
        return call(prompt) * 2**23
    def device(prompt):
        os.symlink("/dev/full", "result.json")
        return call(prompt)
    """
    written(tmp_path, text)
    for name, error in (("large", "16 MiB"), ("device", "No space left")):
        left = await one({"run": f"own.py:{name}", "process": True}, base_dir=tmp_path)
        assert left.outcome == "infra_error"
        assert error in left.info["error"]


PYTHON = """INFO starting
Traceback (most recent call last):
  File "agent.py", line 3, in solve
    json.loads(text)
    ~~~~~~~~~~^^^^^^
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "agent.py", line 5, in <module>
pydantic_core._pydantic_core.ValidationError: 1 validation error for City
name
  Field required [type=missing]
    For further information visit https://errors.pydantic.dev
"""
GROUP = """  + Exception Group Traceback (most recent call last):
  |   File "agent.py", line 1, in <module>
  | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
  +-+---------------- 1 ----------------
    | Traceback (most recent call last):
    |   File "agent.py", line 9, in call
    | httpx.ConnectError: All connection attempts failed
    +------------------------------------
"""
LINKED = """Traceback (most recent call last):
  File "agent.py", line 9, in <module>
langgraph.errors.GraphRecursionError: Recursion limit of 25 reached
For troubleshooting, visit: https://docs.langchain.com/errors
"""
NODE = """file:///agent/parser.mjs:83
            throw new LengthFinishReasonError();
                  ^

LengthFinishReasonError: Could not parse response content
    at maybeParse (file:///agent/parser.mjs:79:18) {
  status: undefined
}

Node.js v20.20.2
"""


@pytest.mark.parametrize(
    ("output", "line", "kinds"),
    [
        (
            PYTHON,
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for City",
            {"ValidationError", "JSONDecodeError"},
        ),
        (GROUP, "httpx.ConnectError: All connection attempts failed", {"ConnectionError"}),
        (
            NODE,
            "LengthFinishReasonError: Could not parse response content",
            {"LengthFinishReasonError"},
        ),
        (
            "script:1\nz\n^\n\nSyntaxError: 'z\n' is not valid JSON\n    at p\n\nNode.js v22.1.0",
            "SyntaxError: 'z ' is not valid JSON",
            {"JSONDecodeError"},
        ),
        (PYTHON + "gave up\n", "gave up", set()),
        (
            PYTHON + "agent.py raised ValidationError",
            "agent.py raised ValidationError",
            {"ValidationError"},
        ),
        (f"{CRASHED.format('ConnectionError: no')}recovered\nno city", "no city", set()),
        (LINKED, LINKED.splitlines()[-1], {"GraphRecursionError"}),
        ("the model said a=", "the model said a=", set()),
        ("", "", set()),
    ],
)
def test_the_error_of_a_program_is_its_cause_not_its_last_line(
    output: str, line: str, kinds: set[str]
) -> None:
    error = Finished(1, "", output).failure("it")
    first = str(error).splitlines()[0]
    assert first == f"it ended with exit code 1: {line}".removesuffix(": ")
    found = set(kinds_of(error))
    assert kinds <= found
    assert kinds or not found


@pytest.mark.skipif(shutil.which("node") is None, reason="there is no node")
async def test_the_error_of_an_agent_in_node_is_its_cause(tmp_path: Path) -> None:
    (tmp_path / "agent.mjs").write_text("throw new TypeError('no key');")
    crashed = await one({"command": ["node", "agent.mjs"]}, base_dir=tmp_path)
    assert "exit code 1: TypeError: no key\n" in crashed.info["error"]


TREE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    os.setsid()  # a daemon, which holds the pipes
    if os.fork() == 0:
        open("daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
os.wait()
child = subprocess.Popen(["sleep", "600"])
while not os.path.exists("daemon") or not open("daemon").read():
    time.sleep(0.01)
open("tree", "w").write(f"{os.getpid()} {child.pid} " + open("daemon").read())
os.rename("tree", "pids")
if sys.argv[1:] == ["stay"]:
    time.sleep(600)
sys.stdout.write("x" * 2**22 + "end")
"""
"""A program whose children ignore SIGTERM, or have left its group."""


def pids(folder: Path) -> list[int]:
    """Of the program's processes, once all have started."""
    file, until = folder / "pids", time.monotonic() + 30
    while not file.exists() and time.monotonic() < until:
        time.sleep(0.02)
    return [int(pid) for pid in file.read_text().split()]


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")


@linux
@pytest.mark.parametrize("stays", [True, False])
async def test_all_processes_of_a_program_end_with_it(tmp_path: Path, stays: bool) -> None:
    argv = [sys.executable, "-c", TREE, *(["stay"] * stays)]
    task = asyncio.create_task(run_program(argv, cwd=tmp_path, keep=10, stdin="x" * 2**20))
    started = await asyncio.to_thread(pids, tmp_path)
    if stays:
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    else:
        assert (await task).stdout == "xxxxxxxend"
    assert all(ended(pid) for pid in started)


@linux
def test_kill_9_of_a_run_ends_the_processes_of_its_agents(tmp_path: Path) -> None:
    main = tmp_path / "main.py"
    main.write_text(
        "import asyncio, sys\n"
        "from retrain import run_program\n"
        f"argv = [sys.executable, '-c', {TREE!r}, 'stay']\n"
        f"asyncio.run(run_program(argv, cwd={str(tmp_path)!r}))\n"
    )
    process = subprocess.Popen([sys.executable, main], env={**os.environ, "PYTHONPATH": str(ROOT)})
    started = pids(tmp_path)
    process.kill()
    process.wait()
    until = time.monotonic() + 30
    while not all(ended(pid) for pid in started):
        assert time.monotonic() < until
        time.sleep(0.02)
