"""RLOO: the credit of REINFORCE Leave-One-Out (Ahmadian et al. 2024, arXiv:2402.14740)

    A_i = r_i - mean(r_j for j != i)            over the rollouts of one prompt

This is only the credit. `algorithm.loss` chooses the loss, by default dapo: a clipped ratio per
token, and a mean over tokens. The paper's form is `loss: reinforce`, the mean over rollouts of
-A_i log p(y_i | x), without a ratio. The paper's KL penalty is part of r_i; here `kl_penalty`
charges each token for its own share.
"""

from __future__ import annotations

from retrain.algorithms.credit import CreditUnit
from retrain.algorithms.grpo import GRPO


class RLOO(GRPO):
    """Leave-one-out advantages: a reward is compared with the mean of the group's other rewards.

    The default loss is dapo; `loss: reinforce` is that of the RLOO paper.

    Args:
        credit: What gets its own advantage: the rollout (`whole`), each turn, or each token.
        discount: The discount factor per turn (or per token) for rewards that are earned later.
    """

    def __init__(self, credit: CreditUnit = "whole", discount: float = 1.0) -> None:
        super().__init__("leave_one_out", "none", credit=credit, discount=discount)
