"""GRPO: an advantage is a reward relative to those of its group (Shao et al. 2024, eq. 3)

    A_i = (r_i - mean(r)) / (std(r) + eps)          std with ddof 1

`baseline: leave_one_out` subtracts the mean of the other rewards, so the noise of r_i is not in its
own baseline. `scale: batch` divides by the std of the whole batch. `scale: none` does not divide
(Dr. GRPO, Liu et al. 2025: the group's std favours prompts that are very easy or very hard).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from retrain.algorithms.base import Algorithm
from retrain.algorithms.functional import Baseline, centred, check_finite, group_relative, std
from retrain.types import Group


class GRPO(Algorithm):
    """Group Relative Policy Optimization.

    Args:
        baseline: What a reward is compared with: the group's mean, or the mean of the others.
        scale: Divide by the standard deviation of the group, of the batch, or by 1 (`none`).
        eps: Added to the standard deviation, to avoid a division by zero.
    """

    def __init__(
        self,
        baseline: Baseline = "mean",
        scale: Literal["group", "batch", "none"] = "group",
        eps: float = 1e-4,
    ) -> None:
        self.baseline = baseline
        self.scale = scale
        self.eps = eps

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        rewards = [[t.reward for t in group.trajectories] for group in groups]
        for group, values in zip(groups, rewards, strict=True):
            check_finite(values, group.prompt.id)
        if self.scale == "group":
            return [group_relative(r, baseline=self.baseline, eps=self.eps) for r in rewards]
        divisor = 1.0
        if self.scale == "batch":
            divisor = std([value for values in rewards for value in values]) + self.eps
        return [[a / divisor for a in centred(r, self.baseline)] for r in rewards]
