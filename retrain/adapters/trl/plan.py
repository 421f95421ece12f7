"""How TRL executes a loss: from `algorithm.loss` to GRPOConfig keys. Imports no TRL."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from retrain.adapters.losses import custom_loss, loss_keys, run_loss
from retrain.config import MismatchConfig, RunConfig
from retrain.errors import ConfigError
from retrain.losses import LOSSES, check_keys, settings

LEVEL = "importance_sampling_level"


@dataclass(frozen=True, slots=True)
class LossPlan:
    """How one loss is executed."""

    name: str
    native: bool = False
    """TRL's own `_compute_loss` executes it; otherwise `engine.losses` does."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """GRPOConfig keys."""
    reference: bool = False
    """It reads log-probs of the frozen initial model."""
    custom: Callable[..., Any] | None = None  # an engine.losses.CustomLoss, which names torch types
    """A user's own function."""
    mismatch: MismatchConfig | None = None
    """How to weigh tokens whose probability differs between sampler and trainer."""


def run_plan(config: RunConfig) -> LossPlan:
    """The plan of a run's loss: the config's, or the algorithm's default.

    Raises ConfigError as `plan_loss` and `custom_loss` do.
    """
    loss, custom = run_loss(config), custom_loss(config)
    if custom is not None:
        plan = LossPlan(loss, custom=custom)
    else:
        plan = plan_loss(loss, loss_keys(config), config.sampling.max_tokens)
    return replace(plan, mismatch=config.algorithm.mismatch)


def plan_loss(name: str, config: Mapping[str, Any], max_tokens: int) -> LossPlan:
    """The plan of `name` with the keys `config`; `max_tokens` is the constant of dr_grpo.

    Raises ConfigError on an unknown loss or key.
    """
    check_keys(name, config)
    if name == "cispo":
        # TRL's cispo has no lower bound, and caps the ratio itself instead of its distance from 1.
        keys = settings(name, config)
        if keys["epsilon"] == 1.0:
            cap = 1.0 + keys["epsilon_high"]
            return LossPlan(name, True, {"loss_type": name, "epsilon_high": cap})
    if LOSSES[name].reads == "pairs":
        # TRL loads a reference model only if its own KL weight is not 0. No shared loss reads it.
        return LossPlan(name, args={"beta": 1.0}, reference=True)
    if LOSSES[name].formula is not None:
        return LossPlan(name)
    given = {key: value for key, value in config.items() if value is not None}
    args = {"loss_type": name, "max_completion_length": max_tokens, **given}
    if name == "luspo" and args.setdefault(LEVEL, "sequence") != "sequence":
        raise ConfigError(
            f"algorithm.loss_config.{LEVEL}: got {args[LEVEL]!r}, but luspo always uses the "
            "sequence's ratio; set it to 'sequence', or remove it"
        )
    return LossPlan(name, True, args, args.get("beta", 0.0) != 0.0)
