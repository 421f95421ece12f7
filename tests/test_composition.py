"""How several rewards make one: tables of values, gates that save calls, and parts per turn."""

import json
from dataclasses import replace

import pytest

from retrain import BudgetError
from retrain.assembly import assemble
from retrain.config import GateConfig, ScheduleConfig, parse_config
from retrain.errors import ConfigError
from retrain.observe.rollout_lines import encoded
from retrain.pipeline.checkpoint import group_from_json, group_to_json
from retrain.scoring import Reward, RewardCalculator, Scorer, Term, WeightedReward
from retrain.scoring.composition import Combined, Composition, weight_at
from retrain.types import Completion, Group, Prompt, Trajectory, Turn


def schedule(**keys):
    return ScheduleConfig(**{"start": 1.0, "end": 0.0, "steps": 4} | keys)


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (0.5, [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        (schedule(), [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (schedule(begin=1, end=3.0, steps=2), [1.0, 1.0, 2.0, 3.0, 3.0, 3.0]),
        (schedule(shape="step"), [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]),
        (schedule(shape="cosine"), [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0.0, 0.0]),
    ],
)
def test_the_weight_at_each_step(weight, expected):
    assert [weight_at(weight, step) for step in range(6)] == pytest.approx(expected)


def leaf(name, weight=1.0, **rules):
    return WeightedReward(name, weight, RewardCalculator, **rules)  # never called here


GATE = GateConfig(name="a")
HALF = GateConfig(name="a", at_least=0.5)


@pytest.mark.parametrize(
    ("terms", "values", "total", "factors"),
    [
        ([leaf("a", 2.0), leaf("b")], {"a": 3, "b": 1}, 7, {"environment": 1, "a": 2, "b": 1}),
        ([leaf("a")], {"a": 3, "environment": 4}, 7, {"environment": 1, "a": 1}),
        ([Term("environment", 0.5), leaf("a")], {"a": 3, "environment": 4}, 5,
         {"environment": 0.5, "a": 1}),
        ([leaf("a", clip=(-1.0, 1.0), weight=2.0)], {"a": -9}, -2, {"environment": 1}),
        ([leaf("a"), leaf("b", gate=GATE)], {"a": 0, "b": 7}, 0, {"environment": 1, "a": 1}),
        ([leaf("a"), leaf("b", gate=GATE)], {"a": 0.1, "b": 7}, 7.1,
         {"environment": 1, "a": 1, "b": 1}),
        ([leaf("a"), leaf("b", gate=HALF)], {"a": 0.4, "b": 7}, 0.4, {"environment": 1, "a": 1}),
        ([Combined("p", 3.0, "product", (leaf("a"), leaf("b", 2.0)))], {"a": 0.5, "b": 4}, 12,
         {"environment": 1}),
        ([Combined("m", 1.0, "min", (leaf("a"),
                                     Combined("s", 0.5, "sum", (leaf("b"), leaf("c")))))],
         {"a": 3, "b": 1, "c": 2}, 1.5, {"environment": 1}),
        ([Combined("s", 2.0, "sum", (leaf("a"), leaf("b", 3.0)))], {"a": 1, "b": 1}, 8,
         {"environment": 1, "a": 2, "b": 6}),
        # a part that is left out of a product is no factor 0
        ([leaf("a", 0.0), Combined("p", 1.0, "product", (leaf("b"), leaf("c", gate=GATE)))],
         {"a": 0, "b": 5}, 5, {"environment": 1, "a": 0}),
        # a gate on a combination, and inside of a gated one
        ([leaf("a"), Combined("s", 1.0, "sum", (leaf("b"),), gate=GATE),
          leaf("c", gate=GateConfig(name="s"))], {"a": 0, "b": 2, "c": 5}, 0,
         {"environment": 1, "a": 1}),
    ],
)  # fmt: skip
def test_the_total_and_how_it_grows_with_each_reward(terms, values, total, factors):
    composition = Composition(terms)
    assert composition.total(values, 0) == pytest.approx(total)
    assert composition.factors(values, 0) == pytest.approx(factors)


def test_a_plain_sum_has_a_short_way_with_the_same_result():
    values = {"environment": 0.1, "a": 0.2, "b": 0.7}
    plain = Scorer([leaf("a", 0.3), leaf("b", 3.0)])
    assert plain.composition.weights == (("a", 0.3), ("b", 3.0))
    long_way = Composition([leaf("a", 0.3), leaf("b", 3.0), Combined("none", 1.0, "min", ())])
    assert long_way.weights is None
    assert plain.total(values, 0) == long_way.total(values, 0) == 0.1 + 0.3 * 0.2 + 3.0 * 0.7


EXACT = {"type": "exact_match"}
SLOT = {"type": "slot_match"}


@pytest.mark.parametrize(
    ("rewards", "message"),
    [
        ([EXACT, {**SLOT, "only_if": "exact"}],
         "'slot_match'"),
        ([{**EXACT, "only_if": "slot_match"}, {**SLOT, "only_if": "exact_match"}],
         "only_if"),
        ([{"type": "min", "of": [EXACT, SLOT], "only_if": "slot_match"}],
         "only_if: slot_match -> slot_match"),
        ([{"type": "product", "of": ["exact_match", {**SLOT, "name": "exact_match"}]}],
         "rewards.0.of.0"),
        ([EXACT, {"numeric": {}}], "path/file.py:Class"),
        ([EXACT, {**SLOT, "gate": "exact_match"}], "rewards.1.gate"),
        ([{"type": "trl.rewards:think_format"}], "think_format_reward"),
        ([{**EXACT, "api_key": "sk-1"}], "rewards.0.api_key_env"),
        ([{"type": "sum", "name": "environment", "of": [EXACT]}], "'environment'"),
        ([{"type": "product"}], "rewards.0.of"),
        ([{"type": "product", "of": [EXACT], "processes": 2}], "rewards.0.processes"),
        ([{"type": "environment", "name": "own"}], "rewards.0.name"),
        ([{"type": "min", "of": ["exact_mach"]}], "rewards.0.of.0.type: "),
        ([{**EXACT, "of": [SLOT]}], "rewards.0.of: exact_match"),
        ([{**EXACT, "clip": [1, 0]}], "rewards.0.clip: got [1"),
        ([{**EXACT, "weight": "x"}], "rewards.0.weight: got 'x'"),
        ([{**EXACT, "weight": {"start": 1, "end": 0}}], "rewards.0.weight.steps"),
        ([{**EXACT, "weight": {"start": 1, "end": 0, "step": 9}}],
         "rewards.0.weight.steps"),
        ([{**EXACT, "only_if": {"nme": "a"}}], "rewards.0.only_if.nme"),
    ],
)  # fmt: skip
def test_a_mistake_is_an_error_at_the_start(rewards, message):
    with pytest.raises(ConfigError) as caught:
        assemble(parse_config({"prompts": ["a"], "rewards": rewards}))
    assert message in str(caught.value)


def played(*texts, turns=1, version=0):
    prompt = Prompt("0.0.0", [{"role": "user", "content": "?"}], "yes")
    turn = [Turn([1], Completion([2, 3], [-0.5] * 2, text, "stop", version)) for text in texts]
    return Group(prompt, [Trajectory(prompt, [one] * turns) for one in turn])


class Length(RewardCalculator):
    """Notes what it is called with."""

    def __init__(self, scale=1.0, **made):
        self.scale, self.made, self.called = scale, made, []

    async def calculate(self, trajectory):
        self.called.append(trajectory.completion)
        return Reward(self.scale * len(trajectory.completion), **self.made)


async def test_a_gated_reward_is_called_only_for_the_rollouts_that_pass():
    first, second, third = Length(), Length(0.5), Length(10.0)
    scorer = Scorer(
        [
            WeightedReward("third", 1.0, third, gate=GateConfig(name="second", at_least=1.0)),
            WeightedReward("second", 1.0, second, gate=GateConfig(name="first")),
            WeightedReward("first", 1.0, first),
        ]
    )
    group = played("", "a", "ab")
    await scorer.score(group)
    assert (first.called, second.called, third.called) == (["", "a", "ab"], ["a", "ab"], ["ab"])
    assert [t.rewards for t in group.trajectories] == [
        {"first": 0.0},
        {"second": 0.5, "first": 1.0},
        {"third": 20.0, "second": 1.0, "first": 2.0},
    ]
    assert [t.reward for t in group.trajectories] == [0.0, 1.5, 23.0]


async def test_a_gated_reward_whose_every_call_fails_is_reported_once_and_not_for_evaluations():
    class Broken(RewardCalculator):
        async def calculate(self, trajectory):
            raise KeyError("oops")

    gated = WeightedReward("broken", 1.0, Broken(), gate=GateConfig(name="first"))
    scorer, warnings = Scorer([gated, WeightedReward("first", 1.0, Length())]), []
    async with scorer.serving(warnings.append):
        for _ in range(20):
            group = played("", "a")
            await scorer.score(group)
        [message] = warnings
        assert "'broken'" in message
        assert "KeyError: 'oops'" in message
        assert scorer.metrics() == {"reward/broken/called": 0.5}
        for trajectory in group.trajectories:
            trajectory.prompt = replace(trajectory.prompt, id="-1.0.0")
        await scorer.score(group)
        assert scorer.metrics() == {}


async def test_a_failed_gate_keeps_the_judge_from_being_called():
    judge = Length()
    bad = Length(outcome="invalid")
    parts = [
        WeightedReward("bad", 1.0, bad),
        WeightedReward("judge", 1.0, judge, gate=GateConfig(name="bad")),
    ]
    group = played("a")
    await Scorer(parts).score(group)
    assert not judge.called
    assert group.trajectories[0].outcome == "invalid"


async def test_a_schedule_counts_versions_and_a_combination_is_reported():
    weight = ScheduleConfig(start=1.0, end=0.0, steps=10)
    for version, expected in ((0, 2.0), (5, 1.0), (20, 0.0)):
        parts = Combined("both", weight, "min", (WeightedReward("a", 1.0, Length()),))
        group = played("ab", version=version)
        await Scorer([parts]).score(group)
        [trajectory] = group.trajectories
        assert trajectory.reward == expected
        assert trajectory.rewards == {"a": 2.0, "both": 2.0}


async def test_parts_per_turn_and_token_are_weighted_and_survive_a_checkpoint():
    group = played("ab", turns=2)
    [trajectory] = group.trajectories
    trajectory.turns = [turn._replace(reward=0.25) for turn in trajectory.turns]
    trajectory.rewards["environment"] = 0.5
    judge = Length(turns=[1, 0.5], tokens=[0, 0, 0.125, 0])
    shut = Length(turns=[8, 8])
    await Scorer(
        [WeightedReward("judge", 2.0, judge), WeightedReward("shut", 1.0, shut, clip=(0.0, 1.0))]
    ).score(group)
    assert trajectory.reward == 0.5 + 2.0 * 2 + 1.0
    assert trajectory.turn_rewards == [2.25, 1.25]
    assert all(
        json.loads(line + b"}")["turn_rewards"] == [2.25, 1.25]
        for info in ({}, {"a": 1})
        for line in encoded(replace(group, trajectories=[replace(trajectory, info=info)]))
    )
    assert trajectory.token_rewards == [0, 0, 0.25, 0]
    again = group_from_json(group_to_json(group), lambda ticket: group.prompt)
    assert again.trajectories[0].turn_rewards == [2.25, 1.25]
    assert again.trajectories[0].token_rewards == [0, 0, 0.25, 0]


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ({"turns": [1, 2]}, "returned 2 turns"),
        ({"tokens": [1]}, "returned 1 tokens, expected one number for each sampled token"),
        ({"turns": ["x"]}, "reward 'a', turns returned 'x', expected a finite number"),
        ({"turns": 3}, "reward 'a' returned the turns 3, expected a list of numbers"),
        ({"turns": [1e308]}, "a turn or token has a reward above"),
    ],
)
async def test_parts_that_do_not_fit_fail_the_rollout(made, message):
    group = played("a")
    await Scorer([WeightedReward(n, 1.0, Length(**made)) for n in "ab"]).score(group)
    assert group.trajectories[0].outcome == "infra_error"
    assert message in group.trajectories[0].info["error"]


@pytest.mark.parametrize(
    "terms",
    [
        lambda parts: [*parts, WeightedReward("c", -1e308, Length())],
        lambda parts: [Combined("both", 1.0, "product", parts, clip=(0.0, 1.0))],
    ],
)
async def test_no_total_or_combination_is_infinite(terms):
    group = played("a" * 10)
    parts = tuple(WeightedReward(name, 1e308, Length()) for name in "ab")
    await Scorer(terms(parts)).score(group)
    assert group.trajectories[0].outcome == "infra_error"
    assert "expected numbers of at most" in group.trajectories[0].info["error"]


class Costly(RewardCalculator):
    async def calculate(self, trajectory):
        raise BudgetError("max_calls is used up")

    def metrics(self):
        return {"calls": 3, "cost": "x"} if self.name else {"calls": 3}


async def test_a_used_up_budget_is_raised_and_metrics_are_named_after_the_reward():
    scorer = Scorer([WeightedReward("a", 1.0, Costly()), WeightedReward("b", 1.0, Length())])
    with pytest.raises(BudgetError, match="max_calls"):
        await scorer.score(played("a", "b"))
    faults = []
    assert scorer.metrics(faults.append) == {"reward/a/calls": 3.0}
    assert not faults
    scorer.rewards[0].calculator.name = "broken"
    assert scorer.metrics(faults.append) == {"reward/a/calls": 3.0}
    assert "ValueError" in faults[0]
