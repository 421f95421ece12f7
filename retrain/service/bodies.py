"""The contents of request bodies in both protocols, as pure functions.

A missing, unknown or invalid field is a ServiceError (400) that names it; for training data, it
names the datum and the input. Nothing is padded, cut or guessed. Each loss takes exactly the inputs
of its row in LOSSES.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from typing import Any, TypeVar, cast, overload

from retrain.errors import shown
from retrain.protocols.tinker.values import Datum, Dtype, Tensor
from retrain.protocols.training import AdamParams
from retrain.sampler import SamplingParams
from retrain.service.errors import invalid
from retrain.service.state import Limits
from retrain.service.trainer import Row, Tuning

T = TypeVar("T")
Json = Mapping[str, Any]  # an object as it came off the wire
_REQUIRED: Any = object()  # no default
IGNORED_TARGET = -100
"""A target without loss, as in torch's cross_entropy."""
_DEFAULT_TOKENS = 4096
"""Completion tokens when neither the request nor the model sets a limit."""
_MAX_RANK = 1024
_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "target_prompt_logprobs",
    "record_stability_info",
    "prompt_logprobs_last_n",
    "return_sampling_mask",
    "return_moe_topk_indices",
    "score_centering",
)
"""Options of a sample request, in either protocol."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs that a loss reads from each datum, besides the tokens."""

    required: frozenset[str]
    optional: frozenset[str] = frozenset()
    ignores_others: bool = False
    """Ignore unknown inputs: a client-side loss also sends the inputs that it reads itself."""


_WEIGHTED = frozenset({"target_tokens", "weights"})
_RATIO = frozenset({"target_tokens", "logprobs", "advantages"})
_MASK = frozenset({"loss_mask"})
TINKER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(_WEIGHTED),
    **dict.fromkeys(("importance_sampling", "ppo", "cispo", "dro"), Inputs(_RATIO)),
}
WEAVER_LOSSES: Mapping[str, Inputs] = {
    "cross_entropy": Inputs(_WEIGHTED, _MASK),
    "importance_sampling": Inputs(_RATIO, _MASK),
    "forward_logprob": Inputs(frozenset({"target_tokens"}), ignores_others=True),
    "surrogate": Inputs(frozenset({"target_tokens", "surrogate_weights"}), ignores_others=True),
}


@overload
def want(body: Json, name: str, kind: type[T]) -> T: ...
@overload
def want(body: Json, name: str, kind: type[T], default: None) -> T | None: ...
@overload
def want(body: Json, name: str, kind: type[T], default: T) -> T: ...
def want(body: Json, name: str, kind: type[T], default: Any = _REQUIRED) -> T | None:
    """`body[name]` of type `kind`; if missing or null, the default or else a ServiceError (400).

    An integer is also a float; a boolean is not a number.
    """
    value: Any = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise invalid(f"{name} is missing, expected {_article(kind)}")
        return default  # type: ignore[no-any-return]  # T or None by the overloads
    wide: Any = (int, float) if kind is float else kind  # isinstance takes both
    if not isinstance(value, wide) or (isinstance(value, bool) and kind is not bool):
        raise invalid(f"{name}: got {shown(value)}, expected {_article(kind)}")
    return value  # type: ignore[no-any-return]  # checked above


def _article(kind: type[Any]) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "a boolean"}
    return names.get(kind, "a list" if kind is list else "an object")


def known_loss(loss: str, losses: Mapping[str, Inputs]) -> Inputs:
    """The inputs of a loss; raises ServiceError with the nearest name for an unknown loss."""
    if loss not in losses:
        close = difflib.get_close_matches(loss, losses, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        known = ", ".join(losses)
        raise invalid(f"loss_fn {loss!r} is not supported{hint}; expected one of {known}")
    return losses[loss]


def tokens_of(prompt: Json) -> list[int]:
    """The tokens of a list of text chunks; images and audio are not supported."""
    tokens: list[int] = []
    for chunk in want(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise invalid("only chunks of type encoded_text are supported")
        tokens += want(chunk, "tokens", list)
    return tokens


def prompt_of(body: Json, limits: Limits) -> list[int]:
    prompt = tokens_of(want(body, "prompt", dict))
    _check_tokens("prompt", prompt, limits)
    return prompt


def datum_of(given: Json, expected: Inputs) -> Datum:
    """A training sequence, without the inputs that its loss ignores."""
    inputs = want(given, "loss_fn_inputs", dict)
    if expected.ignores_others:
        inputs = {name: inputs[name] for name in inputs if name in expected.required}
    tokens = tokens_of(want(given, "model_input", dict))
    return Datum(tokens, {name: _tensor(name, inputs[name]) for name in inputs})


def _tensor(name: str, given: object) -> Tensor:
    if not isinstance(given, dict):
        raise invalid(f"{name}: got {type(given).__name__}, expected an object with data and dtype")
    if given.get("sparse_crow_indices") is not None:
        raise invalid(f"{name}: sparse tensors are not supported; send a dense one")
    shape = want(given, "shape", list, None)
    dtype = cast(Dtype, want(given, "dtype", str))  # checked with the row
    return Tensor(want(given, "data", list), dtype, None if shape is None else tuple(shape))


def training_rows(data: Sequence[Datum], expected: Inputs, limits: Limits) -> list[Row]:
    """One row per datum; raises ServiceError for data that doesn't fit the loss."""
    if not data:
        raise invalid("there is no data: expected at least one datum")
    return [_row(f"datum {index}", datum, expected, limits) for index, datum in enumerate(data)]


def _row(where: str, datum: Datum, expected: Inputs, limits: Limits) -> Row:
    """The row of a datum; surrogate weights, dL/dlogp, become negated advantages."""
    tokens, length = list(datum.tokens), len(datum.tokens)
    _check_tokens(where, tokens, limits)
    _check_names(where, set(datum.inputs), expected)
    numbers: dict[str, Sequence[float]] = {}
    for name in datum.inputs.keys() & (expected.required | expected.optional):
        _check_values(f"{where}: {name}", datum.inputs[name], length, name == "target_tokens")
        numbers[name] = datum.inputs[name].data
    targets = [int(target) for target in numbers["target_tokens"]]
    labels = [0 if target == IGNORED_TARGET else target for target in targets]
    _check_range(f"{where}: target_tokens", labels, limits)
    ones = [1.0] * length
    mask = numbers.get("loss_mask", ones)
    if not set(mask) <= {0, 1}:
        raise invalid(f"{where}: loss_mask has values other than 0 and 1")
    credit = numbers.get("advantages", numbers.get("weights", ones))
    if "surrogate_weights" in numbers:
        credit = [-weight for weight in numbers["surrogate_weights"]]
    return Row(
        tokens=tokens,
        targets=labels,
        advantages=credit,
        logprobs=numbers.get("logprobs", [0.0] * length),
        mask=[float(m and t != IGNORED_TARGET) for m, t in zip(mask, targets, strict=True)],
    )


def _check_names(where: str, got: set[str], expected: Inputs) -> None:
    wanted = ", ".join(sorted(expected.required))
    if lacking := sorted(expected.required - got):
        raise invalid(f"{where} lacks {lacking}, expected {wanted}")
    unknown = sorted(got - expected.required - expected.optional)
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


def _check_tokens(where: str, tokens: Sequence[int], limits: Limits) -> None:
    if not tokens:
        raise invalid(f"{where} has no tokens")
    if limits.context is not None and len(tokens) > limits.context:
        raise invalid(f"{where} has {len(tokens)} tokens, expected at most {limits.context}")
    if not all(type(token) is int for token in tokens):
        raise invalid(f"{where}: tokens must be integers")
    _check_range(f"{where}: tokens", tokens, limits)


def _check_range(where: str, tokens: Sequence[int], limits: Limits) -> None:
    if tokens and not (min(tokens) >= 0 and max(tokens) < limits.vocabulary):
        wrong = next(t for t in tokens if not 0 <= t < limits.vocabulary)
        raise invalid(f"{where}: got token {wrong}, expected 0 to {limits.vocabulary - 1}")


def check_non_negative(where: str, values: Mapping[str, Any]) -> None:  # JSON values
    """Raise ServiceError unless all values are finite numbers >= 0."""
    for name, value in values.items():
        if type(value) not in (int, float) or not (0 <= value < math.inf):
            raise invalid(f"{where}.{name}: got {shown(value)}, expected a finite number >= 0")


def check_unsupported(body: Json) -> None:
    """Raise ServiceError for options that a sample request sets and this service lacks."""
    for name in _UNSUPPORTED:
        if body.get(name):
            raise invalid(f"{name} is not supported; remove it")


def sampling_params(body: Json, prompt: Sequence[int], limits: Limits) -> SamplingParams:
    """`max_tokens` defaults to what fits into the context; `stop` may have strings and ids."""
    given = want(body, "sampling_params", dict, {})
    stop = given.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    ids = want(given, "stop_token_ids", list, [])
    if not isinstance(stops, list) or not all(type(one) in (str, int) for one in stops):
        raise invalid(f"stop: got {shown(stop)}, expected a string or a list of strings or ids")
    if not all(type(one) is int for one in ids):
        raise invalid(f"stop_token_ids: got {shown(ids)}, expected integers")
    room = _DEFAULT_TOKENS
    if limits.context is not None:
        room = max(1, limits.context - len(prompt))
    return SamplingParams(
        max_tokens=want(given, "max_tokens", int, room),
        temperature=want(given, "temperature", float, 1.0),
        top_p=want(given, "top_p", float, 1.0),
        top_k=max(0, want(given, "top_k", int, -1)),
        stop=tuple(one for one in stops if isinstance(one, str)),
        stop_token_ids=tuple(one for one in (*stops, *ids) if isinstance(one, int)),
        seed=want(given, "seed", int, None),
    )


def tuning(body: Json, min_rank: int) -> Tuning:
    """Which weights a new model trains; rank 0 trains the full weights."""
    lora = want(body, "lora_config", dict, {})
    rank = want(lora, "rank", int, Tuning().rank)
    if not min_rank <= rank <= _MAX_RANK:
        full = ", or 0 for the full weights" if min_rank == 0 else ""
        raise invalid(f"lora_config.rank: got {rank}, expected 1 to {_MAX_RANK}{full}")
    return Tuning(
        rank=rank,
        attention=want(lora, "train_attn", bool, True),
        mlp=want(lora, "train_mlp", bool, True),
        unembed=want(lora, "train_unembed", bool, True),
        seed=want(lora, "seed", int, 0),
    )


def adam_params(body: Json) -> AdamParams:
    """AdamW's hyperparameters."""
    given = {name: v for name, v in want(body, "adam_params", dict).items() if name != "type"}
    known = [field.name for field in fields(AdamParams)]
    if unknown := sorted(set(given) - set(known)):
        raise invalid(f"adam_params has unknown fields {unknown}: expected some of {known}")
    check_non_negative("adam_params", given)
    adam = AdamParams(**given)
    if adam.beta1 >= 1 or adam.beta2 >= 1:
        raise invalid(f"adam_params: got beta1 {adam.beta1} and beta2 {adam.beta2}, expected < 1")
    return adam


def ttl(body: Json) -> float | None:
    """Seconds to keep a checkpoint; None keeps it until it is deleted."""
    seconds = want(body, "ttl_seconds", int, None)
    if seconds is not None and seconds < 1:
        raise invalid(f"ttl_seconds: got {seconds}, expected 1 or more, or null to keep it")
    return seconds


def iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
