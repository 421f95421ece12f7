"""Advantage formulas as plain functions of numbers: float64, two passes, no torch.

Rewards are *flat* when max - min is at most 1e-8 times the largest magnitude (or 1): they carry no
signal, and their advantages are exactly 0, without a rounding error.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
FLAT = 1e-8
LARGEST = 1e30
"""The largest valid reward; a loss in float32, whose maximum is 3e38, would overflow."""


def is_flat(rewards: Sequence[float]) -> bool:
    """Whether all rewards are equal, up to rounding; true for fewer than two rewards."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= FLAT * max(1.0, abs(low), abs(high))


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
                f"trajectory {index} of group {group} has reward {value}, expected a finite "
                f"number of at most {LARGEST:g}; mark a failed rollout with its outcome instead"
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


def kl_k3(logprobs: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Each token's estimate of KL(p || ref) from a token that p sampled.

    exp(-d) - 1 + d with d = log p - log ref, unbiased and never negative (estimator k3 of
    http://joschu.net/blog/kl-approx.html); it is finite for every d.
    """
    gaps = (lp - ref for lp, ref in zip(logprobs, reference, strict=True))
    return [math.expm1(min(-gap, 50.0)) + gap for gap in gaps]
