"""The settings of training that both protocols have, under the same names."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class AdamParams:
    """AdamW's settings of one step. All six are sent with every step: services' defaults differ.

    The defaults are those of Tinker's SDK, for a request to `retrain serve` that omits a field. A
    run sends the keys of its `backend` section.
    """

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """The largest norm of the gradient; 0 does not clip."""


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The size of the trained matrices, and the layers that get them."""

    rank: int = 32
    seed: int | None = None
    """Of the initial matrices; None leaves it to the service."""
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def payload(self) -> dict[str, Any]:
        """As JSON, without a seed when there is none."""
        return {name: value for name, value in asdict(self).items() if value is not None}
