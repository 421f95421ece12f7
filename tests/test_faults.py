"""Faults of environments, rewards and adapters: what each touches, and what ends a run."""

import asyncio
import itertools
import math
import sys

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.environment import Environment, StepResult
from retrain.errors import AdapterError, ConfigError, DeadlineError, NoSignalError, shown
from retrain.pipeline import train
from retrain.prompts import PromptSource
from retrain.scoring import Reward, RewardCalculator, reward
from tests.faults_kit import Odd, Panic, failure_of
from tests.pipe_kit import events, kept_adapter, parts_with, rollouts_of, slot_share


@pytest.mark.parametrize("where", ["setup", "reset", "step"])
async def test_when_every_rollout_fails_the_run_ends_with_the_first_cause(tmp_path, where):
    config = mock_config(tmp_path, environment={"type": "tests.faults_kit:Odd", "where": where})
    with pytest.raises(NoSignalError, match=rf"16 groups in a row.*Odd\.{where} raised Panic: bro"):
        await train(config)
    assert not events(tmp_path, "update")


class Breaks(Environment):
    """Raises for one prompt."""

    async def step(self, action):
        if self.prompt.text == "a=":
            raise RuntimeError("broken step")
        return StepResult([], 0.0, True, False, {})


async def test_p5_a_fault_in_one_prompts_rollouts_touches_only_its_group(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_faults:Breaks"},
        train={"total_train_steps": 6},
    )
    result = await train(config)
    dropped = events(tmp_path, "dropped")
    assert {e["cause"] for e in dropped} == {"failed"}
    assert sum(row["rollouts/failed"] for row in result.history) == 4 * len(dropped)
    assert sum(row["groups/trained"] for row in result.history) == 24


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


# --- what nobody expects


@pytest.mark.parametrize("error", ["cancelled", "exit", "panic", "stop", "timeout", "group"])
@pytest.mark.parametrize("where", ["setup", "reset", "step", "close"])
async def test_p5_whatever_an_environment_raises_is_its_own_rollouts_matter(tmp_path, where, error):
    Odd.calls = 0
    environment = {"type": "tests.faults_kit:Odd", "where": where, "error": error, "every": 6}
    config = mock_config(tmp_path, environment=environment)
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
    return {
        "huge": 10**400,
        "absurd": 1e200,
        "tensor": torch.ones(2),
        "components": Reward(1.0, None),
        "keys": Reward(1.0, {"a": math.nan}),
        "complex": 1j,
    }[how]


RAISED = ("exit", "cancelled", "panic", "timeout")
RETURNED = ("huge", "tensor", "components", "keys", "complex", "absurd")
"""All kinds are judged in one place."""


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *itertools.product(("OddReward", "PlainReward", "GroupReward", "plain_function"), RAISED),
        *itertools.product(("OddReward",), RETURNED),
    ],
)
async def test_p6_whatever_a_reward_does_is_its_rollouts_matter(tmp_path, kind, how):
    config = mock_config(
        tmp_path,
        rewards=[{"type": f"tests.test_faults:{kind}", "how": how}],
        train={"total_train_steps": 2, "max_failed_groups": 3},
    )
    hopeless = kind in ("PlainReward", "GroupReward")
    if hopeless:
        [error] = await failure_of(train(config))
        assert "3 groups in a row" in str(error)
        assert len(events(tmp_path, "dropped")) >= 3, "the group that ended the run counts too"
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
        tmp_path, checkpoint={"every": 1, "keep": 1}, deadlines={"checkpoint": 1.0}
    )
    async with asyncio.timeout(30):
        result = await train(config, parts=parts_with(config, Keeps(MockOptions(), config)))
    assert result.status == "completed"
    faults = [event["error"] for event in events(tmp_path, "fault")]
    assert any("service is down" in fault for fault in faults)
    assert any("deadlines.checkpoint" in fault for fault in faults)


async def test_a_source_without_rows_is_refused(tmp_path):
    config = mock_config(tmp_path, prompts={"type": "tests.test_faults:NoPrompts"})
    with pytest.raises(ConfigError, match=r"prompts: NoPrompts"):
        await train(config)


class NoPrompts(PromptSource):
    def __len__(self):
        return 0

    def row(self, index):
        raise IndexError(index)
