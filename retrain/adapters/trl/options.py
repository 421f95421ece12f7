"""The `backend:` keys of `type: trl`, and what this backend supports. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from retrain.adapters.base import AdapterOptions, Capabilities
from retrain.adapters.trl.keys import refusal
from retrain.adapters.trl.plan import run_plan
from retrain.config import RunConfig
from retrain.errors import ConfigError
from retrain.losses import LOSSES

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""The schedules of transformers that need only the number of the step."""


class LoraOptions(BaseModel):
    """Low-rank adapters (arXiv:2106.09685), by peft; without this key all weights are trained."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    r: Annotated[int, Field(ge=1)] = 16
    """The rank of the adapters."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The probability of dropout before the adapters."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules with an adapter; `all-linear`: every linear layer except the output
    head."""

    @field_validator("target_modules")
    @classmethod
    def _no_head(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if "lm_head" in value:  # in the string form it is a regular expression that names the head
            raise ValueError(
                "TRL does not support LoRA on lm_head: it multiplies by the head's own weight, so "
                "an adapter there would never be trained; remove lm_head"
            )
        return value


class TrlOptions(AdapterOptions):
    """`backend: {type: trl, ...}`: TRL's GRPOTrainer updates the weights on this machine."""

    model_config = ConfigDict(allow_inf_nan=False)

    extra: ClassVar[str] = "trl"
    adapter: ClassVar[str] = "retrain.adapters.trl.adapter:TrlAdapter"

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """The learning rate, after the warm-up."""
    lr_scheduler: Schedule = "constant"
    """Over train.total_train_steps; `backend.args.lr_scheduler_kwargs` holds its parameters."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the mean of the gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay of the mean of the squared gradients."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's term that prevents a division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0: no limit."""
    lora: LoraOptions | None = None
    """Train low-rank adapters; by default all weights are trained."""
    micro_batch_rows: Annotated[int, Field(ge=1)] | None = None
    """Sequences per forward pass; null: as many as `micro_batch_tokens` allows."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """Tokens per forward pass, including padding; a longer sequence gets its own. `auto`: 2,048 on
    the CPU, 16,384 on CUDA."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: CUDA if available."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The type of the arithmetic; `auto`: float32 on the CPU, bfloat16 on CUDA. Trained weights
    stay in float32."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass to save memory; `auto`: only on CUDA."""
    threads: Annotated[int, Field(ge=1)] = 1
    """OpenMP threads of the trainer, and of the sampler. More threads can be much slower on a busy
    machine (20 times, measured)."""
    max_rows: Annotated[int, Field(ge=1)] = 256
    """The maximum number of sequences that the sampler decodes at once."""
    args: dict[str, Any] = Field(default_factory=dict)  # values of whatever type TRL gives a key
    """Further keys of TRL's GRPOConfig, such as `optim` or `lr_scheduler_kwargs`."""

    @field_validator("args")
    @classmethod
    def _passed_only(cls, value: dict[str, Any]) -> dict[str, Any]:
        refused = [why for why in map(refusal, value) if why]
        if refused:
            raise ValueError("; ".join(refused))
        return value

    def needs(self) -> Mapping[str, Sequence[str]]:
        """All of them, whatever the options."""
        return {"trl": ("torch", "trl", "transformers", "datasets", "accelerate", "peft")}

    def capabilities(self) -> Capabilities:
        """Every loss: TRL computes its own, the engine the others."""
        return Capabilities(
            losses=frozenset(LOSSES),
            custom_losses=True,
            scores=True,
            mismatch=True,
            scored_as_sampled=frozenset({"temperature"}),
        )

    def problems(self, config: RunConfig) -> list[str]:
        """Wrong keys of the loss; `check_compatible` reports an unknown loss."""
        loss = config.algorithm.loss
        if loss and ":" not in loss and loss not in self.capabilities().losses:
            return []
        try:
            run_plan(config)
        except ConfigError as error:
            return list(error.problems)
        return []
