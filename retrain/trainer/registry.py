"""Trainers by name: create_trainer, list_algorithms, get_algorithm, register_algorithm.

The list doesn't depend on what is installed. Torch loads when training begins.
"""

from __future__ import annotations

import difflib
from typing import Any

from retrain.errors import shown
from retrain.trainer.base import BaseTrainer
from retrain.trainer.nemo.presets import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer

_TRAINERS: dict[str, type[BaseTrainer]] = {
    "dpo": DPOTrainer,
    "grpo": GRPOTrainer,
    "rloo": RLOOTrainer,
    "sft": SFTTrainer,
}


def list_algorithms() -> list[str]:
    """The names that `get_algorithm` knows, sorted."""
    return sorted(_TRAINERS)


def get_algorithm(name: str) -> type[BaseTrainer]:
    """The trainer class of an algorithm; upper and lower case are equal.

    Raises ValueError for an unknown name, TypeError for anything but a string.
    """
    expected = f"expected one of {', '.join(list_algorithms())}"
    if not isinstance(name, str):
        raise TypeError(f"algorithm: got {shown(name)}, {expected}")
    found = _TRAINERS.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), _TRAINERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(f"algorithm: got {shown(name)}, {expected}{hint}")
    return found


def create_trainer(algorithm: str, model: str, **keys: Any) -> Any:
    """`get_algorithm(algorithm).from_pretrained(model, **keys)`."""
    found: Any = get_algorithm(algorithm)  # a registered class has its own from_pretrained
    return found.from_pretrained(model, **keys)


def register_algorithm(name: str, trainer: type[BaseTrainer], *, override: bool = False) -> None:
    """Add a trainer class under a name.

    Raises TypeError for anything but a trainer class, ValueError for a name that is taken (unless
    `override`).
    """
    if not isinstance(trainer, type) or not issubclass(trainer, BaseTrainer):
        raise TypeError(
            f"{name}: got {shown(trainer)}, expected a subclass of {BaseTrainer.__name__}"
        )
    if not callable(getattr(trainer, "from_pretrained", None)):
        raise TypeError(
            f"{name}: {trainer.__name__} has no from_pretrained(model, **keys), which "
            "create_trainer calls; inherit from GRPOTrainer or another trainer of retrain.trainer"
        )
    key = name.strip().lower()
    if key in _TRAINERS and not override:
        raise ValueError(
            f"algorithm {key} is already {_TRAINERS[key].__name__}; pass override=True to replace "
            "it"
        )
    _TRAINERS[key] = trainer
