"""The losses of both protocols with their inputs, and the settings of a model and a step.

A missing, unknown or invalid field is a ServiceError (400) that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from retrain.errors import NEAR, nearest, shown
from retrain.service.errors import invalid
from retrain.service.fields import SEEDS, Json, check_non_negative, integer, want
from retrain.service.tuning import Tuning
from retrain.wire.training import AdamParams

_MAX_RANK = 1024
_LARGEST_RATE = 1e6


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs that a loss reads from each datum, besides the tokens."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    ignores_others: bool = False
    """Ignore unknown inputs: a client-side loss also sends the inputs that it reads itself."""
    wide: bool = False
    """Whether a token may have several targets: the inputs are then (N, K)."""


_WEIGHTED = frozenset({"target_tokens", "weights"})
_RATIO = frozenset({"target_tokens", "logprobs", "advantages"})
_MASK = frozenset({"loss_mask"})
TINKER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(_WEIGHTED, wide=True),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), Inputs(_RATIO)),
    "gspo": Inputs(_RATIO | {"sequence_ratio_mask"}),
}
WEAVER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(_WEIGHTED, _MASK),
    **dict.fromkeys(
        ("importance_sampling", "truncated_importance_sampling"), Inputs(_RATIO, _MASK)
    ),
    "forward_logprob": Inputs(frozenset({"target_tokens"}), ignores_others=True),
    "surrogate": Inputs(frozenset({"target_tokens", "surrogate_weights"}), ignores_others=True),
}


_REASONS = {
    "stable_reinforce": ": its formula is not public; use cispo or ppo for data of older weights",
    "custom": " on the service; compute it with forward_backward_custom",
}


def known_loss(loss: str, losses: Mapping[str, Inputs]) -> Inputs:
    """The inputs of a loss; raises ServiceError with the nearest name for an unknown loss."""
    if loss not in losses:
        hint = _REASONS.get(loss) or nearest(loss, losses, NEAR)
        known = ", ".join(losses)
        raise invalid(f"loss_fn {shown(loss)} is not supported{hint}; expected one of {known}")
    return losses[loss]


def tuning(body: Json, min_rank: int) -> Tuning:
    """Which weights a new model trains; rank 0 trains the full weights."""
    lora = want(body, "lora_config", dict, {})
    rank = integer(lora, "rank", min_rank, _MAX_RANK, Tuning().rank)
    return Tuning(
        rank=rank,
        attention=want(lora, "train_attn", bool, True),
        mlp=want(lora, "train_mlp", bool, True),
        unembed=want(lora, "train_unembed", bool, True),
        seed=integer(lora, "seed", *SEEDS, 0),
    )


def adam_params(body: Json) -> AdamParams:
    """AdamW's hyperparameters."""
    given = {name: v for name, v in want(body, "adam_params", dict).items() if name != "type"}
    known = [field.name for field in fields(AdamParams)]
    if unknown := sorted(set(given) - set(known)):
        raise invalid(f"adam_params has unknown fields {shown(unknown)}: expected some of {known}")
    check_non_negative("adam_params", given)
    for name in ("learning_rate", "eps", "weight_decay"):
        if given.get(name, 0) > _LARGEST_RATE:  # a step would overflow
            raise invalid(f"adam_params.{name}: got {given[name]:g}, expected <= {_LARGEST_RATE:g}")
    adam = AdamParams(**given)
    if adam.beta1 >= 1 or adam.beta2 >= 1:
        raise invalid(f"adam_params: got beta1 {adam.beta1} and beta2 {adam.beta2}, expected < 1")
    return adam
