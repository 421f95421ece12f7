"""Training rows from the data of either protocol; nothing is padded, cut or guessed.

Invalid data is a ServiceError (400) that names the datum and the input. Each loss takes exactly the
inputs of its row below.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.errors import shown
from retrain.protocols.tinker.values import Datum, Tensor
from retrain.service.errors import invalid
from retrain.service.trainer import Row

IGNORED_TARGET = -100
"""A target without loss, as in torch's cross_entropy."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs that a loss reads from each datum, besides the tokens."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    ignores_others: bool = False
    """Ignore unknown inputs: a client-side loss also sends the inputs that it reads itself."""

    @property
    def names(self) -> frozenset[str]:
        return self.required | self.optional


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
    """The limits of the model."""

    vocabulary: int
    context: int | None


def known_loss(loss: str, losses: Mapping[str, Inputs]) -> Inputs:
    """The inputs of a loss; raises ServiceError with the nearest name for an unknown loss."""
    if loss not in losses:
        close = difflib.get_close_matches(loss, losses, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = ", ".join(losses)
        raise invalid(f"loss_fn {loss!r} is not supported{hint}; expected one of {known}")
    return losses[loss]


def training_rows(data: Sequence[Datum], expected: Inputs, limits: Limits) -> list[Row]:
    """One row per datum; raises ServiceError for data that doesn't fit the loss."""
    if not data:
        raise invalid("there is no data: expected at least one datum")
    return [_row(f"datum {index}", datum, expected, limits) for index, datum in enumerate(data)]


def _row(where: str, datum: Datum, expected: Inputs, limits: Limits) -> Row:
    """The row of a datum; surrogate weights, dL/dlogp, become negated advantages."""
    tokens, length = list(datum.tokens), len(datum.tokens)
    check_tokens(where, tokens, limits)
    _check_names(where, datum.inputs, expected)
    inputs = {n: v for n, v in datum.inputs.items() if n in expected.names}
    for name, tensor in inputs.items():
        _check_values(f"{where}: {name}", tensor, length, name == "target_tokens")
    numbers = {name: tensor.data for name, tensor in inputs.items()}
    targets = [int(target) for target in numbers["target_tokens"]]
    kept = [target != IGNORED_TARGET for target in targets]
    labels = [t if k else 0 for t, k in zip(targets, kept, strict=True)]
    _check_range(f"{where}: target_tokens", labels, limits)
    ones = [1.0] * length
    mask = numbers.get("loss_mask", ones)
    if not set(mask) <= {0, 1}:
        raise invalid(f"{where}: loss_mask has values other than 0 and 1")
    return Row(
        tokens=tokens,
        targets=labels,
        advantages=_credit(numbers, ones),
        logprobs=numbers.get("logprobs", [0.0] * length),
        mask=[float(m and k) for m, k in zip(mask, kept, strict=True)],
    )


def _credit(numbers: Mapping[str, Sequence[float]], ones: Sequence[float]) -> Sequence[float]:
    if "surrogate_weights" in numbers:
        return [-weight for weight in numbers["surrogate_weights"]]
    return numbers.get("advantages", numbers.get("weights", ones))


def check_tokens(where: str, tokens: Sequence[int], limits: Limits) -> None:
    """Raise ServiceError unless the model can read these tokens."""
    if not tokens:
        raise invalid(f"{where} has no tokens")
    if limits.context is not None and len(tokens) > limits.context:
        raise invalid(f"{where} has {len(tokens)} tokens, expected at most {limits.context}")
    if not all(type(token) is int for token in tokens):
        raise invalid(f"{where}: tokens must be integers")
    _check_range(f"{where}: tokens", tokens, limits)


def check_non_negative(where: str, values: Mapping[str, Any]) -> None:  # JSON values
    """Raise ServiceError unless all values are finite numbers >= 0."""
    for name, value in values.items():
        if type(value) not in (int, float) or not (0 <= value < math.inf):
            raise invalid(f"{where}.{name}: got {shown(value)}, expected a finite number >= 0")


def _check_names(where: str, got: Collection[str], expected: Inputs) -> None:
    wanted = ", ".join(sorted(expected.required))
    if lacking := sorted(expected.required - set(got)):
        raise invalid(f"{where} lacks {lacking}, expected {wanted}")
    unknown = sorted(set(got) - expected.names)
    if unknown and not expected.ignores_others:
        raise invalid(f"{where} has unknown loss inputs {unknown}, expected {wanted}")


def _check_values(where: str, tensor: Tensor, length: int, whole: bool) -> None:
    dtype = "int64" if whole else "float32"
    if tensor.dtype != dtype:
        raise invalid(f"{where}: got {tensor.dtype}, expected {dtype}")
    if tensor.dimensions != (length,) or len(tensor.data) != length:
        raise invalid(
            f"{where}: got shape {list(tensor.dimensions)} with {len(tensor.data)} values, "
            f"expected {length}, one per token"
        )
    for position, value in enumerate(tensor.data):
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise invalid(f"{where}[{position}]: got {shown(value)}, expected a number")
        if not math.isfinite(value):
            raise invalid(f"{where}[{position}]: got {value}, expected a finite number")


def _check_range(where: str, tokens: Sequence[int], limits: Limits) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocabulary):
        wrong = next(t for t in tokens if not 0 <= t < limits.vocabulary)
        raise invalid(f"{where}: got token {wrong}, expected 0 to {limits.vocabulary - 1}")
