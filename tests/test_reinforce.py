"""REINFORCE with the batch's mean as baseline: hand-worked values, and what it calls a signal."""

import math

import pytest
from backends_kit import FULL, run_of

from retrain.algorithms.reinforce import Reinforce
from retrain.assembly import assemble
from retrain.errors import ConfigError
from retrain.pipeline import train
from tests.test_algorithms import group


def test_credit_is_the_reward_less_the_mean_of_the_whole_batch():
    assert Reinforce().advantages([group(1.0), group(0.0, 0.0), group(3.0)]) == [
        [0.0],
        [-1.0, -1.0],
        [2.0],
    ]


def test_batch_scaling_divides_by_the_std_of_all_rewards():
    credit = Reinforce("batch").advantages([group(1.0), group(3.0)])
    assert credit == [[pytest.approx(-1 / math.sqrt(2))], [pytest.approx(1 / math.sqrt(2))]]


def test_a_group_with_equal_rewards_still_learns_from_the_others():
    credit = Reinforce().advantages([group(1.0, 1.0), group(0.0, 0.0)])
    assert credit == [[0.5, 0.5], [-0.5, -0.5]]


async def test_it_learns_with_one_rollout_a_prompt(tmp_path):
    (tmp_path / "small.py").write_text(
        "def small(completion):\n    return sum(c.islower() for c in completion) / 4\n"
    )
    config = run_of(
        tmp_path / "run",
        {**FULL["trl"], "learning_rate": 3e-3},
        prompts={"type": "list", "rows": [f"{letter}=" for letter in "abcdefgh"]},
        rewards=[{"type": f"{tmp_path}/small.py:small"}],
        algorithm={"type": "reinforce", "group_size": 1, "scale": "batch"},
        sampling={"max_tokens": 4},
        train={"total_train_steps": 25, "groups_per_step": 32},
    )
    result = await train(config)
    assert all(row["groups/zero_signal"] == 0 for row in result.history)
    assert result.last_tenth_reward > result.first_tenth_reward + 0.3


def test_replacing_flat_groups_is_refused_where_the_batch_is_compared(tmp_path):
    config = run_of(
        tmp_path,
        FULL["trl"],
        prompts={"type": "list", "rows": ["a"]},
        rewards=[{"type": "exact_match"}],
        algorithm={"type": "reinforce", "group_size": 1},
        train={"no_signal": "refill"},
    )
    with pytest.raises(ConfigError, match="reinforce learns from groups with equal rewards"):
        assemble(config)
