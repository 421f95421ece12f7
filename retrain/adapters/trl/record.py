"""The metrics of one optimizer step: sums over its micro-batches, of numbers from the loss.

No metric needs a forward pass of its own. Means are over the trained tokens of the whole batch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from retrain.adapters.trl.ranks.group import Ranks
from retrain.types import Batch, Metrics

_FROM_TRL = {
    "clip_ratio/region_mean": "clip_fraction",
    "cispo_clip_ratio": "clip_fraction",
    "vespo/phi_seq_mean": "vespo/phi_seq_mean",
    "aux_loss": "aux_loss",
}
"""The metrics of TRL to keep, means over a micro-batch's tokens, with our names."""


SEQUENCE = "sequence:"


@dataclass(slots=True)
class StepRecord:
    """One step of `batch`, filled micro-batch by micro-batch."""

    batch: Batch
    loss: float = 0.0
    grad_norm: float = 0.0
    """Before clipping."""
    learning_rate: float = 0.0
    """Of this step, before the schedule changes it."""
    ratio_max: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @torch.no_grad()
    def measure(
        self,
        logprobs: Tensor,
        entropies: Tensor,
        old: Tensor,
        mask: Tensor,
        reference: Tensor | None = None,
    ) -> None:
        """Ratio, KL and entropy of one micro-batch, (B, T) each, in one transfer from the device.

        `kl/sampler_trainer` is the mean of r - 1 - log r, r the trainer's probability of a token
        over the sampler's: the non-negative estimator of KL(sampler || trainer), k3 of
        http://joschu.net/blog/kl-approx.html. `kl/reference` is the same estimator of
        KL(trainer || reference), with r the reference's probability over the trainer's.
        """
        log_ratio = ((logprobs - old) * mask).clamp(-20, 20)
        ratio = log_ratio.exp() * mask
        found = {
            "tokens": mask.sum(),
            "kl/sampler_trainer": (ratio - mask - log_ratio).sum(),
            "entropy": (entropies * mask).sum(),
            "ratio/mean": ratio.sum(),
            "ratio/max": ratio.max(),
        }
        if reference is not None:
            gap = ((reference - logprobs) * mask).clamp(-20, 20)
            found["kl/reference"] = (gap.exp() - 1 - gap).sum()
        values = torch.stack([value.float() for value in found.values()]).tolist()
        sums = dict(zip(found, values, strict=True))
        self.ratio_max = max(self.ratio_max, sums.pop("ratio/max"))
        self.add(sums)

    def add_trl(self, means: Mapping[str, Sequence[float]], tokens: int) -> None:
        """TRL's own metrics of one micro-batch."""
        for theirs, ours in _FROM_TRL.items():
            if theirs in means:
                self.sums[ours] += means[theirs][-1] * tokens

    def add(self, sums: Mapping[str, float]) -> None:
        """Sums over the tokens of one micro-batch, or of `dpo/...` over its `pairs`.

        A sum over its sequences is the key `sequence:NAME`.
        """
        for name, value in sums.items():
            self.sums[name] += value

    def add_ranks(self, ranks: Ranks) -> None:
        """Make this rank's sums those of all ranks, which all call this."""
        if ranks.size == 1:
            return
        found = ranks.gather((self.loss, self.ratio_max, dict(self.sums)))
        self.loss = sum(loss for loss, _, _ in found)
        self.ratio_max = max(ratio for _, ratio, _ in found)
        self.sums.clear()
        for _, _, sums in found:
            self.add(sums)

    def metrics(self) -> Metrics:
        tokens, sequences = max(1.0, self.sums["tokens"]), self.batch.denominators.sequences
        counts = {"dpo/": self.sums["pairs"], SEQUENCE: max(1, sequences)}
        means = {
            name.removeprefix(SEQUENCE): total
            / next((n for prefix, n in counts.items() if name.startswith(prefix)), tokens)
            for name, total in self.sums.items()
            if name not in ("tokens", "pairs")
        }
        return {
            "loss": self.loss,
            "grad_norm": self.grad_norm,
            "learning_rate": self.learning_rate,
            **means,
            "tokens/trained": self.sums["tokens"],
            "ratio/max": self.ratio_max,
        }
