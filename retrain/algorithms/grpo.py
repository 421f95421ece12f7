"""GRPO: an advantage is a reward relative to those of its group (Shao et al. 2024, eq. 3)

    A_i = (r_i - mean(r)) / (std(r) + eps)          std with ddof 1

`baseline: leave_one_out` subtracts the mean of the other rewards, so the noise of r_i is not in its
own baseline. `scale: batch` divides by the std of the whole batch. `scale: none` does not divide
(Dr. GRPO, Liu et al. 2025: the group's std favours prompts that are very easy or very hard).
`credit` gives turns or tokens an advantage of their own (`credit.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Literal

from retrain.algorithms.base import Algorithm, Credit
from retrain.algorithms.credit import CreditUnit, check_credit, per_token, returns_of
from retrain.algorithms.functional import Baseline, centred, check_finite, group_relative, std
from retrain.types import Group


class GRPO(Algorithm):
    """Group Relative Policy Optimization.

    Args:
        baseline: What a reward is compared with: the group's mean, or the mean of the others.
        scale: Divide by the standard deviation of the group, of the batch, or by 1 (`none`).
        eps: Added to the standard deviation, to avoid a division by zero.
        credit: What gets its own advantage: the rollout (`whole`), each turn, or each token.
        discount: The discount factor per turn (or per token) for rewards that are earned later.
    """

    def __init__(
        self,
        baseline: Baseline = "mean",
        scale: Literal["group", "batch", "none"] = "group",
        eps: float = 1e-4,
        credit: CreditUnit = "whole",
        discount: float = 1.0,
    ) -> None:
        check_credit(credit, discount)
        self.baseline = baseline
        self.scale = scale
        self.eps = eps
        self.credit = credit
        self.discount = discount
        if credit != "whole":
            self.compares = "batch"

    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[Credit]]:
        for group in groups:
            check_finite([t.reward for t in group.trajectories], group.prompt.id)
        if self.credit != "whole":
            return self._per_token(groups)
        rewards = [[t.reward for t in group.trajectories] for group in groups]
        divisor = self._divisor(chain(*rewards))
        return [[a / divisor for a in self._relative(own)] for own in rewards]

    def _per_token(self, groups: Sequence[Group]) -> list[list[list[float]]]:
        returns = [
            [returns_of(t, self.credit, self.discount) for t in group.trajectories]
            for group in groups
        ]
        divisor = self._divisor(chain(*chain(*chain(*returns))))
        credit = [
            per_token(group.trajectories, rows, self._relative)
            for group, rows in zip(groups, returns, strict=True)
        ]
        return [[[a / divisor for a in tokens] for tokens in rows] for rows in credit]

    def _relative(self, values: Sequence[float]) -> list[float]:
        if self.scale == "group":
            return group_relative(values, baseline=self.baseline, eps=self.eps)
        return centred(values, self.baseline)

    def _divisor(self, values: Iterable[float]) -> float:
        return std(list(values)) + self.eps if self.scale == "batch" else 1.0
