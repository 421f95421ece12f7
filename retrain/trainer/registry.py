"""Trainers by name: create_trainer, list_algorithms, get_algorithm, register_algorithm."""

from __future__ import annotations

from typing import Any

from retrain.errors import shown
from retrain.trainer.base import BaseTrainer
from retrain.trainer.nemo.presets import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

TRAINERS: dict[str, type[BaseTrainer]] = {
    "dpo": DPOTrainer,
    "grpo": GRPOTrainer,
    "rloo": RLOOTrainer,
    "sft": SFTTrainer,
}


def list_algorithms() -> list[str]:
    """The names that `get_algorithm` knows, sorted. They don't depend on what is installed."""
    return sorted(TRAINERS)


def get_algorithm(name: str) -> type[BaseTrainer]:
    """The trainer class of an algorithm; upper and lower case are equal. Raises ValueError."""
    found = TRAINERS.get(str(name).lower())
    if found is None:
        expected = f"expected one of {', '.join(list_algorithms())}"
        raise ValueError(f"algorithm: got {shown(name)}, {expected}")
    return found


def create_trainer(algorithm: str, model: str, **keys: Any) -> Any:
    """`get_algorithm(algorithm).from_pretrained(model, **keys)`."""
    found: Any = get_algorithm(algorithm)
    return found.from_pretrained(model, **keys)


def register_algorithm(name: str, trainer: type[BaseTrainer], *, override: bool = False) -> None:
    """Add a trainer class of your own. `override` replaces the class that has this name.

    Raises TypeError when `trainer` is no subclass of BaseTrainer with `from_pretrained`, ValueError
    when the name is taken.
    """
    if not isinstance(trainer, type) or not issubclass(trainer, BaseTrainer):
        raise TypeError(f"{name}: got {shown(trainer)}, expected a subclass of BaseTrainer")
    if not hasattr(trainer, "from_pretrained"):
        raise TypeError(
            f"{name}: {trainer.__name__} has no from_pretrained(model, **keys), which "
            "create_trainer calls; add it, or derive the class from GRPOTrainer"
        )
    key = name.lower()
    if key in TRAINERS and not override:
        raise ValueError(
            f"{key}: {TRAINERS[key].__name__} has this name; choose another, or pass override=True"
        )
    TRAINERS[key] = trainer
