"""From what a client sent to rows that can be trained: nothing is padded, cut or guessed.

Both protocols meet here. Whatever is wrong is a ServiceError (400) that names the datum and the
input. Each loss takes exactly the inputs of its own row below.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from retrain.errors import shown
from retrain.service.errors import invalid
from retrain.service.trainer import Row

IGNORED_TARGET = -100
"""A target that carries no loss, as in torch's cross_entropy."""


class Values(NamedTuple):
    """One input of a loss, as it came."""

    data: Sequence[float]
    dtype: str
    """int64 or float32."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Inputs:
    """What a loss reads of each datum, beside its tokens."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    ignores_others: bool = False
    """A client-side loss sends the inputs that it reads itself, too."""


_RATIO = Inputs(frozenset({"target_tokens", "logprobs", "advantages"}))
TINKER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(frozenset({"target_tokens", "weights"})),
    "importance_sampling": _RATIO,
    "ppo": _RATIO,
    "cispo": _RATIO,
    "dro": _RATIO,
}
WEAVER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(frozenset({"target_tokens", "weights"}), frozenset({"loss_mask"})),
    "importance_sampling": Inputs(_RATIO.required, frozenset({"loss_mask"})),
    "forward_logprob": Inputs(frozenset({"target_tokens"}), ignores_others=True),
    "surrogate": Inputs(frozenset({"target_tokens", "surrogate_weights"}), ignores_others=True),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the model can take."""

    vocabulary: int
    context: int | None


def known_loss(loss: str, losses: Mapping[str, Inputs]) -> Inputs:
    """The loss's inputs; raises ServiceError with the nearest name when there is no such loss."""
    if loss not in losses:
        close = difflib.get_close_matches(loss, losses, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise invalid(f"loss_fn {loss!r} is not served{hint}: expected one of {', '.join(losses)}")
    return losses[loss]


def training_row(
    index: int,
    tokens: Sequence[int],
    inputs: Mapping[str, Values],
    expected: Inputs,
    limits: Limits,
) -> Row:
    """The row of datum `index`; surrogate weights, dL/dlogp, become negated advantages."""
    where = f"datum {index}"
    check_tokens(where, tokens, limits)
    _check_names(where, inputs, expected)
    inputs = {n: v for n, v in inputs.items() if n in expected.required | expected.optional}
    for name, values in inputs.items():
        _check_values(f"{where}: {name}", values, len(tokens), name == "target_tokens")
    targets = [int(target) for target in inputs["target_tokens"].data]
    kept = [target != IGNORED_TARGET for target in targets]
    _check_range(
        f"{where}: target_tokens", [t for t, k in zip(targets, kept, strict=True) if k], limits
    )
    ones, zeros = [1.0] * len(tokens), [0.0] * len(tokens)
    mask = inputs["loss_mask"].data if "loss_mask" in inputs else ones
    if not set(mask) <= {0, 1}:
        raise invalid(f"{where}: loss_mask holds values beside 0 and 1")
    return Row(
        tokens=tokens,
        targets=[t if k else 0 for t, k in zip(targets, kept, strict=True)],
        advantages=_credit(inputs, ones),
        logprobs=inputs["logprobs"].data if "logprobs" in inputs else zeros,
        mask=[float(m and k) for m, k in zip(mask, kept, strict=True)],
    )


def check_tokens(where: str, tokens: Sequence[int], limits: Limits) -> None:
    """Raises ServiceError unless the model can read these tokens."""
    if not tokens:
        raise invalid(f"{where} has no tokens")
    if limits.context is not None and len(tokens) > limits.context:
        raise invalid(f"{where} has {len(tokens)} tokens: the context is {limits.context}")
    if not all(type(token) is int for token in tokens):
        raise invalid(f"{where}: tokens must be integers")
    _check_range(f"{where}: tokens", tokens, limits)


def finite(where: str, values: Mapping[str, object], minimum: Mapping[str, float]) -> None:
    """Raises ServiceError unless every value is a finite number, no less than its minimum."""
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise invalid(f"{where}.{name} is {shown(value)}: expected a number")
        if not math.isfinite(value) or value < minimum.get(name, -math.inf):
            least = f" of {minimum[name]} or more" if name in minimum else ""
            raise invalid(f"{where}.{name} is {value}: expected a finite number{least}")


def _credit(inputs: Mapping[str, Values], ones: Sequence[float]) -> Sequence[float]:
    for name in ("advantages", "weights"):
        if name in inputs:
            return inputs[name].data
    if "surrogate_weights" in inputs:
        return [-weight for weight in inputs["surrogate_weights"].data]
    return ones


def _check_names(where: str, got: Collection[str], expected: Inputs) -> None:
    wanted = ", ".join(sorted(expected.required))
    if lacking := sorted(expected.required - set(got)):
        raise invalid(f"{where} lacks {lacking}: this loss takes {wanted}")
    unknown = sorted(set(got) - expected.required - expected.optional)
    if unknown and not expected.ignores_others:
        raise invalid(f"{where} has unknown loss inputs {unknown}: this loss takes {wanted}")


def _check_values(where: str, values: Values, length: int, whole: bool) -> None:
    if values.dtype != ("int64" if whole else "float32"):
        raise invalid(f"{where} is {values.dtype}: expected {'int64' if whole else 'float32'}")
    if values.shape != (length,) or len(values.data) != length:
        raise invalid(
            f"{where} has the shape {list(values.shape)} and {len(values.data)} values: "
            f"expected {length}, one a token"
        )
    for position, value in enumerate(values.data):
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise invalid(f"{where}[{position}] is {shown(value)}: expected a number")
        if not math.isfinite(value):
            raise invalid(f"{where}[{position}] is {value}: expected a finite number")


def _check_range(where: str, tokens: Sequence[int], limits: Limits) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocabulary):
        wrong = next(t for t in tokens if not 0 <= t < limits.vocabulary)
        raise invalid(f"{where}: {wrong} is no token, the vocabulary has {limits.vocabulary}")
