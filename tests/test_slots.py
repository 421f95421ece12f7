"""Slots: one task per environment instance, and faults of user code that stay where they are."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.mock_engine import CharacterTokenizer, MockAdapter, MockOptions, mock_config
from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.check import check_environment
from retrain.environment import Environment, StepResult, ToolSpec
from retrain.errors import UserCodeError, blame, shown
from retrain.pipeline import train
from retrain.prompts import PromptSource, Row
from retrain.rollout import Rollouts, Slot
from retrain.scoring import RewardCalculator, Scorer, WeightedReward
from retrain.supervision import boundary
from retrain.supervision.boundary import apart
from retrain.supervision.jsonable import plain
from retrain.types import Group, Prompt
from tests.pipe_kit import events, rollouts_of

PROMPT = Prompt("0.0.0", ({"role": "user", "content": "a="},), "aaaa")
SIZE = 4


class BadText(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class Rude:
    """Raises in every method that a check could call."""

    def __bool__(self) -> bool:
        raise SystemExit

    __len__ = __iter__ = __eq__ = __repr__ = __float__ = __bool__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


def turn(observation: Any, *, ends: Any = False, info: Any = None) -> Any:
    return observation, 1.0, ends, False, {} if info is None else info


USER = {"role": "user", "content": "go"}
GARBAGE: dict[str, Any] = {
    "none": None,
    "five": turn(5),
    "no messages": turn(None),
    "generator": turn(USER for _ in range(2)),
    "a dict": turn(dict(USER)),
    "not messages": turn([5]),
    "not JSON": turn([{**USER, "when": object()}]),
    "NaN": turn([{**USER, "score": float("nan")}]),
    "odd keys": turn([{**USER, ("a", 1): "x"}]),
    "at the end": turn([{"role": "user", "content": 5}], ends=True),
    "rude": Rude(),
    "rude ends": turn([], ends=Rude()),
    "rude messages": turn([Rude()]),
    "rude info": turn([], info=Rude()),
}
RAISED = (GeneratorExit, SystemExit, BadText, StopAsyncIteration, asyncio.CancelledError)


class Faulty(Environment):
    """Three turns; one fault in one method."""

    def __init__(self, fault: str = "", where: str = "") -> None:
        self.fault, self.where = fault, where
        if where == "init":
            self._now()

    async def setup(self) -> None:
        await self._maybe("setup")

    async def reset(self, prompt: Prompt) -> Any:
        self.turns = 0
        answer = await self._maybe("reset")
        return prompt.messages if answer is None else answer

    async def step(self, action: Any) -> Any:
        self.turns += 1
        answer = await self._maybe("step") if self.turns == 2 else None
        if answer is not None:
            return answer[0]
        await asyncio.sleep(0)
        return [{"role": "user", "content": action.text}], 0.5, self.turns == 3, False, {"t": 1}

    async def close(self) -> None:
        await self._maybe("close")

    def _now(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        for error in RAISED:
            if self.fault == error.__name__:
                raise error()
        if self.fault == "cancels itself":
            task.cancel()
        if self.fault == "is cancelled soon":
            asyncio.get_running_loop().call_soon(task.cancel)

    async def _maybe(self, where: str) -> Any:
        if where != self.where:
            return None
        self.where = ""  # once
        self._now()
        if self.fault == "is cancelled soon":
            await asyncio.Event().wait()
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "answers late":
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
        if self.fault == "never ends":
            for _ in range(9):
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.1)
        if self.fault in GARBAGE and where != "setup":
            return [GARBAGE[self.fault]]  # for reset, a message of that kind
        return None


LATE = ("hangs", "answers late", "never ends")
FAULTS = (*GARBAGE, *(e.__name__ for e in RAISED), "cancels itself", "is cancelled soon", *LATE)


def slot_of(
    *makes: Callable[[], Environment], rewards: Any = (), faults: Any = None, **limits: float
) -> Slot:
    """A slot whose first instances are made so, the others by `Faulty()`."""
    config = mock_config(Path("unused"), deadlines=limits, rollout={"max_turns": 5})
    characters: Any = CharacterTokenizer()  # as the engine's
    chat = Chat(characters, template="none", tools=Hermes())
    coming = iter(makes)
    return Slot(
        SIZE,
        lambda: next(coming, Faulty)(),
        Rollouts(config, MockAdapter(MockOptions(), config), chat, 4096),
        Scorer([WeightedReward("own", 1.0, calculator) for calculator in rewards]),
        asyncio.Semaphore(2),
        ([] if faults is None else faults).append,
    )


def outcome_of(group: Group) -> list[Any]:
    """All of the trajectories but their times."""
    return [
        (t.outcome, [(x.prompt_ids, x.completion, x.observation) for x in t.turns], t.reward,
         t.messages, t.info)
        for t in group.trajectories
    ]  # fmt: skip


async def played(*makes: Callable[[], Environment], faults: Any = None, **limits: float) -> Group:
    """The first group of a slot; a second one must not notice what happened to it."""
    before = asyncio.all_tasks()
    slot = slot_of(*makes, faults=faults, **limits)
    group = await slot.play(PROMPT)
    again = await slot.play(PROMPT)
    assert [t.outcome for t in again.trajectories] == ["ok"] * SIZE
    await slot.close()
    assert asyncio.all_tasks() - before <= boundary._abandoned
    return group


@settings(max_examples=80, deadline=None)
@given(
    bad=st.integers(0, SIZE - 1),
    fault=st.sampled_from(FAULTS),
    where=st.sampled_from(["init", "setup", "reset", "step", "step"]),
)
def test_p5_a_fault_touches_its_own_rollout_only(bad: int, fault: str, where: str) -> None:
    """The others are exactly those of a group without a fault."""
    assume(where in ("reset", "step") or fault not in GARBAGE)
    assume(where != "init" or fault not in (*LATE, "is cancelled soon"))
    makes: list[Callable[[], Environment]] = [Faulty] * SIZE
    makes[bad] = partial(Faulty, fault, where)

    async def compare() -> None:
        expected, limit = outcome_of(await played()), 0.1 if fault in LATE else 30.0
        group = await played(*makes, setup=limit, reset=limit, step=limit, close=limit)
        failed, rows = group.trajectories[bad], outcome_of(group)
        del rows[bad], expected[bad]
        assert rows == expected
        assert failed.outcome != "ok"
        assert (failed.outcome == "timeout") == (fault in LATE)
        assert ("user code cancelled its own task" in failed.info["error"]) == ("cancel" in fault)
        name = "the environment" if where == "init" else f"Faulty.{where}"
        assert failed.info["error"].startswith(name), failed.info

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boundary, "STUCK_SECONDS", 0.02)
        asyncio.run(compare())


@pytest.mark.parametrize("fault", ["BadText", "cancels itself", "hangs", "never ends"])
async def test_a_close_that_fails_is_a_fault_and_bounded(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(boundary, "STUCK_SECONDS", 0.02)
    faults: list[str] = []
    group = await played(partial(Faulty, fault, "close"), faults=faults, close=0.03)
    assert outcome_of(group) == outcome_of(await played())
    [fault_found] = faults
    assert fault_found.startswith("Faulty.close")


async def test_setups_that_never_end_hold_no_place_of_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundary, "STUCK_SECONDS", 0.02)
    free = asyncio.Event()

    class Stuck(Faulty):
        async def setup(self) -> None:
            while not free.is_set():
                with contextlib.suppress(asyncio.CancelledError):
                    await free.wait()

    async with asyncio.timeout(30):
        group = await played(Stuck, Stuck, setup=0.03)  # as many as may be set up at once
    assert [t.outcome for t in group.trajectories] == ["timeout", "timeout", "ok", "ok"]
    stuck = set(boundary._abandoned)
    free.set()
    await asyncio.wait(stuck)


class Held(Environment):
    """Holds an anyio task group, as a client of MCP does, from `setup` to `close`."""

    def __init__(self, crash: str = "none") -> None:
        self.crash = crash
        self.tasks = {asyncio.current_task()}

    async def setup(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        self.group = await self.stack.enter_async_context(anyio.create_task_group())
        self.scope = self.stack.enter_context(anyio.CancelScope())
        self.group.start_soon(anyio.sleep_forever)
        await self._here("setup")
        self.tools = (ToolSpec("from_the_server", ""),)

    async def reset(self, prompt: Prompt) -> Any:
        await self._here("reset")
        return prompt.messages

    async def step(self, action: Any) -> StepResult:
        await self._here("step")
        return StepResult([], 1.0, True, False, {})

    async def close(self) -> None:
        self.tasks.add(asyncio.current_task())
        self.group.cancel_scope.cancel()
        await self.stack.aclose()
        assert len(self.tasks) == 1

    async def _here(self, where: str) -> None:
        self.tasks.add(asyncio.current_task())
        if self.crash == where:
            self.group.start_soon(self._crash)
            await anyio.sleep_forever()

    async def _crash(self) -> None:
        raise OSError("the server crashed")


async def test_p11_what_setup_opens_close_may_close(tmp_path: Path) -> None:
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_slots:Held"},
        chat={"tools": "hermes"},
        rewards=[],
        eval={"prompts": {"type": "list", "rows": ["a=", "b="]}, "every": 2, "samples": 2},
    )
    before = asyncio.all_tasks()
    await train(config)
    assert asyncio.all_tasks() == before
    assert not events(tmp_path, "fault")
    assert {row["outcome"] for row in rollouts_of(tmp_path)} == {"ok"}


@pytest.mark.parametrize("where", ["setup", "reset", "step"])
async def test_a_server_that_crashes_fails_its_rollout_and_is_closed(where: str) -> None:
    faults: list[str] = []
    slot = slot_of(partial(Held, where), Held, faults=faults)
    group = await slot.play(PROMPT)
    assert [t.outcome for t in group.trajectories] == ["infra_error", "ok", "ok", "ok"]
    error = group.trajectories[0].info["error"]
    assert error == f"Held.{where}: user code cancelled its own task"
    await slot.close()
    assert all("Held.close raised ExceptionGroup" in fault for fault in faults), faults
    assert "OSError: the server crashed" in faults[0]


async def test_an_instance_that_dies_between_two_groups_is_replaced() -> None:
    faults: list[str] = []
    environment = Held()
    slot = slot_of(lambda: environment, Held, Held, Held, faults=faults)
    await slot.play(PROMPT)
    environment.group.start_soon(environment._crash)
    [alive] = [i for i in slot._instances.values() if i.environment is environment]
    async with asyncio.timeout(30):
        while alive.error is None:  # noqa: ASYNC110 - nothing tells when
            await asyncio.sleep(0)
    group = await slot.play(PROMPT)
    assert [t.outcome for t in group.trajectories] == ["ok"] * SIZE
    await slot.close()
    assert faults[0] == "Held: user code cancelled its own task"


async def test_check_uses_the_tasks_of_a_run() -> None:
    findings = await check_environment(Held)
    assert [str(f) for f in findings if not f.good] == []
    assert findings[0].what == "tools: from_the_server"
    for where in ("setup", "reset", "step"):
        bad = [f for f in await check_environment(partial(Held, where)) if not f.good]
        assert bad[0].advice == f"Held.{where}: user code cancelled its own task"
        assert "the server crashed" in bad[1].advice


# --- tasks that user code ends --------------------------------------------------------------------


class Cancels(RewardCalculator):
    """Cancels the tasks of all slots, twice; an attack, or a library's clean-up."""

    left = 2

    async def calculate(self, trajectory: Any) -> float:
        if Cancels.left and trajectory.prompt.text == "a=":
            Cancels.left -= 1
            for task in asyncio.all_tasks():
                if task.get_name() == "slot":
                    task.cancel()
            await asyncio.sleep(0)
        return float(len(set(trajectory.completion)))


async def test_a_slot_whose_task_ends_is_replaced(tmp_path: Path) -> None:
    Cancels.left = 2
    config = mock_config(
        tmp_path, rewards=[{"type": "tests.test_slots:Cancels"}], rollout={"slots": 2}
    )
    async with asyncio.timeout(30):
        result = await train(config)
    assert result.total_steps == 4
    rows = [row for row in rollouts_of(tmp_path) if row["outcome"] != "ok"]
    assert len(rows) == 8
    assert {row["outcome"] for row in rows} == {"infra_error"}
    assert len(events(tmp_path, "fault")) == 2


class Ends(PromptSource):
    """Cancels the task in which it is called."""

    def __len__(self) -> int:
        return 4

    def row(self, index: int) -> Row:
        if index == 2:  # neither the first nor the last, which are read at the start
            asyncio.current_task().cancel()  # type: ignore[union-attr]  # the task of feed
        return Row([{"role": "user", "content": "a="}], "aaaa")


async def test_a_source_that_cancels_its_task_ends_the_run(tmp_path: Path) -> None:
    config = mock_config(tmp_path, prompts={"type": "tests.test_slots:Ends"})
    async with asyncio.timeout(30):
        with pytest.raises(UserCodeError, match="'feed'"):
            await train(config)


async def test_a_cancellation_of_ours_is_passed_on_and_raised() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    task = asyncio.create_task(apart("work", work))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended


async def test_p7_a_slot_that_is_cancelled_closes_its_instances_once_each() -> None:
    faults: list[str] = []
    slot = slot_of(*[partial(Faulty, "hangs", "step")] * 2, Held, faults=faults)
    before = asyncio.all_tasks()

    async def run() -> None:
        try:
            await slot.play(PROMPT)
        finally:
            await slot.close()

    task = asyncio.create_task(run())
    for _ in range(30):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert asyncio.all_tasks() == before
    assert not faults


# --- values ---------------------------------------------------------------------------------------


class Shares(Environment):
    """Hands out its own dict as info, and changes it later."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {"list": [], "own": BadText()}

    async def step(self, action: Any) -> Any:
        self.seen["list"].append(1)
        return [], 1.0, True, False, self.seen


async def test_info_is_a_copy_of_json_values(tmp_path: Path) -> None:
    config = mock_config(
        tmp_path, environment={"type": "tests.test_slots:Shares"}, staleness={"target": 3, "max": 6}
    )
    await train(config)
    slot = slot_of(*[Shares] * SIZE)
    first, second = await slot.play(PROMPT), await slot.play(PROMPT)
    await slot.close()
    infos = [group.trajectories[0].info for group in (first, second)]
    assert [info["list"] for info in infos] == [[1], [1, 1]]
    assert "BadText" in infos[0]["own"]


def test_any_value_has_a_json_form_and_any_error_a_text() -> None:
    class Odd(dict):  # type: ignore[type-arg]
        def items(self) -> Any:
            raise OSError

    values = plain({"a": Odd(b=1), BadText: (1, BadText()), "n": float("nan")})
    assert values["a"] == "{'b': 1}"
    assert values["n"] is None
    assert values[repr(BadText)][0] == 1
    assert "RuntimeError" in values[repr(BadText)][1]
    assert str(blame("it", BadText())) == "it raised BadText: <its __str__ raised RuntimeError>"
    group = ExceptionGroup("many", [OSError("gone"), OSError("gone")])
    assert str(blame("it", group)) == "it raised ExceptionGroup: many: OSError: gone"
    assert shown(BadText()) == "<BadText>"
