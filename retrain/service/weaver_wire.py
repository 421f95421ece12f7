"""The bodies of the Weaver protocol, as pure functions.

A missing, unknown or invalid field is a ServiceError that names it. Every supported input has one
number per token, so nested lists are rejected.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from retrain.errors import shown
from retrain.sampler import Tokenizer
from retrain.service import bodies
from retrain.service.bodies import Json, want
from retrain.service.errors import invalid
from retrain.service.jobs import Job
from retrain.service.state import Limits
from retrain.service.store import Place, Saved
from retrain.service.trainer import Passed, Row, Tuning
from retrain.types import Completion

SCHEME = "weaver://"
SAVE_TYPES = ("weight", "weight_and_optimizer", "sampling")
_NEUTRAL: Mapping[str, Any] = {"entropy_coeff": 0, "temperature": 1, "enable_debug_dump": None}
"""Settings of a loss, with the only value that is accepted; None accepts any."""


class TrainingCall(NamedTuple):
    """A forward or forward-backward pass."""

    loss: str
    rows: list[Row]
    datum_ids: Sequence[str | None]


def training_call(payload: Json, key: str, limits: Limits) -> TrainingCall:
    """Raises ServiceError for data that doesn't fit the loss."""
    if want(payload, "tensor_transport", str, "default") != "default":
        raise invalid("tensor_transport: only 'default' is supported")
    given = want(payload, key, dict)
    loss = want(given, "loss_fn", str)
    expected = bodies.known_loss(loss, bodies.WEAVER_LOSSES)
    _check_config(loss, want(given, "loss_fn_config", dict, {}))
    data = want(given, "data", list)
    read = [bodies.datum_of(datum, expected) for datum in data]
    ids = [want(datum, "datum_id", str, None) for datum in data]
    return TrainingCall(loss, bodies.training_rows(read, expected, limits), ids)


def payload_of(body: Json, model_id: str) -> Json:
    """The payload; raises ServiceError if its model is not that of the path."""
    payload = want(body, "payload", dict)
    if want(payload, "model_id", str, model_id) != model_id:
        raise invalid(
            f"payload.model_id: got {payload['model_id']!r}, expected the path's {model_id!r}"
        )
    return payload


def tuning(body: Json) -> Tuning:
    """Which weights a new model trains; `full_ft` ignores lora_config."""
    mode = want(body, "training_mode", str, "lora")
    if mode == "full_ft":
        return Tuning(rank=0)
    if mode != "lora":
        raise invalid(f"training_mode: got {shown(mode)}, expected 'lora' or 'full_ft'")
    made = bodies.tuning(body, min_rank=1)
    if not (made.attention or made.mlp or made.unembed):
        raise invalid("lora_config trains nothing: enable at least one kind of layer")
    return made


def place_of(path: str) -> Place:
    """`weaver://MODEL/checkpoints/NAME` is a training state, `weaver://MODEL/NAME` a sampler's."""
    parts = path.removeprefix(SCHEME).split("/")
    if path.startswith(SCHEME) and len(parts) == 2:
        return Place(parts[0], "sampler_weights", parts[1])
    if path.startswith(SCHEME) and len(parts) == 3 and parts[1] == "checkpoints":
        return Place(parts[0], "weights", parts[2])
    raise invalid(
        f"path: got {path!r}, expected {SCHEME}MODEL/checkpoints/NAME or {SCHEME}MODEL/NAME"
    )


def path_of(place: Place) -> str:
    middle = "" if place.kind == "sampler_weights" else "/checkpoints"
    return f"{SCHEME}{place.model_id}{middle}/{place.name}"


def passed(passed: Passed, datum_ids: Sequence[str | None], model_id: str) -> Json:
    """The result of a pass, with the datum ids of the request."""
    outputs = [
        {"logprobs": row} if datum_id is None else {"logprobs": row, "datum_id": datum_id}
        for row, datum_id in zip(passed.logprobs, datum_ids, strict=True)
    ]
    metrics = {"loss:sum": passed.loss, "loss": passed.loss, "tokens": passed.tokens}
    result = {"loss_fn_outputs": outputs, "metrics": metrics}
    return {"status": "success", "model_id": model_id, "result": result}


def sampled(
    found: tuple[list[Completion], list[float | None] | None], tokenizer: Tokenizer
) -> Json:
    completions, prompt_logprobs = found
    sequences = [
        {
            "tokens": list(one.token_ids),
            "logprobs": list(one.logprobs),
            "text": tokenizer.decode(one.token_ids),
            "stop_reason": "stop" if one.stop_reason == "stop" else "length",
        }
        for one in completions
    ]
    scored = {} if prompt_logprobs is None else {"prompt_logprobs": prompt_logprobs}
    return {"result": {"sequences": sequences, **scored}}


def operation(job: Job) -> Json:
    """The state of a job, as clients see it."""
    reply: dict[str, Any] = {"id": job.id, "type": job.kind}
    if job.error is not None:
        details = {"diagnostic_message": str(job.error), "operation_id": job.id}
        return {
            **reply,
            "status": "error",
            "error": job.error.code,
            "error_code": job.error.code,
            "error_message": str(job.error),
            "error_details": details,
            "retryable": False,
        }
    if job.state == "done":
        reply["response"] = job.result
    return {**reply, "status": "pending" if job.state == "waiting" else job.state}


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
        "created_at": bodies.iso(saved.created_at),
        "expires_at": bodies.iso(expires),
    }


def _check_config(loss: str, config: Json) -> None:
    for key, value in config.items():
        neutral = _NEUTRAL.get(key, ...)
        if neutral is None or value == neutral:
            continue
        if neutral is ...:
            raise invalid(f"loss_fn_config of {loss!r} has the unknown key {key!r}")
        raise invalid(f"loss_fn_config.{key}: got {shown(value)}, only {neutral} is supported")
