"""What the adapter takes from a trainer between two steps: weights, adapters, an export.

All ranks call these methods at once, since a sharded model is gathered; rank 0 gets the result.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from trl import GRPOTrainer

from retrain.adapters.trl.ranks.group import ALONE, Ranks
from retrain.adapters.trl.ranks.sharding import is_sharded, whole_snapshot, whole_state
from retrain.engine.losses import sequence_logprobs
from retrain.engine.models import load_model
from retrain.engine.weights import LoraWeights, lora_snapshot, snapshot


class Handover(GRPOTrainer):
    """A GRPOTrainer that hands over its weights."""

    model: Any  # a causal LM, or PEFT's; transformers declares more
    ranks: Ranks = ALONE

    def weights(self) -> dict[str, Tensor] | None:
        """The plain model's weights, as `engine.weights.snapshot` returns them; only on rank 0."""
        if is_sharded(self.model):
            return whole_snapshot(self.model) or None
        return snapshot(self.model) if self.ranks.rank == 0 else None

    def lora_weights(self) -> LoraWeights | None:
        """The adapters by themselves, on rank 0; None on other ranks and without LoRA."""
        state = whole_state(self.model) if is_sharded(self.model) else None
        return lora_snapshot(self.model, state) if self.ranks.rank == 0 else None

    def scores(self, token_ids: Sequence[int]) -> list[float]:
        """The log-prob of each token at temperature 1; 0.0 for the first."""
        was_training = self.model.training
        self.model.eval()
        try:
            with self.accelerator.autocast():
                return sequence_logprobs(self.model, token_ids, self.args.device)
        finally:
            self.model.train(was_training)

    def export_to(self, folder: Path, base: str | None) -> None:
        """Write a Hugging Face folder with the tokenizer; of adapters only theirs.

        With `base`, the folder of the initial model, that model is written with the weights, and
        adapters merged; a sharded model without adapters needs it.
        """
        weights = self.weights() if base else None
        adapters = None if base else self.lora_weights()
        if self.ranks.rank:
            return
        folder.mkdir(parents=True, exist_ok=True)
        for pattern in ("*.safetensors*", "config.json", "adapter_config.json"):
            for old in folder.glob(pattern):  # LoRA weights beside a model would be loaded onto it
                old.unlink()
        if base is not None and weights is not None:
            model = load_model(base, "cpu", next(iter(weights.values())).dtype)
            model.load_state_dict(weights)
            model.save_pretrained(folder)
        elif adapters is not None and is_sharded(self.model):
            save_file(
                dict(adapters.tensors), folder / "adapter_model.safetensors", {"format": "pt"}
            )
            (folder / "adapter_config.json").write_text(json.dumps(adapters.config, indent=2))
        else:
            self.model.save_pretrained(folder)
        self._tokenizer.save_pretrained(folder)
