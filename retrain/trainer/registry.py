"""Trainers by name: create_trainer, list_algorithms, get_algorithm, register_algorithm.

The list is a table, so it is the same whatever is installed; torch loads when training begins.
"""

from __future__ import annotations

import difflib
from typing import Any

from retrain.errors import shown
from retrain.trainer.base import BaseTrainer
from retrain.trainer.nemo.preset import PresetTrainer
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
    """The trainer class of an algorithm, in any case. Raises ValueError for an unknown one."""
    if not isinstance(name, str):
        raise TypeError(
            f"algorithm: got {shown(name)}, expected one of {', '.join(list_algorithms())}"
        )
    found = _TRAINERS.get(name.strip().lower())
    if found is None:
        near = difflib.get_close_matches(name.lower(), _TRAINERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ValueError(
            f"algorithm: got {shown(name)}, expected one of {', '.join(list_algorithms())}{hint}"
        )
    return found


def create_trainer(algorithm: str, model: str, **keys: Any) -> Any:
    """`get_algorithm(algorithm).from_pretrained(model, **keys)`."""
    found: Any = get_algorithm(algorithm)  # a registered class has its own from_pretrained
    return found.from_pretrained(model, **keys)


def register_algorithm(name: str, trainer: type[BaseTrainer], *, override: bool = False) -> None:
    """Add a trainer class of your own under a name.

    Raises TypeError for what is no trainer class, ValueError when the name is taken (without
    `override`).
    """
    if not isinstance(trainer, type) or not issubclass(trainer, BaseTrainer):
        raise TypeError(
            f"{name}: got {shown(trainer)}, expected a subclass of {BaseTrainer.__name__}"
        )
    if not callable(getattr(trainer, "from_pretrained", None)):
        raise TypeError(
            f"{name}: {trainer.__name__} has no from_pretrained(model, **keys), which "
            f"create_trainer calls: inherit from GRPOTrainer or another {PresetTrainer.__name__}"
        )
    key = name.strip().lower()
    if key in _TRAINERS and not override:
        raise ValueError(f"{key} is {_TRAINERS[key].__name__} already; say override=True")
    _TRAINERS[key] = trainer
