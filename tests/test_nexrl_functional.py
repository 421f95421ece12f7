"""The formulas behind the patterns of NexRL's page, on numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms.functional import (
    gae,
    kl_estimates,
    n_step_returns,
    token_rewards,
)

NUMBERS = st.floats(-5, 5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("k1", [math.log(2), -math.log(2), 0.0]),
        ("abs", [math.log(2), math.log(2), 0.0]),
        ("k2", [math.log(2) ** 2 / 2, math.log(2) ** 2 / 2, 0.0]),
        # exp(-d) - 1 + d with d = log 2 and -log 2
        ("k3", [0.5 - 1 + math.log(2), 2 - 1 - math.log(2), 0.0]),
    ],
)
def test_kl_estimates_of_a_halved_a_doubled_and_an_equal_probability(estimator, expected) -> None:
    logprobs, reference = [-1.0, -2.0, -3.0], [-1.0 - math.log(2), -2.0 + math.log(2), -3.0]
    assert kl_estimates(logprobs, reference, estimator) == pytest.approx(expected)


def test_the_expectation_of_k1_and_of_k3_is_the_kl() -> None:
    p, ref = [0.5, 0.3, 0.2], [0.2, 0.3, 0.5]
    exact = sum(a * math.log(a / b) for a, b in zip(p, ref, strict=True))
    for estimator in ("k1", "k3"):
        each = kl_estimates([math.log(a) for a in p], [math.log(b) for b in ref], estimator)
        assert sum(a * kl for a, kl in zip(p, each, strict=True)) == pytest.approx(exact)


def test_k3_stays_finite_where_the_reference_is_certain_of_what_the_policy_excludes() -> None:
    assert math.isfinite(kl_estimates([-1000.0], [0.0], "k3")[0])


def test_an_unknown_estimator_is_named() -> None:
    with pytest.raises(ValueError, match="got 'k4', expected k1, abs, k2 or k3"):
        kl_estimates([0.0], [0.0], "k4")  # type: ignore[arg-type]  # a typing mistake at run time


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ([0, 1, 1, 0], [0, 0, 2.5, 0]),
        ([0, 1, 1, 1], [0, 0, 0, 2.5]),
        ([0, 0], [0, 0]),
        ([], []),
    ],
)
def test_a_reward_stands_on_the_last_trained_token(mask, expected) -> None:
    assert token_rewards(2.5, mask) == expected


def test_gae_of_three_steps_worked_out_by_hand() -> None:
    # gamma .5, lam .5: deltas 1 + .5*2 - 1 = 1, 0 + .5*4 - 2 = 0, 2 + 0 - 4 = -2
    # A_2 = -2, A_1 = 0 + .25*-2 = -.5, A_0 = 1 + .25*-.5 = .875
    assert gae([1, 0, 2], [1, 2, 4], gamma=0.5, lam=0.5) == pytest.approx([0.875, -0.5, -2])
    # with a value of 8 after the end: delta_2 = 2 + 4 - 4 = 2
    bootstrapped = gae([1, 0, 2], [1, 2, 4], gamma=0.5, lam=0.5, last_value=8.0)
    assert bootstrapped == pytest.approx([1.125, 0.5, 2])


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), st.floats(0, 1))
def test_gae_with_lam_1_is_the_return_less_the_value(steps, gamma) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    returns = n_step_returns(rewards, len(rewards), gamma)
    expected = [g - v for g, v in zip(returns, values, strict=True)]
    assert gae(rewards, values, gamma=gamma, lam=1.0) == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=1, max_size=8), st.floats(0, 1))
def test_gae_with_lam_0_is_the_one_step_return_less_the_value(steps, gamma) -> None:
    rewards, values = [r for r, _ in steps], [v for _, v in steps]
    returns = n_step_returns(rewards, 1, gamma, values)
    expected = [g - v for g, v in zip(returns, values, strict=True)]
    assert gae(rewards, values, gamma=gamma, lam=0.0) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(
    ("n", "expected"),
    [
        (1, [1, 2, 3, 4]),
        (2, [1 + 1, 2 + 1.5, 3 + 2, 4]),
        (4, [1 + 1 + 0.75 + 0.5, 2 + 1.5 + 1, 3 + 2, 4]),
        (9, [3.25, 4.5, 5, 4]),
    ],
)
def test_n_step_returns_end_with_the_episode(n, expected) -> None:
    assert n_step_returns([1, 2, 3, 4], n, 0.5) == pytest.approx(expected)


def test_n_step_returns_go_on_with_the_value() -> None:
    returns = n_step_returns([1, 2, 3], 2, 0.5, values=[10, 20, 40])
    assert returns == pytest.approx([1 + 1 + 0.25 * 40, 2 + 1.5, 3])


def test_lengths_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="1 values for 2 rewards"):
        gae([1, 2], [1])
    with pytest.raises(ValueError, match="1 values for 2 rewards"):
        n_step_returns([1, 2], 1, 0.5, values=[1])
    with pytest.raises(ValueError, match="n: got 0, expected at least 1"):
        n_step_returns([1, 2], 0, 0.5)
