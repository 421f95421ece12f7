"""Agents that know nothing of retrain: how they are named, what rewards see, what contains them."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from environments.agent import Agent
from retrain import Finished, file_of, find_function, parse_config, reward, run_program
from retrain.agents.server import EndpointServer
from retrain.assembly import assemble, sections
from retrain.check import scripted
from retrain.check.subject import check_environment
from retrain.cli.run import main
from retrain.errors import AdapterError, ConfigError, UserCodeError
from retrain.observe.run_dir import read_metrics
from retrain.rollout.endings import as_result
from retrain.scoring import WeightedReward
from retrain.supervision import boundary
from retrain.supervision.crashes import ProgramError, kinds_of
from retrain.types import Completion, StopReason, Trajectory, Turn
from tests.agent_kit import CALL, PROMPT, Echo, config_of, played, written

ROOT = Path(__file__).parent.parent
AGENTS = """
import asyncio, sys, threading
from pathlib import Path

async def solve(prompt, base_url, api_key, model, extra=3):
    return await asyncio.to_thread(call, prompt, base_url, api_key) + model + "\\n"

def plain(messages, metadata, **rest):
    said = call(messages[0]["content"], rest["base_url"], rest["api_key"])
    call("", rest["base_url"], rest["api_key"], "/reward", reward=0.5)
    return {"completion": said * 2, "reward": 1.0, "n": metadata["n"], "folder": rest["folder"]}

def in_process(prompt, folder):
    print("not the result")
    return {"completion": call(prompt), "here": folder == str(Path.cwd())}

def picky(prompt, base_url, api_key):
    return 1 / (call(prompt, base_url, api_key) == "hello")

def unread(prompt, base_url, api_key):
    class ValidationError(Exception): pass
    said = call(prompt, base_url, api_key)
    if said != "42":
        raise ValidationError("no total\\n  in the answer")

def unsound(prompt, base_url, api_key):
    unread(prompt + "?", base_url, api_key)
    raise unread.__globals__["json"].JSONDecodeError("no total", "", 0)

def never(prompt):
    return ""

def uses_sdk():
    import an_sdk
    an_sdk.post()

def client(base_url):
    raise RuntimeError("set the OPENAI_API_KEY environment variable")

def lost(folder):
    (Path(folder) / "notes").read_text()

def second(prompt, metadata, base_url, api_key):
    return {1: call}[metadata["n"]](prompt, base_url, api_key)

def thing(prompt, base_url, api_key):
    return object()

def question(question):
    return ""

async def greedy(prompt, base_url, api_key):
    for _ in range(5):
        await asyncio.to_thread(call, prompt, base_url, api_key)

async def hangs(prompt, base_url, api_key):
    try:
        await asyncio.to_thread(call, prompt, base_url, api_key)
    except Exception:
        pass
    await asyncio.Event().wait()

async def swallows(prompt, base_url, api_key):
    for _ in range(2):  # the deadline, and the end of the instance
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass
    await asyncio.Event().wait()

def blocks(prompt, base_url, api_key):
    call(prompt, base_url, api_key)
    RELEASED.wait(60)

RELEASED = threading.Event()
keys, refused = [], []
async def leaves(prompt, base_url, api_key):
    async def late():
        await asyncio.sleep(0)
        while len(keys) < 2:
            await asyncio.sleep(0.01)
        for url, key in ((base_url, keys[1][1]), (keys[1][0], api_key)):
            try:
                await asyncio.to_thread(call, "late", url, key)
            except Exception as error:
                refused.append(error.code)
    said = await asyncio.to_thread(call, prompt, base_url, api_key)
    keys.append((base_url, api_key))
    if len(keys) == 1:
        task = asyncio.create_task(late())
    else:
        while len(refused) < 2:
            await asyncio.sleep(0.01)
    return f"{said} {refused}"

if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "file":
        text = call(rest[0] + sys.stdin.read() + Path("sub/task.txt").read_text())
        Path("out.txt").write_text(text + os.environ["OWN"])
        print("log"); print("warned", file=sys.stderr)
        raise SystemExit(7)
    if what == "sdk":
        uses_sdk()
    if what == "crash":
        raise SystemExit("the model " + call("said"))
    print(call(rest[0]), "\\n")
"""


@pytest.fixture
def agents(tmp_path: Path) -> Path:
    return written(tmp_path, AGENTS)


async def one(keys: dict[str, Any], **more: Any) -> Trajectory:
    [trajectory] = (await played(keys, **more)).trajectories
    return trajectory


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


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
async def test_a_program_needs_no_python() -> None:
    body = '{"messages": [{"role": "user", "content": "{prompt}"}]}'
    script = (
        'curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" '
        '-H \'Content-Type: application/json\' -d @body.json | grep -o \'"content": "[^"]*"\''
    )
    said = await one({"command": ["sh", "-c", script], "files": {"body.json": body}})
    assert (said.outcome, said.completion) == ("ok", '"content": "a="')


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


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_model_did_is_a_result_although_the_agent_fails(
    tmp_path: Path, kind: str
) -> None:
    keys = ending(tmp_path, "other", kind)
    assert await how_it_ended(keys, "length") == ("ok", {"truncated": "length"})
    outcome, info = await how_it_ended(ending(tmp_path, "caused", kind))
    assert outcome == "ok"
    assert "JSONDecodeError" in info["unusable"]
    # In the output of a program, a class has no bases.
    outcome, info = await how_it_ended(ending(tmp_path, "rejected", kind))
    assert outcome == ("ok" if kind == "function" else "infra_error")
    assert kind != "function" or info == {"unusable": "TooLong: not\nvalid"}


@pytest.mark.parametrize("kind", KINDS)
async def test_what_the_model_did_not_do_stays_a_fault(tmp_path: Path, kind: str) -> None:
    for how in ("away", "down") if kind == "function" else ("away",):
        keys = ending(tmp_path, how, kind) | {"on_error": "score"}
        assert await how_it_ended(keys, "length") == ("infra_error", {}), "no reward for an outage"
    assert await how_it_ended(ending(tmp_path, "handled", kind)) == ("infra_error", {})
    keys = ending(tmp_path, "other", kind)
    assert await how_it_ended(keys) == ("infra_error", {})
    outcome, info = await how_it_ended(keys | {"on_error": "score"})
    assert (outcome, list(info)) == ("ok", ["unusable"])
    assert "KeyError" in info["unusable"]


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


def ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return True
    return state == "Z"


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
    monkeypatch.setattr(scripted, "SLOW_SECONDS", 0.0)
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
)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["trl", "tinker", "weaver"])
def test_the_included_agent_trains_on_every_backend(tmp_path: Path, backend: str) -> None:
    """The reward rises on trl; the others take the same steps."""
    pytest.importorskip("openai")
    short = {"trl": ["train.total_train_steps=14", *QUICK]}
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
