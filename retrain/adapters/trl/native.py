"""TRL's own losses as shares of a whole batch, of which TRL sees one micro-batch at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from trl import GRPOTrainer

from retrain.adapters.trl.plan import LossPlan
from retrain.adapters.trl.ranks.group import ALONE, Ranks
from retrain.adapters.trl.record import StepRecord
from retrain.adapters.trl.rows import SHARE, STREAM, Rows
from retrain.losses import LOSSES


class WholeBatchLoss(GRPOTrainer):
    """A GRPOTrainer that can compute its loss of a micro-batch as a share of `record.batch`'s."""

    args: Any  # a GRPOConfig; transformers declares its base class
    plan: LossPlan
    record: StepRecord
    ranks: Ranks = ALONE
    _mask: Tensor
    """The loss mask of the micro-batch, (B, T)."""
    _scored: tuple[Tensor, Tensor, Tensor | None]
    """Log-probs and entropies of the micro-batch, (B, T), and the router's loss."""

    def _native_loss(self, model: Any, rows: Rows) -> Tensor:
        """TRL's loss of a micro-batch, as its share of the whole batch's.

        `_scale` scales the policy term. The entropy bonus and the router's loss are means over
        tokens for every loss type, so they are scaled by the micro-batch's share of the tokens. In
        a mean over rows, a row counts by its share of its rollout (`rows.with_shares`). Every scale
        is multiplied by the number of ranks, since gradients are averaged over them. TRL does so
        itself where it divides by `num_items_in_batch`.
        """
        tokens, whole = int(self._mask.sum()), self.record.batch.denominators.tokens
        # The advantages of a shared loss (cispo) already hold its normalisation: TRL is to sum.
        divisor = float(whole) if LOSSES[self.plan.name].normalises_itself else 1.0
        rows["num_items_in_batch"] = torch.tensor(divisor, device=self.args.device)
        coefficient = self._bonus_in_force()  # TRL may change it for the next step
        share = rows.get(STREAM + SHARE)
        if share is not None:
            # The policy term is proportional to them, the KL term is not.
            rows["advantages"] = rows["advantages"] * share
        self._metrics["train"].clear()
        loss = super()._compute_loss(model, rows)
        self.record.add_trl(self._metrics["train"], tokens)
        scale, by_tokens = self._scale(tokens), tokens / whole * self.ranks.size
        _, entropies, router = self._scored
        shared = loss * scale
        if share is not None and self.beta:
            kl = self.beta * self._reference_kl(rows) * (share - 1) * self._mask
            shared = shared + (kl.sum(-1) / self._mask.sum(-1).clamp(min=1)).mean() * scale
        if coefficient:
            bonus = (entropies * self._mask).sum() / max(1, tokens)
            shared = shared + coefficient * bonus * (scale - by_tokens)
        if router is not None:
            shared = shared + self.router_aux_loss_coef * router * (by_tokens - scale)
        return shared

    def _scale(self, tokens: int) -> float:
        mean, whole = LOSSES[self.plan.name].trl_mean, self.record.batch.denominators
        if mean in ("row_means", "row_sums"):
            return self._mask.shape[0] / whole.sequences * self.ranks.size
        return tokens / whole.tokens * self.ranks.size if mean == "tokens" else 1.0

    def _reference_kl(self, rows: Rows) -> Tensor:
        """TRL's KL term of each token, (B, T) with gradient."""
        logprobs = self._scored[0]
        gap = rows["ref_per_token_logps"] - logprobs
        kl = gap.exp() - gap - 1
        if not self.args.use_bias_correction_kl:
            return kl
        log_ratio = logprobs - rows["old_per_token_logps"]
        if self.importance_sampling_level == "sequence":
            sums = (log_ratio * self._mask).sum(-1, keepdim=True)
            log_ratio = sums / self._mask.sum(-1, keepdim=True).clamp(min=1)
        return kl * log_ratio.exp()

    def _bonus_in_force(self) -> float:
        """The entropy coefficient that TRL is about to apply."""
        if not self._entropy_bonus_enabled:
            return 0.0
        if self.use_adaptive_entropy and self._last_world_entropy > self.args.entropy_target:
            return 0.0
        return self.entropy_coef
