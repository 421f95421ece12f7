"""RLOO: REINFORCE with the mean of the other rollouts as baseline (Ahmadian et al. 2024, eq. 7)

A_i = r_i - mean(r_j for j != i)
"""

from __future__ import annotations

from collections.abc import Sequence

from retrain.algorithms.base import Algorithm
from retrain.algorithms.functional import centred, check_finite
from retrain.types import Group


class RLOO(Algorithm):
    """REINFORCE Leave-One-Out; the advantages of a group sum to zero."""

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        credit = []
        for group in groups:
            rewards = [t.reward for t in group.trajectories]
            check_finite(rewards, group.prompt.id)
            credit.append(centred(rewards, "leave_one_out"))
        return credit
