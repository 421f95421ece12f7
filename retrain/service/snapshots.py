"""The weights of snapshots and of the base model, in the forms that samplers take.

Functions block: call them in a thread.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from retrain.engine.weights import LoraWeights
from retrain.service.store import CheckpointPlace, CheckpointStore
from retrain.service.tuning import LORA_ALPHA, BaseModel, Tuning, merged_weights


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Those in `store`, of models made from `base`."""

    base: BaseModel
    store: CheckpointStore

    def tuning(self, place: CheckpointPlace) -> Tuning:
        return self.store.find(place).tuning

    def merged(self, place: CheckpointPlace | None) -> dict[str, Tensor]:
        """All weights of the untied model, with LoRA merged; of the base model for None."""
        if place is None:
            return merged_weights(self.base.untied, {}, rank=1)
        weights, _ = self.store.load(place)
        return merged_weights(self.base.untied, weights, self.tuning(place).rank)

    def adapter(self, place: CheckpointPlace) -> LoraWeights:
        """The LoRA matrices by themselves."""
        tensors, _ = self.store.load(place)
        targets = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in tensors}
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.tuning(place).rank,
            "lora_alpha": LORA_ALPHA,
            "target_modules": sorted(targets),
            "bias": "none",
        }
        return LoraWeights(tensors, config)
