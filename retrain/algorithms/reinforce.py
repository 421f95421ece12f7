"""REINFORCE with the batch's mean reward as baseline (Williams 1992, section 2, eq. 4)

    A_i = r_i - mean(r)              over all rollouts of the batch, for all prompts together

`scale: batch` divides by the batch's std (ddof 1) + 1e-8, so that the step's size does not depend
on the reward's unit. One rollout per prompt is enough. If all rewards of a batch are equal, its
advantages are exactly 0.

This is only the credit, and the loss is dapo unless `algorithm.loss` is set. The loss `reinforce`
is something else: -A_i log p(y_i | x), for the credit of any algorithm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from retrain.algorithms.base import Credit
from retrain.algorithms.credit import CreditUnit
from retrain.algorithms.functional import check_finite
from retrain.algorithms.grpo import GRPO
from retrain.types import Group

EPS = 1e-8


class Reinforce(GRPO):
    """Advantages with one baseline for the whole batch, the mean reward.

    The default loss is dapo; `loss: reinforce` is the plain policy gradient.

    Args:
        scale: `batch` divides by the standard deviation of the batch's rewards.
        credit: What gets its own advantage: the rollout (`whole`), each turn, or each token.
        discount: The discount factor per turn (or per token) for rewards that are earned later.
    """

    min_group_size: ClassVar[int] = 1
    compares: Literal["group", "batch"] = "batch"

    def __init__(
        self,
        scale: Literal["batch", "none"] = "none",
        credit: CreditUnit = "whole",
        discount: float = 1.0,
    ) -> None:
        super().__init__("mean", scale, EPS, credit, discount)

    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[Credit]]:
        for group in groups:
            check_finite([t.reward for t in group.trajectories], group.prompt.id)
        every = [t for group in groups for t in group.trajectories]
        pooled = super().advantages([Group(groups[0].prompt, every)] if groups else [])
        credit = iter([one for own in pooled for one in own])
        return [[next(credit) for _ in group.trajectories] for group in groups]
