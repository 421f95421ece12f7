"""The advantage formulas against values worked out by hand, and their edge cases."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms.functional import centred, group_relative, is_flat, kl_k3, std
from retrain.algorithms.grpo import GRPO
from retrain.algorithms.reinforce import Reinforce
from retrain.algorithms.rloo import RLOO
from retrain.types import Group, Prompt, Trajectory


def group(*rewards: float, ticket: str = "0.0.0") -> Group:
    prompt = Prompt(ticket, [{"role": "user", "content": "?"}])
    return Group(prompt, [Trajectory(prompt, reward=r) for r in rewards])


@pytest.mark.parametrize(
    ("rewards", "baseline", "index", "expected"),
    [
        ([1, 0, 0, 0], "mean", 0, 1.4997),  # .75 / (.5 + 1e-4)
        ([1, 0, 0, 0], "leave_one_out", 0, 1.9996),  # 1 / (.5 + 1e-4)
        ([0.35] * 7 + [0.95], "mean", 7, 2.4737),  # .525 / (.2121 + 1e-4)
        ([0.35] * 7 + [0.95], "leave_one_out", 7, 2.8271),
        ([1, 0], "mean", 0, 0.70701),  # .5 / (.70711 + 1e-4)
        ([1, 0], "leave_one_out", 1, -1.41401),
    ],
)
def test_grpo_gives_the_values_worked_out_by_hand(rewards, baseline, index, expected):
    [values] = GRPO(baseline=baseline).advantages([group(*rewards)])
    assert values[index] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("rewards", [[], [3.0], [0.1] * 8, [0.1 + 0.2, 0.3], [1e9, 1e9 + 1e-3]])
@pytest.mark.parametrize(
    "algorithm", [GRPO(), GRPO(scale="batch"), RLOO(), Reinforce(), Reinforce("batch")]
)
def test_a_flat_group_has_advantages_of_exactly_zero(rewards, algorithm):
    [values] = algorithm.advantages([group(*rewards)])
    assert values == [0.0] * len(rewards)


def test_no_groups_have_no_advantages():
    assert GRPO(scale="batch").advantages([]) == []
    assert RLOO().advantages([]) == []


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1e154])
@pytest.mark.parametrize("algorithm", [GRPO(), GRPO(scale="none"), RLOO(), Reinforce()])
def test_a_reward_that_is_not_finite_is_an_error_that_names_it(algorithm, bad):
    with pytest.raises(ValueError, match=r"1.*2\.7\.0"):
        algorithm.advantages([group(0, 1), group(1, bad, ticket="2.7.0")])


def test_the_square_of_a_large_reward_does_not_overflow():
    assert std([1e200, 0, 0, 0]) == pytest.approx(5e199)
    assert group_relative([1e200, 0, 0, 0]) == pytest.approx([1.5, -0.5, -0.5, -0.5])


def test_batch_scaling_divides_by_the_std_of_the_whole_batch():
    credit = GRPO(scale="batch").advantages([group(1, 0), group(4, 0)])
    whole = std([1, 0, 4, 0]) + 1e-4
    assert whole == pytest.approx(1.8930 + 1e-4, abs=1e-4)
    assert credit == [[0.5 / whole, -0.5 / whole], [2 / whole, -2 / whole]]


def test_no_scaling_leaves_the_difference_from_the_mean():
    assert GRPO(scale="none").advantages([group(1, 0, 0, 0)]) == [[0.75, -0.25, -0.25, -0.25]]


def test_segments_of_one_rollout_count_once():
    # rollouts a (one segment, 1) and b (three segments, mean 0): not four rewards of mean .25
    values = group_relative([1, 0, 0, 0], run_ids=["a", "b", "b", "b"])
    assert values == pytest.approx([0.70701, -0.70701, -0.70701, -0.70701], abs=1e-4)


def test_run_ids_must_match_the_rewards():
    with pytest.raises(ValueError, match=r"1 run_ids.*2"):
        group_relative([1, 0], run_ids=["a"])


def test_rloo_compares_with_the_mean_of_the_others():
    assert RLOO().advantages([group(3, 1, 2)]) == [[1.5, -1.5, 0.0]]


floats = st.floats(-1e3, 1e3)


@given(st.lists(floats, min_size=2, max_size=12))
def test_advantages_sum_to_zero(rewards):
    for values in (centred(rewards), centred(rewards, "leave_one_out"), group_relative(rewards)):
        assert math.fsum(values) == pytest.approx(0, abs=1e-6)


@given(st.lists(floats, min_size=2, max_size=12), st.floats(-100, 100))
def test_a_constant_added_to_all_rewards_changes_nothing(rewards, shift):
    shifted = [r + shift for r in rewards]
    if is_flat(rewards) == is_flat(shifted):
        assert centred(shifted) == pytest.approx(centred(rewards), abs=1e-6)


@given(st.lists(floats, min_size=2, max_size=12))
def test_leave_one_out_is_the_mean_baseline_times_n_over_n_minus_1(rewards):
    n = len(rewards)
    expected = [n / (n - 1) * v for v in centred(rewards)]
    assert centred(rewards, "leave_one_out") == pytest.approx(expected)


def test_k3_estimates_the_kl_and_stays_finite():
    p, ref = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    exact = sum(a * math.log(a / b) for a, b in zip(p, ref, strict=True))
    each = kl_k3([math.log(a) for a in p], [math.log(b) for b in ref])
    assert sum(a * kl for a, kl in zip(p, each, strict=True)) == pytest.approx(exact)
    assert each[0] == pytest.approx(0.4 - 1 + math.log(2.5))  # exp(-d) - 1 + d
    assert math.isfinite(kl_k3([-1000.0], [0.0])[0])
