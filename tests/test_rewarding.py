"""Reward functions, calculators, and how several make one reward."""

import asyncio
import threading
import time

import pytest

from retrain.config import DeadlinesConfig
from retrain.errors import PluginError
from retrain.rewarding import (
    FunctionReward,
    Reward,
    RewardCalculator,
    Scorer,
    WeightedReward,
    reward,
)
from retrain.types import Completion, Group, Prompt, Trajectory, Turn


def played(*texts: str, answer="yes") -> Group:
    prompt = Prompt("0.0.0", [{"role": "user", "content": "well?"}], answer, {"level": 3})
    group = Group(prompt, [])
    for text in texts:
        turn = Turn([1], Completion([2], [-0.5], text, "stop", 0))
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
        group.trajectories.append(Trajectory(prompt, [turn], messages=messages))
    return group


async def scored(group: Group, *rewards, weights=(1.0, 1.0, 1.0), **keys) -> list[Trajectory]:
    parts = [
        WeightedReward(r.name or type(r).__name__, w, r)
        for r, w in zip(rewards, weights, strict=False)
    ]
    scorer = Scorer(parts, **keys)
    async with scorer.serving(pytest.fail):
        await scorer.score(group)
    return group.trajectories


@reward
def right(completion, answer):
    return completion == answer


@reward(name="long")
async def length(completion, **rest):
    assert set(rest) == {"prompt", "answer", "messages", "metadata", "trajectory"}
    return Reward(
        len(completion), {"characters": len(completion), "level": rest["metadata"]["level"]}
    )


async def test_the_reward_is_the_weighted_sum_of_the_components():
    yes, no = await scored(played("yes", "n"), right, length, weights=(2.0, 0.5))
    assert (yes.reward, no.reward) == (2.0 + 1.5, 0.5)
    assert yes.rewards == {"right": 1.0, "long": 3.0, "long.characters": 3.0, "long.level": 3.0}


async def test_the_environments_own_reward_is_added_once():
    group = played("yes")
    group.trajectories[0].rewards["environment"] = 0.25
    [trajectory] = await scored(group, right)
    assert trajectory.reward == 1.25


async def test_without_rewards_the_environments_is_the_reward():
    group = played("yes", "no")
    group.trajectories[1].rewards["environment"] = 0.5
    assert [t.reward for t in await scored(group)] == [0.0, 0.5]


def test_a_reward_function_is_still_a_function():
    assert right("a", "a") is True
    assert right.name == "right"
    assert length.name == "long"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("prompt", "well?"),
        ("completion", "yes"),
        ("answer", "yes"),
        ("metadata", {"level": 3}),
    ],
)
async def test_a_function_gets_the_names_that_it_declares(name, expected):
    scope: dict = {}
    exec(f"def judge({name}):\n    seen.append({name})\n    return 0", scope)
    scope["seen"] = []
    await scored(played("yes"), reward(scope["judge"]))
    assert scope["seen"] == [expected]


def test_a_function_that_asks_for_an_unknown_name_is_refused_at_once():
    with pytest.raises(
        PluginError, match=r"requires response, .*called by name with any of prompt"
    ):
        reward(lambda response: 1.0)


async def test_keys_of_the_yaml_are_bound_and_not_passed_twice():
    def near(completion, answer, tolerance, **rest):
        assert "tolerance" not in rest
        return tolerance

    [trajectory] = await scored(played("yes"), reward(near, tolerance=0.3))
    assert trajectory.reward == 0.3


def test_two_rewards_of_one_name_are_refused():
    with pytest.raises(PluginError, match="give each its own `name`"):
        Scorer([WeightedReward("a", 1, right), WeightedReward("a", 1, right)])


class Best(RewardCalculator):
    """1 for the longest of the group."""

    def __init__(self, returns=None):
        self.returns = returns

    async def calculate(self, trajectory):
        raise NotImplementedError

    async def calculate_group(self, group):
        if self.returns is not None:
            return self.returns
        top = max(len(t.completion) for t in group)
        return [float(len(t.completion) == top) for t in group]


async def test_a_group_can_be_scored_as_a_whole():
    assert [t.reward for t in await scored(played("a", "aaa", "aa"), Best())] == [0, 1, 0]


async def test_a_group_of_rewards_of_the_wrong_length_is_the_calculators_fault():
    trajectories = await scored(played("a", "b"), Best([1.0]))
    assert {t.outcome for t in trajectories} == {"infra_error"}
    assert (
        "returned 1 rewards, expected one for each of 2 trajectories"
        in trajectories[0].info["error"]
    )


async def test_rollouts_that_failed_before_are_not_scored():
    group = played("aaa", "a")
    group.trajectories[0].outcome = "timeout"
    first, second = await scored(group, Best())
    assert (first.outcome, first.rewards, second.reward) == ("timeout", {}, 1.0)


async def test_async_rewards_of_a_group_run_at_once():
    meeting = asyncio.Barrier(4)

    @reward
    async def together(completion):
        await meeting.wait()
        return 1.0

    async with asyncio.timeout(5):
        assert [t.reward for t in await scored(played(*"abcd"), together)] == [1.0] * 4


async def test_a_plain_function_runs_in_a_thread_and_blocks_nobody():
    loop_thread, threads = threading.get_ident(), set()

    @reward
    def judge(completion):
        threads.add(threading.get_ident())
        return 1.0

    await scored(played("a", "b"), judge)
    assert loop_thread not in threads
    assert len(threads) == 1, "one hop for a group while the function is quick"


async def test_a_slow_plain_function_gets_a_thread_for_each_rollout():
    gate = threading.Barrier(4, timeout=5)

    def judge(completion):
        if completion == "slow":
            time.sleep(0.03)
        else:
            gate.wait()
        return 1.0

    scorer = Scorer([WeightedReward("judge", 1.0, FunctionReward(judge))])
    await scorer.score(played("slow"))
    group = played(*"abcd")
    await scorer.score(group)
    assert [t.reward for t in group.trajectories] == [1.0] * 4, "the four met in four threads"


async def test_what_a_thread_had_scored_before_its_deadline_counts():
    never = threading.Event()

    @reward
    def judge(completion):
        if completion == "c":
            never.wait()
        return 1.0

    trajectories = await scored(played(*"abcd"), judge, deadlines=DeadlinesConfig(reward=0.1))
    never.set()
    assert [t.outcome for t in trajectories] == ["ok", "ok", "timeout", "timeout"]


async def test_an_error_names_the_reward_and_the_line():
    @reward
    async def judge(completion):
        raise KeyError("score")

    [trajectory] = await scored(played("a"), judge)
    assert trajectory.info["error"].startswith("reward 'judge' raised KeyError: 'score' (test_rew")


async def test_no_more_groups_than_the_bound_are_scored_at_once():
    now = most = 0

    @reward
    async def judge(completion):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return 1.0

    scorer = Scorer([WeightedReward("judge", 1.0, judge)], concurrency=2)
    await asyncio.gather(*(scorer.score(played("a")) for _ in range(8)))
    assert most == 2
