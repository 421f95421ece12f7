"""Advantage formulas as plain functions of numbers: float64, two passes, no torch.

A *flat* set of rewards (max - min within 1e-8 of the largest magnitude, or of 1) carries no signal:
its advantages are exactly 0, whatever rounding would make of them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Literal

Baseline = Literal["mean", "leave_one_out"]
FLAT = 1e-8


def is_flat(rewards: Sequence[float], tolerance: float = FLAT) -> bool:
    """Whether the rewards are all equal, up to rounding; also true of none and of one."""
    if len(rewards) < 2:
        return True
    low, high = min(rewards), max(rewards)
    return high - low <= tolerance * max(1.0, abs(low), abs(high))


def std(values: Sequence[float]) -> float:
    """Sample standard deviation (ddof 1), 0.0 of fewer than two values."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1))


def check_finite(rewards: Sequence[float], group: str) -> None:
    """Raises ValueError naming the first reward that is NaN or infinite."""
    for index, value in enumerate(rewards):
        if not math.isfinite(value):
            raise ValueError(
                f"trajectory {index} of group {group} has reward {value}: "
                "a reward must be finite; mark a failed rollout by its outcome instead"
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
