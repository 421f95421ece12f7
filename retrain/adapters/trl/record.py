"""What one optimizer step tells: sums over its micro-batches, from numbers the loss has computed.

No forward pass is made for a metric. Means are over the trained tokens of the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retrain.engine.losses import loss_metrics
from retrain.types import Batch, Metrics

_FROM_TRL = {
    "clip_ratio/region_mean": "clip_fraction",
    "cispo_clip_ratio": "clip_fraction",
    "vespo/phi_seq_mean": "vespo/phi_seq_mean",
    "kl": "kl/reference",
    "aux_loss": "aux_loss",
}
"""TRL's means over a micro-batch's tokens that are worth keeping, by our names."""

_MEASURED = frozenset({"tokens", "kl_sum", "ratio_sum"})
"""Sums that `measure` takes for every loss alike."""
_SHARED = frozenset({"clipped_sum", "pairs", "margin_sum", "correct_sum"})
"""Further sums of `engine.losses`, which its `loss_metrics` turns into means."""


@dataclass(slots=True)
class StepRecord:
    """One step of `batch`, filled micro-batch by micro-batch."""

    batch: Batch
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    learning_rate: float = 0.0
    """Of this step, before the schedule moves on."""
    ratio_max: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @torch.no_grad()
    def measure(self, logprobs: Tensor, entropies: Tensor, old: Tensor, mask: Tensor) -> None:
        """Ratio, KL and entropy of one micro-batch, (B, T) each, in one transfer from the device.

        `kl/sampler_trainer` is the mean of r - 1 - log r, r the trainer's probability of a token
        over the sampler's: the non-negative estimator of KL(sampler || trainer), k3 of
        http://joschu.net/blog/kl-approx.html.
        """
        log_ratio = ((logprobs - old) * mask).clamp(-20, 20)
        ratio = log_ratio.exp() * mask
        found = {
            "tokens": mask.sum(),
            "kl_sum": (ratio - mask - log_ratio).sum(),
            "entropy": (entropies * mask).sum(),
            "ratio_sum": ratio.sum(),
            "ratio_max": ratio.max(),
        }
        told = dict(
            zip(found, torch.stack([v.float() for v in found.values()]).tolist(), strict=True)
        )
        self.ratio_max = max(self.ratio_max, told.pop("ratio_max"))
        for name, value in told.items():
            self.sums[name] += value

    def add_trl(self, told: Mapping[str, Sequence[float]], tokens: int) -> None:
        """TRL's own metrics of one micro-batch."""
        for theirs, ours in _FROM_TRL.items():
            if theirs in told:
                self.sums[ours] += told[theirs][-1] * tokens

    def add_shared(self, sums: Mapping[str, float]) -> None:
        """What a shared loss told of one micro-batch, less what `measure` takes."""
        for name in _SHARED & sums.keys():
            self.sums[name] += sums[name]

    def metrics(self) -> Metrics:
        """The whole step's."""
        tokens = max(1.0, self.sums["tokens"])
        means = {
            name: total / tokens
            for name, total in self.sums.items()
            if name not in _MEASURED | _SHARED
        }
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            **means,
            **loss_metrics(self.sums),
            "ratio/max": self.ratio_max,
        }
