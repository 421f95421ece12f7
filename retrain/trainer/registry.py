"""Trainers by name: create_trainer, list_algorithms, get_algorithm."""

from __future__ import annotations

from typing import Any

from retrain.errors import shown
from retrain.trainer.nemo import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

Trainer = type[DPOTrainer] | type[GRPOTrainer] | type[RLOOTrainer] | type[SFTTrainer]
TRAINERS: dict[str, Trainer] = {
    "dpo": DPOTrainer,
    "grpo": GRPOTrainer,
    "rloo": RLOOTrainer,
    "sft": SFTTrainer,
}


def list_algorithms() -> list[str]:
    """The names that `get_algorithm` knows, sorted. They don't depend on what is installed."""
    return sorted(TRAINERS)


def get_algorithm(name: str) -> Trainer:
    """The trainer class of an algorithm; upper and lower case are equal. Raises ValueError."""
    found = TRAINERS.get(str(name).lower())
    if found is None:
        expected = f"expected one of {', '.join(list_algorithms())}"
        raise ValueError(f"algorithm: got {shown(name)}, {expected}")
    return found


def create_trainer(algorithm: str, model: str, **keys: Any) -> Any:
    """`get_algorithm(algorithm).from_pretrained(model, **keys)`."""
    return get_algorithm(algorithm).from_pretrained(model, **keys)
