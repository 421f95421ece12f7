"""NexRL's common patterns over a batch's tensors, computed by `algorithms.functional`.

Rows are (B, T). Entries whose mask is 0 are skipped, so padding and prompt tokens between two turns
change nothing. Only `ppo_clipped_loss` is differentiable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from retrain.algorithms import functional
from retrain.algorithms.functional import KLEstimator
from retrain.engine.losses import shared_loss
from retrain.trainer.nexrl.advantages import compute_grpo_advantage_for_trajectories
from retrain.trainer.nexrl.batch import Batch, require
from retrain.trainer.nexrl.trajectory import Trajectory


def token_level_rewards(rewards: Tensor | Sequence[float], loss_mask: Tensor) -> Tensor:
    """(B,) rewards placed on each row's last trained token, 0 elsewhere: (B, T)."""
    rows = zip(rewards, loss_mask.tolist(), strict=True)
    return torch.tensor([functional.token_rewards(float(reward), mask) for reward, mask in rows])


def kl_penalty(
    logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, estimator: KLEstimator = "k1"
) -> Tensor:
    """Estimates of KL(policy || reference) per token, 0 where the mask is 0: (B, T)."""
    return _rowwise(
        lambda lp, ref: functional.kl_estimates(lp, ref, estimator), mask, logprobs, ref_logprobs
    )


def apply_kl_penalty(batch: Batch, beta: float, *, estimator: KLEstimator = "k1") -> Batch:
    """A copy of the batch with beta x KL subtracted from `token_level_scores`.

    Reads `ref_log_probs`, and `log_probs` or else `old_log_probs`. Raises KeyError for a missing
    field.
    """
    values = batch.values
    own = "log_probs" if "log_probs" in values else "old_log_probs"
    require(batch, ("token_level_scores", "loss_mask", "ref_log_probs", own))
    kl = kl_penalty(values[own], values["ref_log_probs"], values["loss_mask"], estimator=estimator)
    penalised = batch.copy()
    penalised.values["token_level_scores"] = values["token_level_scores"] - beta * kl
    return penalised


def compute_gae(
    rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float = 0.99, lam: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, each (B, T), of token-level rewards and values.

    Schulman et al. 2016, eq. 16, over the trained tokens; the episode ends with the row.
    """
    advantages = _rowwise(
        lambda r, v: functional.gae(r, v, gamma=gamma, lam=lam), mask, rewards, values
    )
    return advantages, torch.where(mask > 0, advantages + values, 0.0)


def compute_nstep_returns(rewards: Tensor, mask: Tensor, *, n: int, gamma: float) -> Tensor:
    """The discounted sum of the rewards of the next n trained tokens: (B, T)."""
    return _rowwise(lambda r: functional.n_step_returns(r, n, gamma), mask, rewards)


def ppo_clipped_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip_range: float = 0.2,
) -> Tensor:
    """The PPO loss summed over the masked tokens (arXiv:1707.06347, eq. 7): a scalar."""
    config = {"epsilon": clip_range}
    return shared_loss("ppo", config, log_probs, old_log_probs, advantages, mask)[0]


def grpo_advantages(
    rewards: Tensor | Sequence[float],
    loss_mask: Tensor,
    group_ids: Sequence[Any] | None = None,
    run_ids: Sequence[Any] | None = None,
    **keywords: Any,  # of compute_grpo_advantage_for_trajectories
) -> Tensor:
    """GRPO's advantage of each row on the row's trained tokens, 0 elsewhere: (B, T)."""
    nobody = [None] * len(rewards)
    rows = [
        Trajectory(reward=float(reward), group_id=group, run_id=run)
        for reward, group, run in zip(rewards, group_ids or nobody, run_ids or nobody, strict=True)
    ]
    credit = [one.advantage for one in compute_grpo_advantage_for_trajectories(rows, **keywords)]
    return torch.tensor(credit, dtype=torch.float32).reshape(-1, 1) * (loss_mask > 0)


def _rowwise(formula: Callable[..., Sequence[float]], mask: Tensor, *streams: Tensor) -> Tensor:
    """Apply `formula` to the masked entries of each row; 0 elsewhere."""
    found = torch.zeros(mask.shape, dtype=torch.float32)
    for row, keep in enumerate(mask > 0):
        kept = [stream[row][keep].tolist() for stream in streams]
        found[row, keep] = torch.tensor(formula(*kept), dtype=torch.float32)
    return found
