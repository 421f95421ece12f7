"""Advantage formulas as plain functions of numbers: float64, two passes, no torch.

A *flat* set of rewards (max - min within 1e-8 of the largest magnitude, or of 1) carries no signal:
its advantages are exactly 0, whatever rounding would make of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
KLEstimator = Literal["k1", "abs", "k2", "k3"]
FLAT = 1e-8
LARGEST = 1e30
"""Rewards beyond it are refused: a loss in float32 could not take them, which ends at 3e38."""


def is_flat(rewards: Sequence[float], tolerance: float = FLAT) -> bool:
    """Whether the rewards are all equal, up to rounding; also true of none and of one."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= tolerance * max(1.0, abs(low), abs(high))


def std(values: Sequence[float], ddof: int = 1) -> float:
    """Standard deviation over n - ddof, of a sample by default; 0.0 of `ddof` values or fewer.

    By `hypot`, whose squares don't overflow.
    """
    count = len(values)
    if count <= ddof:
        return 0.0
    mean = math.fsum(values) / count
    return math.hypot(*[value - mean for value in values]) / math.sqrt(count - ddof)


def check_finite(rewards: Sequence[float], group: str) -> None:
    """Raises ValueError naming the first reward that is NaN or beyond LARGEST."""
    for index, value in enumerate(rewards):
        if not abs(value) <= LARGEST:
            raise ValueError(
                f"trajectory {index} of group {group} has reward {value}: a reward must be finite, "
                f"at most {LARGEST:g}; mark a failed rollout by its outcome instead"
            )


def centred(rewards: Sequence[float], baseline: Baseline = "mean") -> list[float]:
    """r_i - b_i with b the mean of all, or of the others (leave-one-out, Kool et al. 2019).

    Leave-one-out is n / (n - 1) times the other. Zeros for a flat set.
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

    With `run_ids`, entries of one id are segments of one rollout: each rollout counts once, by the
    mean of its segments' rewards, and its segments share its advantage.
    """
    if run_ids is None:
        deltas = centred(rewards, baseline)
        divisor = std(rewards) + eps if scale else 1.0
        return [delta / divisor for delta in deltas]
    if len(run_ids) != len(rewards):
        raise ValueError(f"{len(run_ids)} run_ids for {len(rewards)} rewards: one each is expected")
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
    """Each token's estimate of KL(p || ref) from a token that p sampled, d = log p - log ref.

    `k1` is d, unbiased and of either sign; `abs` |d|; `k2` d^2 / 2; `k3` exp(-d) - 1 + d, unbiased
    and never negative (http://joschu.net/blog/kl-approx.html). Beyond d = -50 `k3` stays finite.
    """
    gaps = [lp - ref for lp, ref in zip(logprobs, reference, strict=True)]
    if estimator == "k1":
        return gaps
    if estimator == "abs":
        return [abs(gap) for gap in gaps]
    if estimator == "k2":
        return [gap * gap / 2 for gap in gaps]
    if estimator == "k3":
        return [math.expm1(min(-gap, 50.0)) + gap for gap in gaps]
    raise ValueError(f"estimator: got {estimator!r}, expected k1, abs, k2 or k3")


def token_rewards(reward: float, loss_mask: Sequence[int]) -> list[float]:
    """A rollout's reward as one per token: all of it on the last trained token, (T,).

    Zeros where no token is trained.
    """
    rewards = [0.0] * len(loss_mask)
    for index in range(len(loss_mask) - 1, -1, -1):
        if loss_mask[index]:
            rewards[index] = float(reward)
            break
    return rewards


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
    value of the state after the last reward, 0.0 where the episode ended there. A_t + V_t are the
    returns that a value function is fitted to.
    """
    if len(values) != len(rewards):
        raise ValueError(f"{len(values)} values for {len(rewards)} rewards: one each is expected")
    advantages = [0.0] * len(rewards)
    following, after = 0.0, last_value
    for t in range(len(rewards) - 1, -1, -1):
        following = rewards[t] + gamma * after - values[t] + gamma * lam * following
        advantages[t], after = following, values[t]
    return advantages


def n_step_returns(
    rewards: Sequence[float], n: int, gamma: float, values: Sequence[float] | None = None
) -> list[float]:
    """G_t = sum_{j<n} gamma^j r_{t+j}, cut where the episode ends (Sutton & Barto 2018, eq. 7.1).

    With `values`, gamma^n V_{t+n} is added where the episode goes on after the n steps.
    """
    if n < 1:
        raise ValueError(f"n: got {n}, expected at least one step")
    if values is not None and len(values) != len(rewards):
        raise ValueError(f"{len(values)} values for {len(rewards)} rewards: one each is expected")
    returns = []
    for t in range(len(rewards)):
        total = math.fsum(gamma**j * reward for j, reward in enumerate(rewards[t : t + n]))
        if values is not None and t + n < len(rewards):
            total += gamma**n * values[t + n]
        returns.append(total)
    return returns
