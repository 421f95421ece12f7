"""Faults of environments, rewards and adapters: what each touches, and what ends a run."""

import asyncio
import math

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.environment import Environment, StepResult
from retrain.errors import AdapterError, DeadlineError, NoSignalError
from retrain.pipeline import train
from retrain.scoring import Reward, RewardCalculator
from tests.pipe_kit import events, kept_adapter, parts_with, rollouts_of, slot_share


class Breaks(Environment):
    """Raises in the method that is named."""

    def __init__(self, where: str, always: bool = True):
        self.where, self.always = where, always

    async def _maybe(self, where):
        if where == self.where and (self.always or self.prompt.text == "a="):
            raise RuntimeError(f"broken {where}")

    async def setup(self):
        if self.where == "setup":
            raise RuntimeError("broken setup")

    async def reset(self, prompt):
        await self._maybe("reset")
        return prompt.messages

    async def step(self, action):
        await self._maybe("step")
        return StepResult([], 0.0, True, False, {})

    async def close(self):
        if self.where == "close":
            raise RuntimeError("broken close")


@pytest.mark.parametrize("where", ["setup", "reset", "step"])
async def test_when_every_rollout_fails_the_run_ends_with_the_first_cause(tmp_path, where):
    config = mock_config(tmp_path, environment={"type": "tests.test_faults:Breaks", "where": where})
    with pytest.raises(
        NoSignalError, match=rf"16 groups in a row.*Breaks\.{where} raised RuntimeError: broken"
    ):
        await train(config)
    assert not events(tmp_path, "update")


async def test_p5_a_fault_in_one_prompts_rollouts_touches_only_its_group(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_faults:Breaks", "where": "step", "always": False},
        train={"total_train_steps": 6},
    )
    result = await train(config)
    dropped = events(tmp_path, "dropped")
    assert {e["cause"] for e in dropped} == {"failed"}
    assert sum(row["rollouts/failed"] for row in result.history) == 4 * len(dropped)
    assert sum(row["groups/trained"] for row in result.history) == 24


async def test_an_environment_that_cant_close_doesnt_fail_the_run(tmp_path):
    config = mock_config(
        tmp_path, environment={"type": "tests.test_faults:Breaks", "where": "close"}
    )
    assert (await train(config)).status == "completed"
    faults = events(tmp_path, "fault")
    assert len(faults) == 8 * 4, "each instance's failure is an event"
    assert "Breaks.close raised RuntimeError" in faults[0]["error"]


class Flaky(RewardCalculator):
    """Fails for the third rollout of each group, in the way that is named."""

    def __init__(self, way: str):
        self.way = way

    async def calculate(self, trajectory):
        score = slot_share(trajectory.completion, trajectory.prompt.answer)
        seen = getattr(self, "seen", 0)
        self.seen = seen + 1
        if seen % 4 != 2:
            return score
        if self.way == "hangs":
            await asyncio.Event().wait()
        if self.way == "raises":
            raise ValueError("judge is down")
        return {"nan": math.nan, "none": None, "text": "1", "invalid": Reward(0, {}, "invalid")}[
            self.way
        ]


@pytest.mark.parametrize(
    ("way", "outcome", "message"),
    [
        ("raises", "infra_error", "'Flaky' raised ValueError: judge is down"),
        ("nan", "infra_error", "returned nan, expected a finite number"),
        ("none", "infra_error", "returned None, expected a finite number"),
        ("text", "infra_error", "returned '1', expected a finite number"),
        ("invalid", "invalid", "returned the outcome invalid"),
        ("hangs", "timeout", "deadlines.reward = 0.05 s"),
    ],
)
async def test_p6_a_reward_that_fails_is_masked_and_counted_never_trained_as_0(
    tmp_path, way, outcome, message
):
    config = mock_config(
        tmp_path,
        rewards=[{"type": "tests.test_faults:Flaky", "way": way}],
        train={"total_train_steps": 2},
        deadlines={"reward": 0.05},
    )
    adapter = kept_adapter(config)
    result = await train(config, parts=parts_with(config, adapter))
    assert [row["rollouts/failed"] for row in result.history] == [4, 4]
    assert [len(batch.samples) for batch in adapter.batches] == [12, 12]
    failed = [r for r in rollouts_of(tmp_path) if r["outcome"] != "ok"]
    assert {r["outcome"] for r in failed} == {outcome}
    assert all(message in r["error"] and r["reward"] is None for r in failed)


class Sleeps(Environment):
    """Never answers."""

    async def step(self, action):
        await asyncio.Event().wait()


async def test_user_code_past_its_deadline_is_the_outcome_timeout(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_faults:Sleeps"},
        deadlines={"step": 0.02},
        train={"max_failed_groups": 4},
    )
    with pytest.raises(NoSignalError, match=r"Sleeps\.step .*deadlines"):
        await train(config)
    assert {r["outcome"] for r in rollouts_of(tmp_path)} == {"timeout"}


class Failing(MockAdapter):
    """Fails in the way that is named, at step 2."""

    way = "raises"

    async def update(self, batch):
        if self.version == 1 and self.way == "raises":
            raise AdapterError("out of memory")
        if self.version == 1 and self.way == "hangs":
            await asyncio.Event().wait()
        metrics = await super().update(batch)
        return {**metrics, "loss": math.nan} if self.version == 1 else metrics


@pytest.mark.parametrize(
    ("way", "error", "message"),
    [
        ("raises", AdapterError, "out of memory"),
        ("hangs", DeadlineError, r"update .*deadlines.update = 0.05 s"),
        ("nan", AdapterError, "step 2 .*nan"),
    ],
)
async def test_an_adapter_that_fails_ends_the_run(tmp_path, way, error, message):
    config = mock_config(tmp_path, deadlines={"update": 0.05})
    adapter = Failing(MockOptions(), config)
    adapter.way = way
    with pytest.raises(error, match=message):
        await train(config, parts=parts_with(config, adapter))
    assert events(tmp_path, "end")[0]["status"] == "failed"
    assert len(events(tmp_path, "update")) == 1
