"""What the request bodies of both protocols have in common, as pure functions.

A missing, unknown or invalid field is a ServiceError (400) that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime
from typing import cast

from retrain.protocols.tinker.values import Datum, Dtype, Tensor
from retrain.protocols.training import AdamParams
from retrain.sampler import SamplingParams
from retrain.service.errors import invalid
from retrain.service.trainer import Tuning
from retrain.service.validation import Inputs, Limits, check_non_negative, check_tokens
from retrain.service.web import Json, want

_DEFAULT_TOKENS = 4096
"""Completion tokens when neither the request nor the model sets a limit."""
_MAX_RANK = 1024


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
    check_tokens("prompt", prompt, limits)
    return prompt


def datum_of(given: Json, expected: Inputs | None = None) -> Datum:
    """A training sequence, without the inputs that its loss is `expected` to ignore."""
    inputs = want(given, "loss_fn_inputs", dict)
    if expected is not None and expected.ignores_others:
        inputs = {name: inputs[name] for name in inputs if name in expected.names}
    tokens = tokens_of(want(given, "model_input", dict))
    return Datum(tokens, {name: _tensor(name, inputs[name]) for name in inputs})


def _tensor(name: str, given: object) -> Tensor:
    if not isinstance(given, dict):
        raise invalid(f"{name}: got {type(given).__name__}, expected an object with data and dtype")
    if given.get("sparse_crow_indices") is not None:
        raise invalid(f"{name}: sparse tensors are not supported; send a dense one")
    shape = want(given, "shape", list, None)
    dtype = cast(Dtype, want(given, "dtype", str))  # checked with the row
    data: Sequence[float] = want(given, "data", list)
    return Tensor(data, dtype, None if shape is None else tuple(shape))


def sampling_params(
    given: Json, prompt: Sequence[int], limits: Limits, stop: Sequence[str], stop_ids: Sequence[int]
) -> SamplingParams:
    """`max_tokens` defaults to what fits into the context."""
    room = _DEFAULT_TOKENS
    if limits.context is not None:
        room = max(1, limits.context - len(prompt))
    return SamplingParams(
        max_tokens=want(given, "max_tokens", int, room),
        temperature=want(given, "temperature", float, 1.0),
        top_p=want(given, "top_p", float, 1.0),
        top_k=max(0, want(given, "top_k", int, -1)),
        stop=tuple(stop),
        stop_token_ids=tuple(stop_ids),
        seed=want(given, "seed", int, None),
    )


def check_unsupported(body: Json, names: Iterable[str]) -> None:
    """Raise ServiceError for options that a request sets and this service lacks."""
    for name in names:
        if body.get(name):
            raise invalid(f"{name} is not supported; remove it")


def tuning(lora: Json, min_rank: int) -> Tuning:
    """Which weights a model trains; rank 0 trains the full weights."""
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
    given = {name: value for name, value in body.items() if name != "type"}
    known = [field.name for field in fields(AdamParams)]
    if unknown := sorted(set(given) - set(known)):
        raise invalid(f"adam_params has unknown fields {unknown}: expected some of {known}")
    check_non_negative("adam_params", given)
    adam = AdamParams(**given)
    if adam.beta1 >= 1 or adam.beta2 >= 1:
        raise invalid(f"adam_params: got beta1 {adam.beta1} and beta2 {adam.beta2}, expected < 1")
    return adam


def weights_to_sample(body: Json) -> tuple[str | None, str | None]:
    """`model_path` and `base_model`, at least one of which a sampling session names."""
    path, base = want(body, "model_path", str, None), want(body, "base_model", str, None)
    if path is None and base is None:
        raise invalid("model_path or base_model is missing: set one of them")
    return path, base


def ttl(body: Json) -> float | None:
    """Seconds to keep a checkpoint; None keeps it until it is deleted."""
    seconds = want(body, "ttl_seconds", int, None)
    if seconds is not None and seconds < 1:
        raise invalid(f"ttl_seconds: got {seconds}, expected 1 or more, or null to keep it")
    return seconds


def iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()
