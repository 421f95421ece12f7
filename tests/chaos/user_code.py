"""Bad user code: each fault in a real run, with the outcome that it must have.

A run has eight prompts; the environment or the reward misbehaves for one of them. A fault of a
rollout costs the rollouts of that prompt and nothing else: the run completes, and so does a resume
of it. A fault of the process ends it in seconds, with the cause in error.txt.

    python -m tests.chaos.user_code
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from retrain.environment import Environment, StepResult
from retrain.observe.journal import read_lines
from tests.chaos.processes import play_table, run_forked

LETTERS = "abcdefgh"
FAULTY = "c="
"""The prompt whose rollouts misbehave."""


@dataclass(frozen=True)
class Fault:
    """A row of the table."""

    name: str
    hook: str
    """setup, reset, step, close or reward; `setup` and `close` can't see the prompt."""
    call: Callable[[], Any]
    """What the hook does; it may be async. Its result is returned by the hook unless it is None."""
    outcome: str = "infra_error"
    """The outcome of the faulty rollouts; `ok` where the fault must not matter."""
    code: int = 0
    """The exit code of the run."""
    words: str = ""
    """A regular expression for the end of the output, and for error.txt where `code` is not 0."""


class BadStrError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def throw(error: BaseException) -> Callable[[], Any]:
    def call() -> None:
        raise error

    return call


def give(value: Any) -> Callable[[], Any]:
    return lambda: value


async def hang() -> None:
    await asyncio.sleep(1000)


async def swallow_once() -> None:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(1000)


async def cancel_self() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(1)


async def cancel_later() -> None:
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().call_soon(task.cancel)
    await asyncio.sleep(5)


def recurse(depth: int = 0) -> int:
    return recurse(depth + 1) + 1


async def leak_task() -> None:
    asyncio.get_running_loop().create_task(asyncio.sleep(1000), name="leaked")


async def failing_task() -> None:
    async def fails() -> None:
        raise ValueError("in a task of its own")

    asyncio.get_running_loop().create_task(fails())


def child_process() -> None:
    subprocess.Popen(["sleep", "3"], start_new_session=True)


def fork_and_stay() -> None:
    if not os.fork():
        time.sleep(5)
        os._exit(0)


def hold_with_regex() -> None:
    re.match(r"(a+)+$", "a" * 64 + "b")


def hold_in_c() -> None:
    ctypes.PyDLL(None).sleep(1000)


def segfault() -> None:
    ctypes.string_at(0)


def observe(value: Any) -> Callable[[], Any]:
    return lambda: StepResult(value, 0.0, False, False, {})


def cyclic() -> dict[str, Any]:
    info: dict[str, Any] = {}
    info["self"] = info
    return info


OK = (0.0, True, False)
HELD = "no Python code ran"
FAULTS = [
    *(
        Fault(f"{type(error).__name__} in {hook}", hook, throw(error))
        for hook in ("reset", "step", "reward")
        for error in (
            ValueError("bad"), BadStrError(), SystemExit(3), GeneratorExit(),
            asyncio.CancelledError(), MemoryError(), StopIteration(), TimeoutError(),
        )
    ),
    *(
        Fault(f"{call.__name__} in {hook}", hook, call, outcome)
        for hook in ("reset", "step", "reward")
        for call, outcome in (
            (hang, "timeout"), (swallow_once, "timeout"), (cancel_self, "infra_error"),
            (cancel_later, "infra_error"), (recurse, "infra_error"),
        )
    ),
    *(
        Fault(f"the observation {name}", "step", observe(value), "invalid|infra_error")
        for name, value in {
            "5": 5, "None": None, "a generator": (i for i in "ab"), "a dict": {"role": "user"},
            "[7]": [7], "text": "text", "a set": {"a"}, "bytes": b"ab",
            "NaN content": [{"role": "user", "content": float("nan")}],
            "an object": [{"role": "user", "content": object()}],
        }.items()
    ),
    *(
        Fault(f"step returns {name}", "step", give(value))
        for name, value in {
            "7": 7, "a pair": (1, 2), "six": (1, 2, 3, 4, 5, 6), "a string": "abcde",
            "a NaN reward": ([], float("nan"), True, False, {}),
            "a text as reward": ([], "1", True, False, {}),
            "10**400 as reward": ([], 10**400, True, False, {}),
            "a list as info": ([], 0.0, True, False, [1]),
        }.items()
    ),
    *(
        Fault(f"reset returns {name}", "reset", give(value), "invalid|infra_error")
        for name, value in {"7": 7, "[7]": [7], "a string": "hi", "no messages": []}.items()
    ),
    *(
        Fault(f"the reward {name}", "reward", give(value))
        for name, value in {
            "NaN": float("nan"), "inf": float("inf"), "text": "1", "10**400": 10**400,
            "a list": [1.0], "1e38": 1e38,
        }.items()
    ),
    Fault("a cyclic info", "step", lambda: StepResult([], *OK, cyclic()), "ok|infra_error"),
    Fault("an info of 5 MB", "step", lambda: StepResult([], *OK, {"x": "y" * 5_000_000}), "ok"),
    Fault("an info of objects", "step", lambda: StepResult([], *OK, {"x": object()}), "ok"),
    *(
        Fault(f"{call.__name__} in step", "step", call, "ok")
        for call in (leak_task, failing_task, child_process, fork_and_stay)
    ),
    Fault("chdir in step", "step", lambda: os.chdir("/"), "ok"),
    Fault("a flood of output", "step", lambda: print("x" * 1_000_000), "ok"),
    *(
        Fault(f"{name} in close", "close", call, "ok")
        for name, call in {
            "raise": throw(ValueError("bad")), "hang": hang, "cancel": cancel_self,
            "swallow": swallow_once, "bad str": throw(BadStrError()),
        }.items()
    ),
    *(
        Fault(f"{name} in setup", "setup", call, code=1, words="first error|First error")
        for name, call in {
            "raise": throw(ValueError("bad")), "hang": hang, "cancel": cancel_self,
            "cancel later": cancel_later, "exit": throw(SystemExit(3)),
        }.items()
    ),
    Fault("time.sleep in step", "step", lambda: time.sleep(60), code=1, words="blocked for"),
    Fault("a regex in step", "step", hold_with_regex, code=-6, words=HELD),
    Fault("a regex in a reward", "reward", hold_with_regex, code=-6, words=HELD),
    Fault("a C call in a reward", "reward", hold_in_c, code=-6, words=HELD),
    Fault("a segfault in step", "step", segfault, code=-11, words="without"),
    Fault("a segfault in a reward", "reward", segfault, code=-11, words="without"),
    Fault("os._exit in step", "step", lambda: os._exit(7), code=7, words="without"),
    Fault("os._exit in a reward", "reward", lambda: os._exit(7), code=7, words="without"),
]  # fmt: skip
BY_NAME = {fault.name: fault for fault in FAULTS}


class Misbehaving(Environment):
    """One turn; the hook of `fault` does what its row says."""

    def __init__(self, fault: str) -> None:
        self.fault = BY_NAME[fault]

    async def setup(self) -> None:
        await self._do("setup")

    async def close(self) -> None:
        await self._do("close")

    async def reset(self, prompt: Any) -> Any:
        returned = await self._do("reset") if prompt.text == FAULTY else None
        return prompt.messages if returned is None else returned

    async def step(self, action: Any) -> Any:
        returned = await self._do("step") if self.prompt.text == FAULTY else None
        return StepResult([], *OK, {}) if returned is None else returned

    async def _do(self, hook: str) -> Any:
        returned = self.fault.call() if self.fault.hook == hook else None
        return await returned if asyncio.iscoroutine(returned) else returned


def scored(prompt: str, completion: str, fault: str) -> Any:
    """Share of right letters. A plain function, as most rewards are."""
    returned = BY_NAME[fault].call() if prompt == FAULTY else None
    return share(prompt, completion) if returned is None else returned


async def scored_async(prompt: str, completion: str, fault: str) -> Any:
    returned = await BY_NAME[fault].call() if prompt == FAULTY else None
    return share(prompt, completion) if returned is None else returned


def share(prompt: str, completion: str) -> float:
    return sum(letter == prompt[0] for letter in completion) / 4


def config(fault: Fault) -> dict[str, Any]:
    rewards = []
    if fault.hook == "reward":
        function = "scored_async" if asyncio.iscoroutinefunction(fault.call) else "scored"
        rewards = [{"type": f"tests.chaos.user_code:{function}", "fault": fault.name}]
    return {
        "model": "tiny",
        "prompts": {"type": "list", "rows": [f"{letter}=" for letter in LETTERS]},
        "environment": {"type": "tests.chaos.user_code:Misbehaving", "fault": fault.name},
        "rewards": rewards or ["tests.chaos.user_code:share"],
        "algorithm": {"type": "grpo", "group_size": 2},
        "backend": {"type": "benchmarks.mock_engine:MockOptions"},
        "sampling": {"max_tokens": 4},
        "chat": {"template": "none"},
        "staleness": {"target": 1},
        "train": {"total_train_steps": 8, "groups_per_step": 2, "stop_after_flat_steps": 100},
        "checkpoint": {"every": 1},
        "deadlines": {
            "setup": 0.3, "reset": 0.3, "step": 0.3, "reward": 0.3, "close": 0.3, "blocked": 2,
            "stall": 5,
        },
    }  # fmt: skip


def play(fault: Fault, folder: Path) -> list[str]:
    """Run with this fault, and once more on its last checkpoint; returns what went wrong."""
    home = folder / re.sub(r"\W+", "_", fault.name)
    home.mkdir()
    (home / "run.yaml").write_text(yaml.safe_dump(config(fault)))
    run_dir, log = home / "run", home / "log.txt"
    argv = [str(home / "run.yaml"), "--run-dir", str(run_dir)]
    code = run_forked(argv, log, limit=30.0)
    said = log.read_text(errors="replace")[-3000:]
    if code != fault.code:
        return [f"exit code {code}, expected {fault.code}: {said[-300:]}"]
    if code:
        return _words(fault, run_dir, said)
    wrong = _outcomes(fault, run_dir)
    code = run_forked([*argv, "--resume", "train.total_train_steps=10"], log, limit=30.0)
    return wrong if code == 0 else [*wrong, f"its resume: exit code {code}"]


def _words(fault: Fault, run_dir: Path, said: str) -> list[str]:
    file, until = run_dir / "error.txt", time.monotonic() + 5.0
    while not file.exists():  # the watcher writes it, after the process ended
        if time.monotonic() > until:
            return ["there is no error.txt"]
        time.sleep(0.01)
    places = {"the output": said, "error.txt": file.read_text(errors="replace")}
    return [
        f"{place} has no {fault.words!r}: {text[-300:]}"
        for place, text in places.items()
        if not re.search(fault.words, text)
    ]


def _outcomes(fault: Fault, run_dir: Path) -> list[str]:
    wrong = []
    seen = {True: set(), False: set()}  # type: dict[bool, set[str]]
    for line in read_lines(run_dir / "rollouts.jsonl"):
        seen[line["ticket"].split(".")[1] == str(LETTERS.index(FAULTY[0]))].add(line["outcome"])
    if seen[False] != {"ok"}:
        wrong.append(f"the other rollouts have the outcomes {seen[False]}")
    if not seen[True] or not all(re.fullmatch(fault.outcome, outcome) for outcome in seen[True]):
        wrong.append(f"the faulty rollouts have {seen[True]}, expected {fault.outcome}")
    return wrong


if __name__ == "__main__":
    sys.exit(play_table(FAULTS, play, "faults"))
