"""RLOO: REINFORCE with the mean of the other rollouts as baseline (Ahmadian et al. 2024, eq. 7)

A_i = r_i - mean(r_j for j != i)
"""

from __future__ import annotations

from retrain.algorithms.grpo import GRPO


class RLOO(GRPO):
    """REINFORCE Leave-One-Out; the advantages of a group sum to zero."""

    def __init__(self) -> None:
        super().__init__(baseline="leave_one_out", scale="none")
