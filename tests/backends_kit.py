"""One run on several backends: trl, and the local service behind Tinker's and Weaver's protocol.

trl and weaver train all weights, tinker LoRA: what they must agree on is the loss of a batch at
equal weights; with the same Adam the fully tuned ones agree on later steps too, and so do the two
protocols with the same LoRA.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.assembly import assemble
from retrain.config import RunConfig, parse_config
from retrain.types import Batch, Metrics

ADAM = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.0}
FULL: dict[str, dict[str, Any]] = {
    "trl": {"type": "trl", **ADAM, "device": "cpu", "args": {"adam_beta2": 0.95}},
    "weaver": {"type": "weaver", "url": "local", **ADAM, "training_mode": "full_ft"},
}
LORA: dict[str, dict[str, Any]] = {
    "tinker": {"type": "tinker", "url": "local", **ADAM, "lora": {"rank": 4}},
    "weaver": {"type": "weaver", "url": "local", **ADAM, "lora": {"rank": 4}},
}


def run_of(folder: Path, backend: dict[str, Any], **sections: Any) -> RunConfig:
    """A run of the built-in model in `folder`, in order and without staleness."""
    base = {
        "model": "tiny",
        "backend": backend,
        "staleness": {"target": 0},
        "train": {"total_train_steps": 3, "groups_per_step": 2, "order": "in_order"},
        "checkpoint": {"every": 0},
        "run_dir": str(folder),
    }
    return parse_config({**base, **sections})


async def updated(config: RunConfig, *batches: Batch) -> list[Metrics]:
    """The metrics of training these batches one after the other."""
    async with assemble(config).open_adapter() as adapter:
        return [await adapter.update(batch) for batch in batches]
