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
from retrain.observe.run_dir import read_metrics
from retrain.pipeline import train
from retrain.types import Batch, Metrics

ADAM = {"learning_rate": 1e-3, "max_grad_norm": 1.0, "weight_decay": 0.0}
FULL: dict[str, dict[str, Any]] = {
    "trl": {"type": "trl", **ADAM, "device": "cpu"},
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


async def histories(
    folder: Path, backends: dict[str, dict[str, Any]], sections: dict[str, Any]
) -> list[list[Metrics]]:
    """The metrics of one run on each of the backends."""
    return [
        (await train(run_of(folder / name, backend, **sections))).history
        for name, backend in backends.items()
    ]


async def whole_and_resumed(
    folder: Path, backend: dict[str, Any], sections: dict[str, Any], *, stop: int, steps: int
) -> list[list[Metrics]]:
    """The metrics of a run, and of the same run stopped after some steps and resumed."""
    for name, totals in (("whole", [steps]), ("resumed", [stop, steps])):
        for total in totals:
            limited = {**sections, "train": {**sections["train"], "total_train_steps": total}}
            config = run_of(folder / name, backend, **limited)
            await train(config, resume=total != totals[0])
    return [read_metrics(folder / name) for name in ("whole", "resumed")]


async def updated(config: RunConfig, *batches: Batch) -> list[Metrics]:
    """The metrics of training these batches one after the other."""
    async with assemble(config).open_adapter() as adapter:
        return [await adapter.update(batch) for batch in batches]
