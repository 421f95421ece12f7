"""The boundary of user code: a zoo of what it may do, and who is to blame."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import anyio
import pytest

from benchmarks.mock_engine import mock_config
from retrain.environment import Environment, StepResult
from retrain.errors import MAX_TEXT, LateError, RunError, UserCodeError
from retrain.observe.failure import ERROR
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.supervision import boundary
from retrain.supervision.boundary import Actor, apart, outcomes
from tests.faults_kit import Panic
from tests.pipe_kit import events


def raises(error: BaseException) -> Callable[[], Awaitable[Any]]:
    async def call() -> None:
        raise error

    return call


async def cancels_itself() -> None:
    own = asyncio.current_task()
    assert own is not None
    own.cancel()
    await asyncio.sleep(1)


async def cancels_itself_and_returns() -> None:
    own = asyncio.current_task()
    assert own is not None
    own.cancel()


async def hangs() -> None:
    await asyncio.Event().wait()


async def answers_late() -> str:
    with contextlib.suppress(asyncio.CancelledError):
        await hangs()
    return "late"


async def swallows_and_goes_on() -> None:
    for _ in range(2):
        with contextlib.suppress(asyncio.CancelledError):
            await hangs()


async def times_out_itself() -> None:
    async with asyncio.timeout(0):
        await hangs()


async def cancels_a_scope_of_its_own() -> str:
    with anyio.CancelScope() as scope:
        scope.cancel()
        await anyio.sleep(1)
    return "good"


async def good() -> str:
    await asyncio.sleep(0)
    return "good"


ZOO: dict[str, tuple[Callable[[], Any], type[UserCodeError] | None]] = {
    "good": (good, None),
    "its own scope": (cancels_a_scope_of_its_own, None),
    "plain": (lambda: "not async", UserCodeError),
    "raises": (raises(ValueError("bad")), UserCodeError),
    "50 MB": (raises(ValueError("x" * 50_000_000)), UserCodeError),
    "SystemExit": (raises(SystemExit(3)), UserCodeError),
    "a panic": (raises(Panic("broken")), UserCodeError),
    "GeneratorExit": (raises(GeneratorExit()), UserCodeError),
    "StopAsyncIteration": (raises(StopAsyncIteration()), UserCodeError),
    "CancelledError": (raises(asyncio.CancelledError()), UserCodeError),
    "cancels itself": (cancels_itself, UserCodeError),
    "cancels itself and returns": (cancels_itself_and_returns, UserCodeError),
    "its own timeout": (times_out_itself, UserCodeError),
    "hangs": (hangs, LateError),
    "answers late": (answers_late, LateError),
    "goes on": (swallows_and_goes_on, LateError),
}


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary, "STUCK_SECONDS", 0.02)


@pytest.mark.parametrize("name", ZOO)
async def test_an_actor_survives_the_zoo_and_names_the_culprit(name: str) -> None:
    call, kind = ZOO[name]
    before, actor = asyncio.all_tasks(), Actor("it")
    seconds = 0.03 if kind is LateError else 30
    if kind is None:
        assert await actor.call("it.step", call, seconds, "step") == "good"
    else:
        with pytest.raises(kind, match=r"^it\.step") as caught:
            await actor.call("it.step", call, seconds, "step")
        assert type(caught.value) is kind
        assert len(str(caught.value)) < 2 * MAX_TEXT
    if name not in ("goes on", "GeneratorExit"):
        assert await actor.call("it.close", good, 30, "close") == "good"
    assert await actor.end() == (name != "goes on")
    left = asyncio.all_tasks() - before
    assert left <= boundary._abandoned
    for task in left:  # it swallows two cancellations
        task.cancel()
        await asyncio.wait([task])


@pytest.mark.parametrize("name", ZOO)
async def test_calls_at_once_affect_only_themselves(name: str) -> None:
    call, kind = ZOO[name]
    seconds = 0.03 if kind is LateError else 30
    first, second = await outcomes("it", lambda c: c(), [call, good], seconds, "reward")
    assert second == "good"
    assert (first if kind is None else type(first)) == (kind or "good")
    for task in set(boundary._abandoned):
        while not task.done():
            task.cancel()
            await asyncio.sleep(0)


async def test_all_calls_of_an_actor_run_in_one_task() -> None:
    tasks, actor = set[Any](), Actor("it")

    async def noted() -> None:
        tasks.add(asyncio.current_task())

    for _ in range(3):
        await actor.call("it", noted, 30, "step")
    assert await actor.end()
    assert len(tasks) == 1
    with pytest.raises(UserCodeError):
        await actor.call("it", noted, 30, "step")


async def test_a_call_is_given_up_with_its_caller() -> None:
    began, ended, actor = asyncio.Event(), list[str](), Actor("it")

    async def waits() -> None:
        began.set()
        try:
            await hangs()
        finally:
            ended.append("call")

    caller = asyncio.create_task(actor.call("it", waits, 30, "step"))
    await began.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await actor.call("it.close", good, 30, "close") == "good"
    assert ended == ["call"]
    assert await actor.end()


@pytest.mark.parametrize("error", [ValueError("bad"), SystemExit(3), Panic("broken")])
async def test_code_apart_raises_exceptions_and_nothing_else(error: BaseException) -> None:
    with pytest.raises(ValueError if isinstance(error, ValueError) else UserCodeError):
        await apart("it", raises(error))
    assert await apart("it", good) == "good"
    assert await apart("it", len, "abc") == 3


# --- in a run ---------------------------------------------------------------------------------


class CancelsAll(Environment):
    """Cancels all tasks of the loop after two steps, as clean-up code does."""

    calls = 0

    async def step(self, action: Any) -> StepResult:
        CancelsAll.calls += 1
        if CancelsAll.calls == 40:
            for task in asyncio.all_tasks():
                task.cancel()
            await asyncio.sleep(1)
        return StepResult([], float(len(action.text)), True, False, {})


async def test_code_that_cancels_all_tasks_fails_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    CancelsAll.calls = 0
    config = mock_config(
        tmp_path, environment={"type": "tests.test_boundary:CancelsAll"}, rewards=[]
    )
    run = asyncio.create_task(train(config))  # whoever waits for it isn't cancelled, but it is
    run_ended = asyncio.Event()
    run.add_done_callback(lambda _: run_ended.set())
    with contextlib.suppress(asyncio.CancelledError):
        await run_ended.wait()
    await asyncio.wait([run], timeout=30)
    with pytest.raises(RunError):
        run.result()
    assert events(tmp_path, "end")[0]["status"] == "failed"
    assert (tmp_path / ERROR).exists()
    assert Checkpoints(tmp_path / "checkpoints").newest() is not None


EXITS = """
import asyncio, sys
from retrain import Environment, StepResult
class Exits(Environment):
    calls = 0
    async def step(self, action):
        Exits.calls += 1
        if Exits.calls == 40:
            self.task = asyncio.create_task(self.leave())
            await asyncio.sleep(0)
        return StepResult([], float(len(action.text)), True, False, {})
    async def leave(self):
        sys.exit(3)
"""


def test_sys_exit_in_a_task_of_user_code_fails_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(EXITS)
    program = (
        "import sys\nfrom pathlib import Path\nfrom benchmarks.mock_engine import mock_config\n"
        "from retrain.pipeline import train\nfrom retrain.cli.process import drive, exit_code\n"
        f"config = mock_config(Path({str(tmp_path / 'run')!r}),"
        f" environment={{'type': {str(tmp_path / 'exits.py') + ':Exits'!r}}}, rewards=[])\n"
        "sys.exit(exit_code(lambda: drive(train(config)) and 0))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert events(tmp_path / "run", "end")[0]["status"] == "failed"
    assert "SystemExit" in (tmp_path / "run" / ERROR).read_text()
    assert Checkpoints(tmp_path / "run" / "checkpoints").newest() is not None
