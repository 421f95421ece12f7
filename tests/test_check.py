"""The conformance kit: good environments pass, each broken promise is found."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import pytest

from retrain.check import Finding, check_environment
from retrain.check.bench import INSTANCES
from retrain.cli.commands import command
from retrain.environment import Action, Environment, StepResult, ToolSpec
from retrain.types import Message, Prompt


class Guess(Environment):
    """Two turns, with a tool: everything that is allowed."""

    tools = (ToolSpec("hint", "a hint"),)

    async def reset(self, prompt: Prompt) -> list[Message]:
        self.turn = 0
        return [*prompt.messages]

    async def step(self, action: Action) -> StepResult:
        await asyncio.sleep(0)
        self.turn += 1
        hint: list[Message] = [{"role": "tool", "content": "higher"}]
        return StepResult(hint, 0.5, self.turn == 2, False, {"turn": self.turn})


class Broken(Environment):
    """One broken promise at a time."""

    fault = ""
    played: ClassVar[list[int]] = []

    async def reset(self, prompt: Prompt) -> Any:
        return {"text": "hello", "none": []}.get(self.fault, prompt.messages)

    async def step(self, action: Action) -> Any:
        self.played.append(1)
        answers = {
            "four": ([], 0.0, True, {}),
            "reward": ([], "1", True, False, {}),
            "nan": ([], float("nan"), True, False, {}),
            "info": ([], 0.0, True, False, None),
            "observation": ("higher", 0.0, True, False, {}),
            "content": ([{"role": "user", "content": None}], 0.0, False, False, {}),
            "shared": ([], float(len(self.played)), True, False, {}),
        }
        if self.fault == "raises":
            raise KeyError("x")
        if self.fault == "task":
            self.task = asyncio.create_task(asyncio.sleep(60), name="forgotten")
        if self.fault == "blocks":
            until = time.thread_time() + 0.4  # of CPU time: other processes can't hide it
            while time.thread_time() < until:
                pass
        if self.fault == "swallows":
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(0)
        return answers.get(self.fault, ([], 0.0, True, False, {}))

    async def close(self) -> None:
        if self.fault == "close":
            raise OSError("the connection is gone")


def broken(fault: str) -> type[Environment]:
    return type("Faulty", (Broken,), {"fault": fault, "played": []})


async def bad(make: Any) -> list[Finding]:
    found = [finding for finding in await check_environment(make) if not finding.good]
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    return found


async def test_a_good_environment_passes() -> None:
    findings = await check_environment(Guess)
    assert [f.what for f in findings if not f.good] == []
    assert "hint" in findings[0].what


@pytest.mark.parametrize(
    ("fault", "advice"),
    [
        ("text", "Faulty.reset"),
        ("none", "Faulty.reset"),
        ("four", "Faulty.step"),
        ("reward", "step returned the reward '1', expected a finite number"),
        ("nan", "step returned the reward nan"),
        ("info", "step returned the info None, expected a dict"),
        ("observation", "'higher'"),
        ("content", "Faulty.step: observation[0]"),
        ("raises", "KeyError: 'x' (test_check.py"),
        ("swallows", "don't suppress CancelledError"),
        ("close", "Faulty.close"),
        ("task", "end them in close(): forgotten"),
    ],
)
async def test_a_broken_promise_is_found(fault: str, advice: str) -> None:
    (finding,) = await bad(broken(fault))
    assert advice in finding.advice


async def test_a_step_that_blocks_the_loop_is_found_and_ends_the_check_early() -> None:
    findings = await check_environment(broken("blocks"))
    assert "a cancelled step ends immediately" not in [f.what for f in findings]
    assert re.match(r"\d of 8 ", findings[1].advice)
    (finding,) = [f for f in findings if not f.good]
    assert finding.what == "the event loop is blocked"
    assert re.match(r"Broken.step \(test_check.py:\d+\) ", finding.advice)
    assert "asyncio.to_thread" in finding.advice


@pytest.mark.parametrize("hook", ["setup", "reset", "close", "run", "cancelled", "reward"])
def test_any_code_of_a_config_that_blocks_the_loop_is_found(
    hook: str, own_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "own.py").write_text(BLOCKING)
    kind = {"run": "Agent", "cancelled": "Cancelled", "reward": "SingleTurn"}.get(hook, "Steps")
    keys = [f"environment={{type: own.py:{kind}}}", *["rewards=own.py:slow"] * (hook == "reward")]
    (own_folder / "task.yaml").write_text("prompts: [{prompt: a, answer: b}]")
    monkeypatch.setenv("HOOK", hook)
    assert command(["check", "task.yaml", *keys]) == 1
    out = capsys.readouterr().out
    assert re.search(r"FAIL  the event loop is blocked\n +\w.*own.py:9\) ", out)
    assert ("FAIL  a cancelled step ends immediately" in out) == (hook == "cancelled")


BLOCKING = """
import asyncio, httpx, os, time
from retrain import Environment, StepResult, reward

async def wait(hook):
    if os.environ["HOOK"] == hook and not done:
        if hook != "cancelled":
            done.append(hook)
        time.sleep(0.4)

done = []

class SingleTurn(Environment):
    pass

class Steps(Environment):
    async def setup(self): await wait("setup")
    async def reset(self, prompt):
        await wait("reset")
        return prompt.messages
    async def step(self, action): return StepResult([], 0.0, True, False, {})
    async def close(self): await wait("close")

class Cancelled(Environment):
    async def step(self, action):
        try:
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            await wait("cancelled")
            raise
        return StepResult([], 0.0, True, False, {})

class Agent(Environment):
    async def run(self, endpoint):
        await wait("run")
        async with httpx.AsyncClient() as client:
            body = {"model": "m", "messages": self.prompt.messages}
            headers = {"authorization": f"Bearer {endpoint.api_key}"}
            url = f"{endpoint.base_url}/chat/completions"
            await client.post(url, json=body, headers=headers)
        return StepResult([], 0.0, True, False, {})

@reward
async def slow(completion):
    await wait("reward")
    return float(len(completion))
"""


async def test_shared_state_is_found() -> None:
    again, at_once = await bad(broken("shared"))
    assert "reset" in again.advice
    assert at_once.what.startswith(f"{INSTANCES} concurrent instances")


async def test_an_environment_that_only_one_instance_can_set_up_leaks_no_task() -> None:
    class Once(Broken):
        async def setup(self) -> None:
            if self.played:
                raise OSError("the port is taken")

    what = {f.what for f in await bad(type("Only", (Once,), {"played": []}))}
    assert f"{INSTANCES} concurrent instances behave like one" in what
    assert "no task is leaked" not in what


async def test_a_plain_step_is_told_to_be_async() -> None:
    class Plain(Environment):
        def step(self, action: Action) -> StepResult:  # type: ignore[override]  # the mistake
            return StepResult([], 0.0, True, False, {})

    (finding,) = await bad(Plain)
    assert "`async def`" in finding.advice


async def test_calls_without_an_error_fit_the_tools_schema() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}

    class Adder(Environment):
        tools = (ToolSpec("add", "a sum", schema),)

        async def step(self, action: Action) -> StepResult:
            answers = [
                Message(role="tool", content=call.error or str(1 + call.arguments["a"]))
                for call in action.tool_calls
            ]
            seen.update(answer["content"] for answer in answers)
            return StepResult(answers, 0.0, not answers, False, {})

    seen: set[str] = set()
    assert all(finding.good for finding in await check_environment(Adder))
    unknown = "there is no tool 'no_such_tool': the tools are add"
    assert {"2", "arguments: 'a' is a required property", unknown} < seen


@pytest.mark.parametrize(
    ("tools", "advice"),
    [
        (("hint",), "got 'hint', expected ToolSpec("),
        ((ToolSpec("a", ""), ToolSpec("a", "")), "got two tools named 'a'"),
        ((ToolSpec("a", "", {"type": object()}),), "JSON"),
    ],
)
async def test_bad_tools_are_found(tools: Any, advice: str) -> None:
    (finding,) = await bad(type("Tooled", (Guess,), {"tools": tools}))
    assert finding.what == "tools are valid"
    assert advice in finding.advice


def test_the_command_checks_a_file_and_a_config(
    own_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (own_folder / "own.py").write_text(
        "from retrain import Environment\n"
        "class Own(Environment):\n    def __init__(self, size: int): pass\n"
        "class Bad(Environment):\n    async def reset(self, prompt): return 5\n"
    )
    assert command(["check", "own.py:Own", "size=3"]) == 0
    assert command(["check", "own.py:Own"]) == 2
    assert "environment.size" in capsys.readouterr().err
    assert command(["check", "own.py:Bad"]) == 1
    assert "FAIL  reset and step" in capsys.readouterr().out
    (own_folder / "task.yaml").write_text("prompts: [{prompt: a, answer: b}]\nrewards: exact_match")
    assert command(["check", "quickstart"]) == 0
    assert command(["check", "own.py:Own", "size=3", "--reply", "b"]) == 2
    assert "own.py:Own" in capsys.readouterr().err
    assert command(["check", "task.yaml", "model=runs/sft/final"]) == 0
    first, advice, fit, *_ = capsys.readouterr().out.splitlines()
    assert first == "warn  the model does not exist yet"
    assert advice.startswith(f"      model: folder not found: {own_folder}/runs/sft/final")
    assert fit.startswith("ok    all parts of the config load")


def checked_in_half_a_second(folder: Path, target: str) -> subprocess.CompletedProcess[str]:
    """`retrain check target` in a process that the watch ends after 0.5 s without the loop."""
    script = (
        "import sys, retrain.check.bench\nretrain.check.bench.DEADLINE = 0.5\n"
        f"from retrain.cli.commands import command\nsys.exit(command(['check', '{target}']))"
    )
    return subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=folder,
        check=False,
    )


def test_a_step_that_blocks_the_loop_is_named_and_the_command_ends(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time\nfrom retrain import Environment\nclass Own(Environment):\n"
        "    async def step(self, action):\n        time.sleep(3600)\n"
    )
    done = checked_in_half_a_second(tmp_path, "own.py:Own")
    assert done.returncode == 1
    assert "Own.step (own.py:5)" in done.stdout


def test_prompts_may_take_longer_to_load_than_a_call_may_take(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "import time\ndef rows():\n    time.sleep(0.8)\n    return ['a']\n"
    )
    (tmp_path / "task.yaml").write_text("prompts: own.py:rows\nrewards: exact_match")
    done = checked_in_half_a_second(tmp_path, "task.yaml")
    assert "ok    all parts of the config load" in done.stdout
