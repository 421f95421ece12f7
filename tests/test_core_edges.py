"""Edges of the pipe's core: what must hold when something goes wrong at an awkward moment."""

import asyncio
import itertools
import math
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import ClassVar

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.cli.process import exit_code
from retrain.config import DeadlinesConfig
from retrain.environment import Environment, StepResult
from retrain.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    NoSignalError,
    RunError,
    StallError,
    shown,
)
from retrain.observe.callbacks import Callback
from retrain.observe.run_dir import read_events
from retrain.pipeline import train
from retrain.pipeline.checkpoint import FORMAT, Checkpoints, read, verified
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.signal import Signal
from retrain.prompts import PromptSource
from retrain.scoring import (
    FunctionReward,
    Reward,
    RewardCalculator,
    Scorer,
    WeightedReward,
    reward,
)
from retrain.supervision.watch import Watch
from retrain.types import Group, Prompt, Trajectory
from tests.pipe_kit import events, kept_adapter, parts_with, played, rollouts_of, slot_share

ENGINE = "benchmarks.mock_engine:MockOptions"


def flattened(error):
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in flattened(inner)]
    return [error]


async def failure_of(run):
    """The errors that a run ends with."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller looks at them
        async with asyncio.timeout(30):
            await run
    return flattened(caught.value)


# --- user code that raises what nobody expects --------------------------------------------------


class Panic(BaseException):
    """What a library of compiled code may raise: no Exception."""


class Odd(Environment):
    """Raises in every sixth call of the method that is named."""

    calls = 0
    closed = 0

    def __init__(self, where: str, error: str):
        self.where, self.error = where, error

    def _maybe(self, where):
        if where != self.where:
            return
        Odd.calls += 1
        if Odd.calls % 6 == 3:
            raise {
                "cancelled": asyncio.CancelledError(),
                "exit": SystemExit(0),
                "panic": Panic("broken"),
                "stop": StopAsyncIteration(),
                "timeout": TimeoutError("the tool is slow"),
                "group": BaseExceptionGroup("many", [Panic("broken")]),
            }[self.error]

    async def setup(self):
        self._maybe("setup")

    async def reset(self, prompt):
        self._maybe("reset")
        return prompt.messages

    async def step(self, action):
        self._maybe("step")
        return StepResult([], 0.0, True, False, {})

    async def close(self):
        self._maybe("close")
        Odd.closed += 1


@pytest.mark.parametrize("error", ["cancelled", "exit", "panic", "stop", "timeout", "group"])
@pytest.mark.parametrize("where", ["setup", "reset", "step", "close"])
async def test_p5_whatever_an_environment_raises_is_its_own_rollouts_matter(tmp_path, where, error):
    Odd.calls = 0
    config = mock_config(
        tmp_path, environment={"type": "tests.test_core_edges:Odd", "where": where, "error": error}
    )
    async with asyncio.timeout(30):
        result = await train(config)
    assert (result.status, result.total_steps) == ("completed", 4)
    rows = rollouts_of(tmp_path)
    assert all(len(row["versions"]) == 1 for row in rows if row["outcome"] == "ok")
    if where == "close":
        assert events(tmp_path, "fault")
        return
    failed = [row for row in rows if row["outcome"] != "ok"]
    assert failed
    assert {row["outcome"] for row in failed} == {"infra_error"}
    assert all(f"Odd.{where} raised" in row["error"] for row in failed)


class Plain(Environment):
    """Not async, as a newcomer may write it."""

    def step(self, action):
        return StepResult([], 0.0, True, False, {})


async def test_a_plain_step_is_told_to_be_async(tmp_path):
    config = mock_config(tmp_path, environment={"type": "tests.test_core_edges:Plain"})
    (error,) = await failure_of(train(config))
    assert "Plain.step is a plain function. Write `async def`." in str(error)


class OddReward(RewardCalculator):
    """Fails for the third rollout of each group."""

    def __init__(self, how: str):
        self.how = how
        self.calls = itertools.count()

    async def calculate(self, trajectory):
        if next(self.calls) % 4 == 2:
            return fail(self.how)
        return slot_share(trajectory.completion, trajectory.prompt.answer)


class PlainReward(OddReward):
    """Not async, as it has to be."""

    def calculate(self, trajectory):
        return fail(self.how)


class GroupReward(OddReward):
    async def calculate_group(self, group):
        return fail(self.how)


counted = itertools.count()


@reward
def plain_function(completion, answer, how="exit"):
    if next(counted) % 4 == 2:
        return fail(how)
    return slot_share(completion, answer)


def fail(how):
    import torch

    if how == "exit":
        sys.exit(0)
    if how == "cancelled":
        raise asyncio.CancelledError
    if how == "panic":
        raise Panic("broken")
    if how == "timeout":
        raise TimeoutError
    if how == "stop":
        raise StopIteration
    return {
        "huge": 10**400,
        "absurd": 1e200,
        "tensor": torch.ones(2),
        "components": Reward(1.0, None),
        "keys": Reward(1.0, {"a": math.nan}),
        "complex": 1j,
        "dict": {"reward": 1.0},
    }[how]


HOWS = ["exit", "cancelled", "panic", "timeout", "huge", "tensor", "components", "keys", "complex"]
HOWS += ["absurd"]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", ["OddReward", "PlainReward", "GroupReward", "plain_function"])
async def test_p6_whatever_a_reward_does_is_its_rollouts_matter(tmp_path, kind, how):
    config = mock_config(
        tmp_path,
        rewards=[{"type": f"tests.test_core_edges:{kind}", "how": how}],
        train={"total_train_steps": 2, "max_failed_groups": 3},
    )
    hopeless = kind in ("PlainReward", "GroupReward")
    if hopeless:
        [error] = await failure_of(train(config))
        assert "3 groups in a row" in str(error)
        dropped = [e for e in read_events(tmp_path) if e["event"] == "dropped"]
        assert len(dropped) >= 3, "the group that ended the run is counted too"
    else:
        async with asyncio.timeout(30):
            assert (await train(config)).total_steps == 2
    failed = [row for row in rollouts_of(tmp_path) if row["outcome"] != "ok"]
    assert failed
    assert {row["outcome"] for row in failed} == {"infra_error"}
    whose = ("reward '", "expected numbers of at most 1e+30")
    assert all(any(words in row["error"] for words in whose) for row in failed)
    assert not any("deadlines" in row["error"] for row in failed), "its own, not our deadline"
    assert all(len(row["error"]) < 400 for row in failed)


class Unspeakable:
    def __repr__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ([1, "a"], "[1, 'a']"),
        ("x" * 10**6, "'" + "x" * 76 + "..."),
        (10**5000, "<int>"),  # Python refuses to write it out
        (Unspeakable(), "<Unspeakable>"),
    ],
    ids=["short", "long", "beyond digits", "no repr"],
)
def test_a_wrong_value_is_told_in_short(value, text):
    assert shown(value) == text


# --- an adapter's --------------------------------------------------------------------------------


class CancelsItself(MockAdapter):
    """An adapter whose own task was cancelled behind its back, at version 2."""

    where = ""

    def _maybe(self, where):
        if where == self.where and self.version >= 2:
            raise asyncio.CancelledError

    async def sample(self, prompt_ids, params, n=1):
        self._maybe("sample")
        return await super().sample(prompt_ids, params, n)

    async def update(self, batch):
        self._maybe("update")
        return await super().update(batch)

    async def publish(self):
        self._maybe("publish")
        return await super().publish()

    async def save(self, folder):
        self._maybe("save")
        return await super().save(folder)


@pytest.mark.parametrize("where", ["sample", "update", "publish", "save"])
async def test_an_adapter_whose_call_was_cancelled_fails_the_run(tmp_path, where):
    config = mock_config(tmp_path)
    adapter = CancelsItself(MockOptions(), config)
    adapter.where = where
    errors = await failure_of(train(config, parts=parts_with(config, adapter)))
    assert any(isinstance(e, AdapterError) and where in str(e) for e in errors), errors
    assert events(tmp_path, "end")[0]["status"] == "failed"


async def test_a_samplers_own_timeout_is_not_taken_for_our_deadline(tmp_path):
    class Slow(MockAdapter):
        async def sample(self, prompt_ids, params, n=1):
            raise TimeoutError("connect")

    config = mock_config(tmp_path)
    errors = await failure_of(train(config, parts=parts_with(config, Slow(MockOptions(), config))))
    assert not any(isinstance(error, DeadlineError) for error in errors)


@pytest.mark.parametrize(
    ("n", "got"), [(1, "0 completions"), (4, "3 completions"), (4, "NoneType")]
)
async def test_a_sampler_that_returns_the_wrong_number_of_completions_is_named(tmp_path, n, got):
    class Miscounts(MockAdapter):
        async def sample(self, prompt_ids, params, n=1):
            completions = await super().sample(prompt_ids, params, n)
            return None if got == "NoneType" else completions[1:]

    algorithm = {"type": "reinforce", "group_size": n}
    config = mock_config(tmp_path, algorithm=algorithm)
    parts = parts_with(config, Miscounts(MockOptions(), config))
    [error, *_] = await failure_of(train(config, parts=parts))
    assert isinstance(error, AdapterError)
    expected = f"the sampler Miscounts: sample(n={n}) returned {got}, expected a list of {n}"
    assert expected in str(error)


async def test_forgetting_a_checkpoint_has_a_deadline_and_its_failure_is_told_not_fatal(tmp_path):
    class Keeps(MockAdapter):
        async def forget(self, state):
            if "step_1" in str(state.folder):
                await asyncio.Event().wait()
            raise AdapterError("the service is down")

    config = mock_config(
        tmp_path, checkpoint={"every": 1, "keep": 1}, deadlines={"checkpoint": 0.1}
    )
    async with asyncio.timeout(30):
        result = await train(config, parts=parts_with(config, Keeps(MockOptions(), config)))
    assert result.status == "completed"
    faults = [event["error"] for event in events(tmp_path, "fault")]
    assert any("service is down" in fault for fault in faults)
    assert any("deadlines.checkpoint" in fault for fault in faults)


# --- what environments hand over ----------------------------------------------------------------


class Loose(Environment):
    """Gym's habits: no observation at the end, and anything at all in info."""

    def __init__(self, observation=None, info: str = ""):
        self.observation, self.kind = observation, info

    async def step(self, action):
        import threading

        info = {
            "": {},
            "keys": {("a", 1): 2},
            "lock": {"lock": threading.Lock()},
            "cycle": {},
        }[self.kind]
        if self.kind == "cycle":
            info["self"] = info
        return self.observation, 0.0, True, False, info


@pytest.mark.parametrize("info", ["", "keys", "lock", "cycle"])
async def test_a_checkpoint_holds_groups_whatever_their_environment_said(tmp_path, info):
    """At staleness 3 there are finished groups that no step has taken."""
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_core_edges:Loose", "info": info},
        staleness={"target": 3, "max": 6},
        checkpoint={"every": 1},
        train={"total_train_steps": 6},
    )
    assert (await train(config)).total_steps == 6
    [saved, *_] = [read(path) for path in (tmp_path / "checkpoints").glob("step_[1-5]")]
    assert saved.groups


# --- setting up and closing ---------------------------------------------------------------------


class Resource(Environment):
    """Holds something from its setup to its close."""

    open = 0
    made = itertools.count()
    hanging = asyncio.Event()

    async def setup(self):
        number = next(Resource.made)
        Resource.open += 1
        if number % 4 == 3:
            Resource.hanging.set()
            await asyncio.Event().wait()

    async def close(self):
        Resource.open -= 1


async def test_p7_cancelling_during_setup_closes_the_environments_that_were_set_up(tmp_path):
    Resource.open, Resource.made, Resource.hanging = 0, itertools.count(), asyncio.Event()
    config = mock_config(
        tmp_path, environment={"type": "tests.test_core_edges:Resource"}, staleness={"target": 0}
    )
    running = asyncio.create_task(train(config))
    await Resource.hanging.wait()
    for _ in range(20):
        await asyncio.sleep(0)
    assert Resource.open
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await running
    assert Resource.open == 0


async def test_a_setup_past_its_deadline_is_closed_too(tmp_path):
    Resource.open, Resource.made = 0, itertools.count()
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_core_edges:Resource"},
        deadlines={"setup": 0.05},
        train={"total_train_steps": 2},
    )
    await train(config)
    failed = [row for row in rollouts_of(tmp_path) if row["outcome"] != "ok"]
    assert {row["outcome"] for row in failed} == {"timeout"}
    assert all("Resource.setup took longer than deadlines.setup" in r["error"] for r in failed)
    assert Resource.open == 0


class ClosesTogether(Environment):
    """Its close waits for those of the whole group."""

    group = asyncio.Barrier(16)

    async def close(self):
        await ClosesTogether.group.wait()


async def test_the_environments_of_a_slot_are_closed_at_once(tmp_path):
    ClosesTogether.group = asyncio.Barrier(16)
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_core_edges:ClosesTogether"},
        train={"total_train_steps": 1},
        algorithm={"group_size": 16},
        rollout={"slots": 1},
    )
    await train(config)
    assert not events(tmp_path, "fault")


async def test_an_evaluations_close_errors_are_told(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_pipeline:Breaks", "where": "close"},
        train={"total_train_steps": 1},
        eval={"prompts": {"type": "list", "rows": ["a=", "b="]}, "every": 1, "samples": 3},
    )
    await train(config)
    slots = 2 * 4  # staleness 1
    evaluations = 2  # before and after the step
    assert len(events(tmp_path, "fault")) == slots * 4 - 16 + evaluations * 2 * 3


# --- the end of a run ---------------------------------------------------------------------------


class Ended(Callback):
    results = ()

    def on_train_end(self, trainer, result):
        self.results = (*self.results, result)


async def test_a_disk_that_fills_up_ends_the_run_with_its_error_and_on_train_end(tmp_path):
    class FullDisk(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                for journal in trainer.run_dir._journals:
                    journal._file.close()
                    journal._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115

    ended = Ended()
    errors = await failure_of(train(mock_config(tmp_path), callbacks=[FullDisk(), ended]))
    assert any(isinstance(e, RunError) and "No space left" in str(e) for e in errors)
    assert [result.status for result in ended.results] == ["failed"]


async def test_a_callback_that_fails_at_the_end_doesnt_hide_why_the_run_failed(tmp_path):
    class Broken(MockAdapter):
        async def update(self, batch):
            raise AdapterError("out of memory")

    class BadEnd(Callback):
        def on_train_end(self, trainer, result):
            raise ValueError("no such project")

    config = mock_config(tmp_path)
    parts = parts_with(config, Broken(MockOptions(), config))
    with pytest.raises(AdapterError, match="out of memory") as caught:
        await train(config, callbacks=[BadEnd()], parts=parts)
    [note] = caught.value.__notes__
    assert "no such project" in note
    assert "BadEnd.on_train_end" in note


async def test_cancelling_while_the_backend_opens_is_an_interruption(tmp_path):
    opening = asyncio.Event()

    class Opens(MockAdapter):
        async def __aenter__(self):
            opening.set()
            await asyncio.Event().wait()

    config, ended = mock_config(tmp_path), Ended()
    parts = parts_with(config, Opens(MockOptions(), config))
    running = asyncio.create_task(train(config, parts=parts, callbacks=[ended]))
    await opening.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [result.status for result in ended.results] == ["interrupted"]


async def test_a_stop_ends_the_retries_of_an_adapter(tmp_path):
    waiting, stopped = asyncio.Event(), asyncio.Event()

    class Waits(MockAdapter):
        async def update(self, batch):
            waiting.set()
            async with asyncio.timeout(30):
                await stopped.wait()
            raise AdapterError("could not reach the service")

        def stop_retrying(self):
            stopped.set()

    config = mock_config(tmp_path)
    parts = parts_with(config, Waits(MockOptions(), config))
    running = asyncio.create_task(train(config, parts=parts))
    await waiting.wait()
    running.cancel()
    assert "could not reach" in str(await failure_of(running))


class Swallows(Environment):
    """Takes a cancellation for a reason to answer."""

    started = asyncio.Event()

    async def step(self, action):
        if self.prompt.text == "h=" or Swallows.started.is_set():
            try:
                Swallows.started.set()
                await asyncio.Event().wait()
            except:  # noqa: E722 - as users write it
                pass
        return [], 0.0, True, False, {}


async def test_an_environment_that_swallows_its_cancellation_doesnt_keep_the_run(tmp_path):
    Swallows.started = asyncio.Event()
    for size in (1, 4):
        config = mock_config(
            tmp_path / str(size),
            environment={"type": "tests.test_core_edges:Swallows"},
            algorithm={"type": "reinforce", "group_size": size},
        )
        running = asyncio.create_task(train(config))
        await Swallows.started.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(30):
                await running


async def test_p7_an_async_reward_is_not_left_behind_when_the_run_is_cancelled(tmp_path):
    judging = asyncio.Event()

    class Tidies(RewardCalculator):
        async def calculate(self, trajectory):
            try:
                judging.set()
                await asyncio.Event().wait()
            finally:
                for _ in range(50):
                    await asyncio.sleep(0)

    sys.modules[__name__].Tidies = Tidies
    before = asyncio.all_tasks()
    for rewards in (1, 2):
        judging.clear()
        config = mock_config(
            tmp_path / str(rewards),
            rewards=[
                {"type": "tests.test_core_edges:Tidies", "name": f"judge{n}"}
                for n in range(rewards)
            ],
        )
        running = asyncio.create_task(train(config))
        await judging.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == before


# --- evaluation ---------------------------------------------------------------------------------

HELD_OUT = {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in "abc"]}


async def test_p10_cancelling_doesnt_wait_for_an_evaluation(tmp_path):
    evaluating = asyncio.Event()

    class EndlessEval(MockAdapter):
        async def sample(self, prompt_ids, params, n=1):
            if n == 3 and self.version == self.evaluated:
                evaluating.set()
                await asyncio.Event().wait()
            return await super().sample(prompt_ids, params, n)

    # before training and in the middle, where a publish waits too, and at the end
    for evaluated, steps in ((0, 1), (2, 3), (4, 4)):
        evaluating.clear()
        EndlessEval.evaluated = evaluated
        config = mock_config(
            tmp_path / str(evaluated), eval={"prompts": HELD_OUT, "every": 2, "samples": 3}
        )
        parts = parts_with(config, EndlessEval(MockOptions(), config))
        running = asyncio.create_task(train(config, parts=parts))
        await evaluating.wait()
        for _ in range(200):
            await asyncio.sleep(0)
        running.cancel()
        async with asyncio.timeout(30):
            with pytest.raises(asyncio.CancelledError) if steps < 4 else nullcontext():
                await running  # all steps are done, so it completes
        folder = tmp_path / str(evaluated)
        assert events(folder, "end")[0]["step"] == steps
        assert max(Checkpoints(folder / "checkpoints").steps()) == evaluated


# --- checkpoints --------------------------------------------------------------------------------


async def test_a_half_deleted_checkpoint_is_no_obstacle_to_pruning(tmp_path):
    config = mock_config(tmp_path, checkpoint={"every": 1, "keep": 1})
    await train(config)
    torn = tmp_path / "checkpoints" / "step_2"
    (torn / "adapter").mkdir(parents=True)
    longer = mock_config(
        tmp_path, checkpoint={"every": 1, "keep": 1}, train={"total_train_steps": 6}
    )
    assert (await train(longer, resume=True)).total_steps == 6
    assert not torn.exists()


@pytest.mark.parametrize("writable", [True, False])
async def test_a_disk_without_links_still_has_its_best_checkpoint(tmp_path, monkeypatch, writable):
    def refuse(self, *args, **kwargs):
        raise PermissionError(1, "Operation not permitted", str(self))

    write_text = Path.write_text

    def written(self, text, *args, **kwargs):
        mark = self.name == ".best" and not writable
        return refuse(self) if mark else write_text(self, text, *args, **kwargs)

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(Path, "write_text", written)
    evaluation = {"prompts": HELD_OUT, "every": 2, "samples": 3}
    result = await train(mock_config(tmp_path, eval=evaluation))
    assert result.status == "completed"
    if writable:
        best = result.best_checkpoint_path
        assert best == tmp_path / "checkpoints" / (tmp_path / "checkpoints/best").read_text()
        assert best.is_dir()
        return
    assert result.best_checkpoint_path is None
    faults = [event["error"] for event in events(tmp_path, "fault")]
    assert any("can't mark step" in fault for fault in faults)


async def test_a_torn_checkpoint_of_the_last_step_is_written_anew(tmp_path):
    config = mock_config(tmp_path, checkpoint={"every": 3}, train={"total_train_steps": 4})
    await train(config)
    (tmp_path / "checkpoints" / "step_4" / "manifest.json").unlink()
    await train(config, resume=True)
    found = Checkpoints(tmp_path / "checkpoints").newest()
    assert found is not None
    assert found[1].step == 4


async def test_a_checkpoint_of_another_format_is_refused_and_no_older_one_taken(tmp_path):
    await train(mock_config(tmp_path, checkpoint={"every": 2}))
    manifest = tmp_path / "checkpoints" / "step_4" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 7'))
    longer = mock_config(tmp_path, train={"total_train_steps": 6})
    with pytest.raises(CheckpointError, match=r"step_4 has the .*format 7, expected .*--run-dir"):
        await train(longer, resume=True)
    with pytest.raises(CheckpointError, match="format 7, expected"):
        verified(manifest.parent)


async def test_a_checkpoint_asked_for_by_a_callback_is_not_written_twice(tmp_path):
    class Asks(Callback):
        seen = ()

        async def on_step_end(self, trainer, step, metrics):
            await checkpoint(trainer)

        def on_checkpoint(self, trainer, step, path):
            self.seen = (*self.seen, step)

    asks = Asks()
    await train(mock_config(tmp_path, checkpoint={"every": 2}), callbacks=[asks])
    assert asks.seen == (1, 2, 3, 4)


async def test_a_data_set_that_has_shrunk_is_refused_on_resume(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [f'{{"prompt": "{c}=", "answer": "{c * 4}"}}\n' for c in "abcdefgh"]
    data.write_text("".join(rows))
    where = {"prompts": {"type": "file", "path": str(data)}}
    await train(mock_config(tmp_path / "run", **where))
    data.write_text("".join(rows[:2]))
    longer = mock_config(tmp_path / "run", **where, train={"total_train_steps": 8})
    with pytest.raises(CheckpointError, match=r"8 rows.*2"):
        await train(longer, resume=True)


# --- admission, order, budgets ------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "in_order"])
@pytest.mark.parametrize("slots", [1, 3])
async def test_fewer_slots_than_groups_train_all_the_same(tmp_path, order, slots):
    config = mock_config(
        tmp_path,
        rollout={"slots": slots},
        train={"order": order, "total_train_steps": 6},
        staleness={"target": 2, "max": 2},
        backend={"type": ENGINE, "latency": 0.001, "sigma": 1.5},
        environment={"type": "tests.test_core_edges:Odd", "where": "step", "error": "timeout"},
    )
    async with asyncio.timeout(30):
        assert (await train(config)).total_steps == 6


async def test_more_groups_a_step_than_prompts(tmp_path):
    config = mock_config(
        tmp_path,
        prompts={"type": "list", "rows": [{"prompt": "a=", "answer": "aaaa"}]},
        train={"groups_per_step": 7, "total_train_steps": 3},
    )
    await train(config)
    trained = [t for e in events(tmp_path, "update") for t in e["tickets"]]
    assert len(set(trained)) == 21


async def test_no_step_at_all_still_leaves_a_checkpoint(tmp_path):
    result = await train(mock_config(tmp_path, train={"total_train_steps": 0}))
    assert (result.status, result.total_steps) == ("completed", 0)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0]


@pytest.mark.parametrize("before", [4, 0])
async def test_a_resume_with_another_staleness_goes_on(tmp_path, before):
    after = 4 - before
    config = mock_config(
        tmp_path,
        staleness={"target": before, "max": before},
        rollout={"slots": 2 if after else None},
        checkpoint={"every": 1},
        train={"total_train_steps": 3},
    )
    await train(config)
    longer = mock_config(
        tmp_path, staleness={"target": after, "max": after}, train={"total_train_steps": 9}
    )
    async with asyncio.timeout(30):
        assert (await train(longer, resume=True)).total_steps == 9
    trained = [t for e in events(tmp_path, "update") for t in e["tickets"]]
    assert len(set(trained)) == len(trained) == 36


async def test_a_resume_after_the_end_does_nothing_but_export(tmp_path):
    await train(mock_config(tmp_path))
    result = await train(mock_config(tmp_path), resume=True)
    assert (result.status, result.total_steps, len(result.history)) == ("completed", 4, 4)
    assert len(events(tmp_path, "checkpoint")) == 2


async def test_stop_is_heard_while_finished_groups_wait_for_a_step(tmp_path):
    """The queue holds two groups, and a step needs four."""

    class Stops(Callback):
        async def on_step_begin(self, trainer, step):
            if step == 2:
                while trainer.desk.done.qsize() < 2:  # noqa: ASYNC110 - a queue has no event of that
                    await asyncio.sleep(0)
                trainer.request_stop()
                trainer.stopping = False  # the learner went past that check already

    config = mock_config(tmp_path, rollout={"slots": 1}, train={"total_train_steps": 4})
    result = await train(config, callbacks=[Stops()])
    assert result.total_steps == 1


async def test_held_groups_keep_their_place_in_order_over_a_resume(tmp_path):
    """With an async callback work starts before the checkpoint is written."""

    class Yields(Callback):
        async def on_step_end(self, trainer, step, metrics):
            for _ in range(30):
                await asyncio.sleep(0.001)

    batches = {}
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        seen = []
        for total in steps:
            config = mock_config(
                tmp_path / name,
                staleness={"target": 0},
                train={"total_train_steps": 4, "order": "in_order"},
                checkpoint={"every": 1},
                backend={"type": ENGINE, "latency": 0.02, "sigma": 1.0},
            )
            adapter = kept_adapter(config)

            class Stops(Callback):
                def on_checkpoint(self, trainer, step, path, total=total):
                    if step == total != 4:
                        raise RuntimeError("killed")

            with suppress(RuntimeError):
                await train(
                    config,
                    parts=parts_with(config, adapter),
                    callbacks=[Yields(), Stops()],
                    resume=bool(seen),
                )
            seen += adapter.batches
        batches[name] = seen
    assert batches["parts"] == batches["whole"]


@pytest.mark.parametrize(
    ("seen", "last", "solved"),
    [
        ([-1.0, 0.0], 0.0, True),  # penalties, and there are none any more
        ([-3.0, -2.0], -2.0, True),
        ([0.0, -1e-17], 0.0, False),  # it never was anything else
        ([-1.0, 0.0], -1.0, False),
        ([0.5], 0.5, True),
        ([0.5, 1.0], 0.5, False),
    ],
)
def test_flat_groups_at_the_top_reward_are_solved_at_zero_too(seen, last, solved):
    def group(*rewards):
        prompt = Prompt("0.0.0", [])
        return Group(prompt, [Trajectory(prompt, reward=r) for r in rewards])

    signal, again = Signal(limit=1), Signal(limit=1)
    signal.see(group(*seen))
    again.restore(signal.state())
    for one in (signal, again):
        with suppress(NoSignalError):
            one.step([group(last, last)], has_credit=False)
        assert one.solved == solved


# --- the process ---------------------------------------------------------------------------------

RUN = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.environment import Environment
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.cli.process import drive, exit_code

class Env(Environment):
    async def step(self, action):
        {step}
        return [], float(len(set(action.text))), True, False, {{}}

class Act(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 3:
            {act}

sys.modules["user_code"] = sys.modules["__main__"]
config = mock_config(
    Path(sys.argv[1]),
    environment={{"type": "user_code:Env"}},
    rewards=[],
    train={{"total_train_steps": 8}},
    deadlines={deadlines},
)
sys.exit(exit_code(lambda: drive(train(config, callbacks=[Act()])) and 0))
"""


def play(tmp_path, *, step="pass", act="pass", prefix=(), **deadlines):
    return played(tmp_path, RUN.format(step=step, act=act, deadlines=deadlines), prefix)


def test_p10_a_signal_checkpoints_even_when_the_terminal_is_gone(tmp_path):
    done = play(
        tmp_path, act="os.dup2(os.open('/dev/full', 1), 2); os.kill(os.getpid(), signal.SIGHUP)"
    )
    assert done.returncode == 130, done
    found = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert found is not None
    assert found[1].step < 8


def test_nohup_keeps_its_promise(tmp_path):
    done = play(tmp_path, act="os.kill(os.getpid(), signal.SIGHUP)", prefix=["nohup"])
    assert done.returncode == 0, done


def test_a_broken_pipe_of_a_callback_is_no_success(tmp_path):
    done = play(tmp_path, act="raise BrokenPipeError(32, 'the tracker hung up')")
    assert done.returncode == 1
    assert "the tracker hung up" in done.stderr


def test_a_broken_pipe_while_the_backend_opens_is_no_success():
    def command():
        raise BrokenPipeError(32, "the service hung up")

    assert exit_code(command) == 1


def test_an_environment_that_outlives_a_finished_run_is_named_and_left(tmp_path):
    stubborn = """
        while self.prompt.ticket.epoch > 1:  # issued after step 3
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass"""
    act = "trainer.request_stop()"
    done = play(tmp_path, step=stubborn, act=act, stall=50, close=0.3, checkpoint=0.7)
    assert done.returncode == 1
    assert "shutdown timed out after 1.0 s; still running:" in done.stderr
    assert "Env.step (main.py:" in done.stderr


def test_a_full_disk_doesnt_keep_a_blocked_process(tmp_path):
    done = play(
        tmp_path,
        act="""
            for journal in trainer.run_dir._journals:
                journal._file.close()
            time.sleep(3600)""",
        blocked=0.5,
    )
    assert done.returncode == 1


def test_a_process_that_was_stopped_for_a_while_goes_on(tmp_path):
    """SIGSTOP, as Ctrl-Z sends it, for longer than anything may block."""
    act = """
            if os.fork() == 0:
                time.sleep(0.3)
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.wait()"""
    done = play(tmp_path, act=act, blocked=1.9, stall=1.9)
    assert done.returncode == 0, done
    assert "no Python code could run" not in done.stderr


# --- long work is no stall ----------------------------------------------------------------------


@pytest.fixture
def history(monkeypatch):
    """`progress` for each report to the watch; a test adds what it sees between the reports."""
    history = []

    def progress(self):
        history.append("progress")

    monkeypatch.setattr(Watch, "progress", progress)
    return history


class Long(Environment):
    """Many turns, none of them long."""

    history: ClassVar = []

    async def reset(self, prompt):
        self.turns = 0
        return prompt.messages

    async def step(self, action):
        self.turns += 1
        Long.history.append("turn")
        return [{"role": "user", "content": "?"}], 0.0, self.turns == 12, False, {}


async def test_a_long_episode_moves_with_each_turn(tmp_path, history):
    Long.history = history
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_core_edges:Long"},
        algorithm={"type": "reinforce", "group_size": 1},
        train={"total_train_steps": 1, "groups_per_step": 1},
        staleness={"target": 0},
    )
    assert (await train(config)).total_steps == 1
    assert history.count("turn") == 12
    assert ("turn", "turn") not in itertools.pairwise(history)


async def test_slow_calls_of_the_adapter_one_after_the_other_are_no_stall(tmp_path, history):
    class Seen(MockAdapter):
        async def update(self, batch):
            history.append("update")
            return await super().update(batch)

        async def publish(self):
            history.append("publish")
            return await super().publish()

        async def save(self, folder):
            history.append("save")
            return await super().save(folder)

    config = mock_config(tmp_path, staleness={"target": 0}, train={"total_train_steps": 1})
    assert (await train(config, parts=parts_with(config, Seen(MockOptions(), config)))).total_steps
    calls = {"update", "publish", "save"}
    assert calls < {*history}
    assert not any({*pair} <= calls for pair in itertools.pairwise(history))


async def test_a_backend_that_hangs_while_it_opens_or_closes_is_a_stall(tmp_path):
    class Hangs(MockAdapter):
        async def __aenter__(self):
            await asyncio.Event().wait()

    config = mock_config(tmp_path, deadlines={"stall": 0.2})
    [error] = await failure_of(
        train(config, parts=parts_with(config, Hangs(MockOptions(), config)))
    )
    assert isinstance(error, StallError)
    assert not (tmp_path / "events.jsonl").exists(), "training has not begun"


async def test_waiting_for_the_user_is_no_stall():
    """As between two calls of a trainer's step()."""
    failed = asyncio.get_running_loop().create_future()
    watch = Watch(slow=60, found=pytest.fail, stall=1.0, fail=failed.set_result)
    with watch.waiting():
        watch._look(watch._moved + 1.1)
        await asyncio.sleep(0)
        assert not failed.done()
    watch._look(watch._moved + 1.1)
    assert isinstance(await failed, StallError)


async def test_waiting_for_a_thread_is_not_the_rewards_time():
    """Four threads, 84 calls of 0.05 s: the last four wait a second for the others."""

    def slow(completion):
        time.sleep(0.05)
        return 1.0

    scorer = Scorer(
        [WeightedReward("slow", 1.0, FunctionReward(slow))],
        deadlines=DeadlinesConfig(reward=0.8),
        concurrency=1,
    )
    scorer._slow.add("slow")
    group = Group(Prompt("0.0.0", []), [Trajectory(Prompt("0.0.0", [])) for _ in range(84)])
    async with scorer.serving(pytest.fail):
        await scorer.score(group)
    assert {t.outcome for t in group.trajectories} == {"ok"}


async def test_a_source_without_rows_is_refused(tmp_path):
    config = mock_config(tmp_path, prompts={"type": "tests.test_core_edges:NoPrompts"})
    with pytest.raises(ConfigError, match=r"prompts: NoPrompts is empty"):
        await train(config)


class NoPrompts(PromptSource):
    def __len__(self):
        return 0

    def row(self, index):
        raise IndexError(index)
