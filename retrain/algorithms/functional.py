"""Advantage formulas as plain functions of numbers: float64, two passes, no torch.

Rewards are *flat* when max - min is at most 1e-8 times the largest magnitude (or 1): they carry no
signal, and their advantages are exactly 0, without a rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
KLEstimator = Literal["k1", "abs", "k2", "k3"]
FLAT = 1e-8
LARGEST = 1e30
"""The largest valid reward; a loss in float32, whose maximum is 3e38, would overflow."""


def is_flat(rewards: Sequence[float], tolerance: float = FLAT) -> bool:
    """Whether all rewards are equal, up to rounding; true for fewer than two rewards."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= tolerance * max(1.0, abs(low), abs(high))


def std(values: Sequence[float], ddof: int = 1) -> float:
    """Standard deviation over n - ddof; 0.0 for `ddof` values or fewer.

    It uses `hypot`, whose squares do not overflow.
    """
    count = len(values)
    if count <= ddof:
        return 0.0
    mean = math.fsum(values) / count
    return math.hypot(*[value - mean for value in values]) / math.sqrt(count - ddof)


def check_finite(rewards: Sequence[float], group: str) -> None:
    """Raises ValueError with the first reward that is NaN or exceeds LARGEST."""
    for index, value in enumerate(rewards):
        if not abs(value) <= LARGEST:
            raise ValueError(
                f"trajectory {index} of group {group} has reward {value}, expected a finite number "
                f"of at most {LARGEST:g}; mark a failed rollout by its outcome instead"
            )


def centred(rewards: Sequence[float], baseline: Baseline = "mean") -> list[float]:
    """r_i - b_i, where b_i is the mean of all, or of the others (leave-one-out, Kool et al. 2019).

    Leave-one-out is n / (n - 1) times the former. Zeros for flat rewards.
    """
    count = len(rewards)
    if is_flat(rewards):
        return [0.0] * count
    mean = math.fsum(rewards) / count
    factor = count / (count - 1) if baseline == "leave_one_out" else 1.0
    return [factor * (r - mean) for r in rewards]


def group_relative(
    rewards: Sequence[float],
    *,
    baseline: Baseline = "mean",
    scale: bool = True,
    eps: float = 1e-4,
    run_ids: Sequence[Hashable] | None = None,
) -> list[float]:
    """GRPO's advantage (Shao et al. 2024, eq. 3): (r - mean) / (std + eps), ddof 1.

    With `run_ids`, entries with one id are segments of one rollout. Each rollout counts once, with
    the mean reward of its segments, and its segments share its advantage.
    """
    if run_ids is None:
        deltas = centred(rewards, baseline)
        divisor = std(rewards) + eps if scale else 1.0
        return [delta / divisor for delta in deltas]
    if len(run_ids) != len(rewards):
        raise ValueError(f"got {len(run_ids)} run_ids for {len(rewards)} rewards; expected as many")
    segments: dict[Hashable, list[float]] = {}
    for run, value in zip(run_ids, rewards, strict=True):
        segments.setdefault(run, []).append(value)
    means = [math.fsum(values) / len(values) for values in segments.values()]
    credit = dict(
        zip(segments, group_relative(means, baseline=baseline, scale=scale, eps=eps), strict=True)
    )
    return [credit[run] for run in run_ids]


def kl_estimates(
    logprobs: Sequence[float], reference: Sequence[float], estimator: KLEstimator = "k1"
) -> list[float]:
    """Each token's estimate of KL(p || ref) from a token that p sampled, with d = log p - log ref.

    `k1` is d, unbiased and of either sign. `abs` is |d|. `k2` is d^2 / 2. `k3` is exp(-d) - 1 + d,
    unbiased and never negative (http://joschu.net/blog/kl-approx.html); it is finite for every d.
    """
    formulas: dict[KLEstimator, Callable[[float], float]] = {
        "k1": lambda gap: gap,
        "abs": abs,
        "k2": lambda gap: gap * gap / 2,
        "k3": lambda gap: math.expm1(min(-gap, 50.0)) + gap,
    }
    if estimator not in formulas:
        raise ValueError(f"estimator: got {estimator!r}, expected k1, abs, k2 or k3")
    formula = formulas[estimator]
    return [formula(lp - ref) for lp, ref in zip(logprobs, reference, strict=True)]


def token_rewards(reward: float, loss_mask: Sequence[int]) -> list[float]:
    """A rollout's reward as one per token, (T,): the last trained token gets it, the others 0."""
    last = max((index for index, kept in enumerate(loss_mask) if kept), default=-1)
    return [float(reward) if index == last else 0.0 for index in range(len(loss_mask))]


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    *,
    gamma: float = 0.99,
    lam: float = 0.95,
    last_value: float = 0.0,
) -> list[float]:
    """Generalised advantage estimation (Schulman et al. 2016, arXiv:1506.02438, eq. 16).

    A_t = sum_l (gamma lam)^l delta_{t+l},  delta_t = r_t + gamma V_{t+1} - V_t. `last_value` is the
    value of the state after the last reward, 0.0 if the episode ended there. A value function is
    fitted to the returns A_t + V_t.
    """
    if len(values) != len(rewards):
        raise ValueError(f"got {len(values)} values for {len(rewards)} rewards, expected one each")
    advantages = [0.0] * len(rewards)
    following, after = 0.0, last_value
    for t in range(len(rewards) - 1, -1, -1):
        following = rewards[t] + gamma * after - values[t] + gamma * lam * following
        advantages[t], after = following, values[t]
    return advantages


def n_step_returns(
    rewards: Sequence[float], n: int, gamma: float, values: Sequence[float] | None = None
) -> list[float]:
    """G_t = sum_{j<n} gamma^j r_{t+j}, to the end of the episode (Sutton & Barto 2018, eq. 7.1).

    With `values`, gamma^n V_{t+n} is added unless the episode ended within the n steps.
    """
    if n < 1:
        raise ValueError(f"n: got {n}, expected at least 1")
    if values is not None and len(values) != len(rewards):
        raise ValueError(f"got {len(values)} values for {len(rewards)} rewards, expected one each")
    returns = []
    for t in range(len(rewards)):
        total = math.fsum(gamma**j * reward for j, reward in enumerate(rewards[t : t + n]))
        if values is not None and t + n < len(rewards):
            total += gamma**n * values[t + n]
        returns.append(total)
    return returns
