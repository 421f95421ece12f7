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

from retrain.algorithms.base import Algorithm
from retrain.algorithms.functional import centred, check_finite, std
from retrain.types import Group

EPS = 1e-8


class Reinforce(Algorithm):
    """Credit with one baseline for the whole batch, the mean reward.

    The loss is dapo unless set; `loss: reinforce` is the plain policy gradient.

    Args:
        scale: `batch` divides by the standard deviation of the batch's rewards.
    """

    min_group_size: ClassVar[int] = 1
    compares: ClassVar[Literal["group", "batch"]] = "batch"

    def __init__(self, scale: Literal["batch", "none"] = "none") -> None:
        self.scale = scale

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        for group in groups:
            check_finite([t.reward for t in group.trajectories], group.prompt.id)
        rewards = [t.reward for group in groups for t in group.trajectories]
        divisor = std(rewards) + EPS if self.scale == "batch" else 1.0
        credit = iter([delta / divisor for delta in centred(rewards)])
        return [[next(credit) for _ in group.trajectories] for group in groups]
