"""The settings of training that both protocols have, under the same names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

RANK = AliasChoices("r", "rank")
"""The rank of LoRA is `r` on every backend; `rank`, its name on services, is accepted too."""


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


class LoraConfig(BaseModel):
    """Low-rank adapters (arXiv:2106.09685); they can be switched on or off per kind of layer."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    r: Annotated[int, Field(ge=1, validation_alias=RANK)] = 32
    """The rank of the adapters; `rank` is another name of this key."""
    seed: int | None = None
    """The seed of the initial adapters; by default train.seed."""
    train_unembed: bool = True
    """Train the output layer."""
    train_mlp: bool = True
    """Train the feed-forward layers."""
    train_attn: bool = True
    """Train the attention layers."""

    def payload(self) -> dict[str, Any]:
        """As JSON, without a seed when there is none: the service then draws one."""
        return {"rank": self.r, **self.model_dump(exclude={"r"}, exclude_none=True)}
