"""Setting up, closing and ending a run: what goes wrong there hides no cause."""

import asyncio
import itertools
import sys
from contextlib import nullcontext

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.environment import Environment
from retrain.errors import AdapterError, RunError
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.scoring import RewardCalculator
from tests.faults_kit import HELD_OUT, failure_of
from tests.pipe_kit import events, parts_with, rollouts_of

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
        tmp_path, environment={"type": "tests.test_run_end:Resource"}, staleness={"target": 0}
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
        environment={"type": "tests.test_run_end:Resource"},
        deadlines={"setup": 0.05},
        train={"total_train_steps": 2},
    )
    await train(config)
    failed = [row for row in rollouts_of(tmp_path) if row["outcome"] != "ok"]
    assert {row["outcome"] for row in failed} == {"timeout"}
    assert all("deadlines.setup" in r["error"] for r in failed)
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
        environment={"type": "tests.test_run_end:ClosesTogether"},
        train={"total_train_steps": 1},
        algorithm={"group_size": 16},
        rollout={"slots": 1},
    )
    await train(config)
    assert not events(tmp_path, "fault")


async def test_an_evaluations_close_errors_are_told(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.faults_kit:Odd", "where": "close"},
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
            environment={"type": "tests.test_run_end:Swallows"},
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
                {"type": "tests.test_run_end:Tidies", "name": f"judge{n}"} for n in range(rewards)
            ],
        )
        running = asyncio.create_task(train(config))
        await judging.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert asyncio.all_tasks() == before


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
