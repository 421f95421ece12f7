"""Which of TRL's settings a loss of ours is: `algorithm.loss` + `loss_config` -> GRPOConfig keys.

Every key of `loss_config` has an effect on the loss it stands with, or is refused. Imports no TRL.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from retrain.adapters.base import SHARED_LOSSES, TRL_LOSSES
from retrain.adapters.losses import custom_loss, loss_keys, run_loss
from retrain.config import RunConfig
from retrain.errors import ConfigError

Mean = Literal["rows", "tokens", "sum"]

MEANS: Mapping[str, Mean] = {
    "grpo": "rows",
    "sapo": "rows",
    "dr_grpo": "rows",
    "luspo": "rows",
    "bnpo": "tokens",
    "dapo": "sum",
    "vespo": "sum",
    "cispo": "sum",
}
"""What TRL averages a micro-batch over before the whole batch's share is applied; `sum` divides by
`num_items_in_batch`, which already is the whole batch's."""

_CLIP = ("epsilon", "epsilon_high", "delta")
_ENTROPY = (
    "entropy_coef",
    "use_adaptive_entropy",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
)
_COMMON = ("beta", "use_bias_correction_kl", "off_policy_mask_threshold", *_ENTROPY)
_LEVEL = "importance_sampling_level"

TRL_KEYS: Mapping[str, tuple[str, ...]] = {
    "grpo": (*_COMMON, *_CLIP, _LEVEL),
    "bnpo": (*_COMMON, *_CLIP, _LEVEL),
    "dapo": (*_COMMON, *_CLIP, _LEVEL),
    "dr_grpo": (*_COMMON, *_CLIP, _LEVEL, "max_completion_length"),
    "luspo": (*_COMMON, *_CLIP, _LEVEL),
    "sapo": (*_COMMON, _LEVEL, "sapo_temperature_pos", "sapo_temperature_neg"),
    "vespo": (*_COMMON, "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
}
"""The keys of `algorithm.loss_config` that each of TRL's own losses reads."""

SHARED_KEYS: Mapping[str, tuple[str, ...]] = {
    "importance_sampling": (),
    "ppo": ("epsilon", "epsilon_high"),
    "cispo": ("epsilon", "epsilon_high"),
    "cross_entropy": (),
    "dro": ("beta",),
    "dpo": ("beta",),
}
"""The keys of the losses that all backends share; `engine.losses` holds their defaults."""

ALL_LOSSES = TRL_LOSSES | SHARED_LOSSES


@dataclass(frozen=True, slots=True)
class LossPlan:
    """How one loss is executed."""

    name: str
    native: bool
    """TRL's own `_compute_loss` executes it; otherwise `engine.losses` does."""
    args: Mapping[str, Any]
    """GRPOConfig keys."""
    reference: bool
    """It reads log-probs of the frozen initial model."""
    custom: Callable[..., Any] | None = None  # an engine.losses.CustomLoss, which names torch types
    """A user's own function."""


def run_plan(config: RunConfig) -> LossPlan:
    """The plan of a run's loss: the config's, or else its algorithm's own.

    A user's own loss has no keys. Raises ConfigError as `plan_loss` and `custom_loss` do.
    """
    loss, custom = run_loss(config), custom_loss(config)
    if custom is not None:
        return LossPlan(loss, False, {}, False, custom)
    return plan_loss(loss, loss_keys(config), config.sampling.max_tokens)


def plan_loss(name: str, config: Mapping[str, Any], max_tokens: int) -> LossPlan:
    """The plan of `name` with the keys `config`; `max_tokens` is dr_grpo's constant.

    Raises ConfigError on an unknown loss or a key that the loss does not read.
    """
    _check_keys(name, config)
    given = {key: value for key, value in config.items() if value is not None}
    if name == "cispo":
        return _cispo(given)
    if name in SHARED_LOSSES:
        # A reference model exists in TRL only where its own KL weight isn't 0; the shared losses
        # never read that weight.
        return LossPlan(name, False, {"beta": 1.0} if name == "dpo" else {}, name == "dpo")
    args = {"loss_type": name, "max_completion_length": max_tokens, **given}
    if name == "luspo":
        args.setdefault(_LEVEL, "sequence")
        if args[_LEVEL] != "sequence":
            raise ConfigError(
                f"luspo got {_LEVEL} {args[_LEVEL]!r}: its ratio is the sequence's "
                "(set it to 'sequence', or leave it out)"
            )
    return LossPlan(name, True, args, args.get("beta", 0.0) != 0.0)


def _cispo(given: Mapping[str, Any]) -> LossPlan:
    """TRL's cispo knows no lower bound and caps the ratio itself, not its distance from 1."""
    cap = 1.0 + given.get("epsilon_high", 4.0)
    if given.get("epsilon", 1.0) == 1.0:
        return LossPlan("cispo", True, {"loss_type": "cispo", "epsilon_high": cap}, False)
    return LossPlan("cispo", False, {}, False)


def _check_keys(name: str, config: Mapping[str, Any]) -> None:
    known = {**TRL_KEYS, **SHARED_KEYS}
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ConfigError(f"no loss is called {name!r}{hint}: there are {', '.join(sorted(known))}")
    for key in config:
        if key not in known[name]:
            close = difflib.get_close_matches(key, known[name], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            expected = ", ".join(known[name]) or "no keys at all"
            raise ConfigError(
                f"algorithm.loss_config.{key}: the loss {name!r} does not read it{hint} "
                f"(it reads {expected})"
            )
