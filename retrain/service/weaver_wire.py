"""Weaver's bodies, as pure functions: requests in our words, and resources as they go out.

Whatever a body lacks or holds in excess is a ServiceError that names it. A tensor has no shape
there: a nested list is refused, since every input that is served has one number a token.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from retrain.errors import shown
from retrain.protocols.training import AdamParams
from retrain.sampler import SamplingParams, Tokenizer
from retrain.service.errors import invalid
from retrain.service.jobs import Job
from retrain.service.store import Place, Saved
from retrain.service.tinker_wire import adam_params, prompt_tokens
from retrain.service.trainer import Passed, Row, Tuning
from retrain.service.validation import (
    WEAVER_LOSSES,
    Inputs,
    Limits,
    Values,
    known_loss,
    training_row,
)
from retrain.service.web import Json, want
from retrain.types import Completion

SCHEME = "weaver://"
SAVE_TYPES = ("weight", "weight_and_optimizer", "sampling")
_NEUTRAL: Mapping[str, Any] = {"entropy_coeff": 0, "temperature": 1, "enable_debug_dump": None}
"""Keys of a loss that are accepted with the one value that changes nothing; None is any."""


@dataclass(frozen=True, slots=True)
class TrainingCall:
    """A forward or forward-backward pass."""

    seq_id: int
    loss: str
    rows: Sequence[Row]
    datum_ids: Sequence[str | None]


def training_call(body: Json, model_id: str, key: str, limits: Limits) -> TrainingCall:
    """Raises ServiceError on anything that doesn't fit the loss."""
    payload = addressed(body, model_id)
    if want(payload, "tensor_transport", str, "default") != "default":
        raise invalid("tensor_transport must be 'default': binary tensor packs are not served")
    given = want(payload, key, dict)
    loss = want(given, "loss_fn", str)
    expected = known_loss(loss, WEAVER_LOSSES)
    _check_config(loss, want(given, "loss_fn_config", dict, {}))
    data = want(given, "data", list)
    if not data:
        raise invalid("there is no data: expected one datum at least")
    rows = [
        training_row(
            index,
            prompt_tokens(want(datum, "model_input", dict)),
            _inputs(want(datum, "loss_fn_inputs", dict), expected),
            expected,
            limits,
        )
        for index, datum in enumerate(data)
    ]
    ids = [want(datum, "datum_id", str, None) for datum in data]
    return TrainingCall(want(payload, "seq_id", int), loss, rows, ids)


def optimizer_call(body: Json, model_id: str) -> tuple[int, AdamParams]:
    """The number of the step, and AdamW's fields."""
    payload = addressed(body, model_id)
    return want(payload, "seq_id", int), adam_params(want(payload, "adam_params", dict))


def addressed(body: Json, model_id: str) -> Json:
    """The payload; raises ServiceError when it's for another model than the path."""
    payload = want(body, "payload", dict)
    if want(payload, "model_id", str, model_id) != model_id:
        raise invalid(f"the payload's model_id {payload['model_id']!r} is not that of the path")
    return payload


def tuning(body: Json) -> Tuning:
    """Which weights a new model trains; `full_ft` takes no lora_config."""
    mode = want(body, "training_mode", str, "lora")
    if mode == "full_ft":
        return Tuning(rank=0)
    if mode != "lora":
        raise invalid(f"training_mode is {shown(mode)}: expected 'lora' or 'full_ft'")
    lora = want(body, "lora_config", dict, {})
    rank = want(lora, "rank", int, Tuning().rank)
    if not 1 <= rank <= 1024:
        raise invalid(f"lora_config.rank is {rank}: expected 1 to 1024")
    made = Tuning(
        rank=rank,
        attention=want(lora, "train_attn", bool, True),
        mlp=want(lora, "train_mlp", bool, True),
        unembed=want(lora, "train_unembed", bool, True),
        seed=want(lora, "seed", int, 0),
    )
    if not (made.attention or made.mlp or made.unembed):
        raise invalid("lora_config trains nothing: switch on one of its layers")
    return made


def sampling_params(body: Json, room: int) -> SamplingParams:
    """A completion without max_tokens may take the `room` that the context leaves."""
    given = want(body, "sampling_params", dict, {})
    stop = given.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    ids = want(given, "stop_token_ids", list, [])
    if not all(isinstance(one, str) for one in stops) or not all(type(i) is int for i in ids):
        raise invalid("stop must be texts, and stop_token_ids integers")
    return SamplingParams(
        max_tokens=want(given, "max_tokens", int, room),
        temperature=want(given, "temperature", float, 1.0),
        top_p=want(given, "top_p", float, 1.0),
        top_k=max(0, want(given, "top_k", int, -1)),
        stop=tuple(stops),
        stop_token_ids=tuple(ids),
        seed=want(given, "seed", int, None),
    )


def place_of(path: str) -> Place:
    """`weaver://MODEL/checkpoints/NAME` is a training state, `weaver://MODEL/NAME` a sampler's."""
    parts = path.removeprefix(SCHEME).split("/")
    if path.startswith(SCHEME) and len(parts) == 2:
        return Place(parts[0], "sampler_weights", parts[1])
    if path.startswith(SCHEME) and len(parts) == 3 and parts[1] == "checkpoints":
        return Place(parts[0], "weights", parts[2])
    raise invalid(f"{path!r} is no path: expected {SCHEME}MODEL/checkpoints/NAME or MODEL/NAME")


def path_of(place: Place) -> str:
    middle = "" if place.kind == "sampler_weights" else "/checkpoints"
    return f"{SCHEME}{place.model_id}{middle}/{place.name}"


def passed(passed: Passed, call: TrainingCall, model_id: str) -> Json:
    """The result of a pass, with the caller's datum ids where it gave any."""
    outputs = [
        {"logprobs": row} if datum_id is None else {"logprobs": row, "datum_id": datum_id}
        for row, datum_id in zip(passed.logprobs, call.datum_ids, strict=True)
    ]
    metrics = {"loss:sum": passed.loss, "loss": passed.loss, "tokens": passed.tokens}
    result = {"loss_fn_outputs": outputs, "metrics": metrics}
    return {"status": "success", "model_id": model_id, "result": result}


def sampled(completions: Sequence[Completion], tokenizer: Tokenizer) -> dict[str, Any]:
    sequences = [
        {
            "tokens": list(one.token_ids),
            "logprobs": list(one.logprobs),
            "text": tokenizer.decode(one.token_ids),
            "stop_reason": "stop" if one.stop_reason == "stop" else "length",
        }
        for one in completions
    ]
    return {"sequences": sequences}


def operation(job: Job) -> Json:
    """What a client sees of a job."""
    reply: dict[str, Any] = {"id": job.id, "type": job.kind, "status": "pending"}
    if job.error is not None:
        details = {"diagnostic_message": str(job.error), "operation_id": job.id}
        return {
            **reply,
            "status": "error",
            "error": job.error.code,
            "error_code": job.error.code,
            "error_message": str(job.error),
            "error_details": details,
            "retryable": job.error.retryable,
        }
    if job.state == "done":
        return {**reply, "status": "done", "response": job.result}
    return {**reply, "status": "running" if job.state == "running" else "pending"}


def checkpoint(saved: Saved) -> Json:
    path = path_of(saved.place)
    training = "weight_and_optimizer" if saved.optimizer else "weight"
    expires = saved.expires_at
    return {
        "id": str(uuid.uuid5(uuid.NAMESPACE_URL, path)),
        "path": path,
        "name": saved.place.name,
        "type": "sampling" if saved.place.kind == "sampler_weights" else training,
        "status": "completed",
        "ttl_seconds": None if expires is None else round(expires - saved.created_at),
        "created_at": _iso(saved.created_at),
        "expires_at": None if expires is None else _iso(expires),
    }


def ttl(body: Json) -> float | None:
    seconds = want(body, "ttl_seconds", int, None)
    if seconds is not None and seconds < 1:
        raise invalid(f"ttl_seconds is {seconds}: expected 1 or more, or null to keep it")
    return seconds


def _inputs(given: Json, expected: Inputs) -> dict[str, Values]:
    """Those that the loss reads, and whatever it doesn't know, unless that is to be ignored."""
    read = expected.required | expected.optional
    names = [name for name in given if name in read or not expected.ignores_others]
    return {name: _values(name, given[name]) for name in names}


def _values(name: str, tensor: Any) -> Values:  # whatever JSON stood there
    if not isinstance(tensor, dict):
        raise invalid(f"{name} is {type(tensor).__name__}: expected an object with data and dtype")
    data: list[float] = want(tensor, "data", list)
    return Values(data, want(tensor, "dtype", str), (len(data),))


def _check_config(loss: str, config: Json) -> None:
    for key, value in config.items():
        neutral = _NEUTRAL.get(key, ...)
        if neutral is None or value == neutral:
            continue
        if neutral is ...:
            raise invalid(f"loss_fn_config of {loss!r} has the unknown key {key!r}")
        raise invalid(f"loss_fn_config.{key} is {shown(value)}: only {neutral} is served")


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
