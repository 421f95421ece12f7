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
from retrain.service import training_fields
from retrain.service.errors import invalid
from retrain.service.fields import Json, iso, objects, want
from retrain.service.jobs import RequestJob
from retrain.service.passes import Passed, TargetRow
from retrain.service.rows import datum_of, training_rows
from retrain.service.sampling import SampleFindings, SampleRequest
from retrain.service.state import RequestLimits
from retrain.service.store import CheckpointPlace, Saved
from retrain.service.tinker_wire import prompt_top
from retrain.service.tuning import Tuning
from retrain.wire.tinker.payloads import top_to_json

SCHEME = "weaver://"
SAVE_TYPES = ("weight", "weight_and_optimizer", "sampling")
_NEUTRAL: Mapping[str, Any] = {"entropy_coeff": 0, "temperature": 1, "enable_debug_dump": None}
"""Settings of a loss, with the only value that is accepted; None accepts any."""
_TRUNCATED = "truncated_importance_sampling"
_COMPUTED = {
    _TRUNCATED: "cispo",
    **dict.fromkeys(("surrogate", "forward_logprob"), "cross_entropy"),
}
_CAP = 2.0
"""Of its ratio, by default; `loss_fn_config.clip_ratio` sets another."""


class TrainingCall(NamedTuple):
    """A forward or forward-backward pass."""

    loss: str
    """The trainer's name of the loss."""
    config: Mapping[str, float]
    rows: list[TargetRow]
    datum_ids: Sequence[str | None]


def training_call(payload: Json, key: str, limits: RequestLimits) -> TrainingCall:
    """Raises ServiceError for data that doesn't fit the loss.

    Truncated importance sampling is -stop_gradient(min(r, cap)) A lp, which is cispo without a
    lower bound. `surrogate` and `forward_logprob` are weights times log-probs.
    """
    if want(payload, "tensor_transport", str, "default") != "default":
        raise invalid("tensor_transport: only 'default' is supported")
    given = want(payload, key, dict)
    loss = want(given, "loss_fn", str)
    expected = training_fields.known_loss(loss, training_fields.WEAVER_LOSSES)
    cap = _cap(loss, want(given, "loss_fn_config", dict, {}))
    if (loss, key) == ("forward_logprob", "forward_backward_input"):
        raise invalid("forward_logprob has no gradient; use it with forward")
    data = objects(given, "data")
    read = [datum_of(datum, expected) for datum in data]
    ids = [want(datum, "datum_id", str, None) for datum in data]
    config = {"epsilon": 1.0, "epsilon_high": cap - 1} if loss == _TRUNCATED else {}
    return TrainingCall(
        _COMPUTED.get(loss, loss), config, training_rows(read, expected, limits), ids
    )


def payload_of(body: Json, model_id: str) -> Json:
    """The payload; raises ServiceError if its model is not that of the path."""
    payload = want(body, "payload", dict)
    if want(payload, "model_id", str, model_id) != model_id:
        raise invalid(
            f"payload.model_id: got {shown(payload['model_id'])}, expected the path's {model_id!r}"
        )
    return payload


def tuning(body: Json) -> Tuning:
    """Which weights a new model trains; `full_ft` ignores lora_config."""
    mode = want(body, "training_mode", str, "lora")
    if mode == "full_ft":
        return Tuning(rank=0)
    if mode != "lora":
        raise invalid(f"training_mode: got {shown(mode)}, expected 'lora' or 'full_ft'")
    made = training_fields.tuning(body, min_rank=1)
    if not (made.attention or made.mlp or made.unembed):
        raise invalid("lora_config trains nothing: enable at least one kind of layer")
    return made


def place_of(path: str) -> CheckpointPlace:
    """`weaver://MODEL/checkpoints/NAME` is a training state, `weaver://MODEL/NAME` a sampler's."""
    parts = path.removeprefix(SCHEME).split("/")
    if path.startswith(SCHEME) and len(parts) == 2:
        return CheckpointPlace(parts[0], "sampler_weights", parts[1])
    if path.startswith(SCHEME) and len(parts) == 3 and parts[1] == "checkpoints":
        return CheckpointPlace(parts[0], "weights", parts[2])
    raise invalid(
        f"path: got {shown(path)}, expected {SCHEME}MODEL/checkpoints/NAME or {SCHEME}MODEL/NAME"
    )


def path_of(place: CheckpointPlace) -> str:
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


def sampled(found: SampleFindings, request: SampleRequest, tokenizer: Tokenizer) -> Json:
    sequences = [
        {
            "tokens": list(one.token_ids),
            "logprobs": list(one.logprobs),
            "text": tokenizer.decode(one.token_ids),
            "stop_reason": "stop" if one.stop_reason == "stop" else "length",
        }
        for one, _ in found.drawn
    ]
    result: dict[str, Any] = {"sequences": sequences}
    if found.prompt_logprobs is not None:
        result["prompt_logprobs"] = found.prompt_logprobs
    if found.alternatives is not None and found.alternatives.top is not None:
        top = prompt_top(found.alternatives.top, request.scored)
        result["topk_prompt_logprobs"] = top_to_json(top)
    return {"result": result}


def operation(job: RequestJob) -> Json:
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
        "created_at": iso(saved.created_at),
        "expires_at": iso(expires),
    }


def _cap(loss: str, config: Json) -> float:
    """The cap of the ratio; raises ServiceError for keys that the loss lacks."""
    for key, value in config.items():
        neutral = _NEUTRAL.get(key, ...)
        if neutral is None or value == neutral or (loss, key) == (_TRUNCATED, "clip_ratio"):
            continue
        if neutral is ...:
            raise invalid(f"loss_fn_config of {loss!r} has the unknown key {shown(key)}")
        raise invalid(f"loss_fn_config.{key}: got {shown(value)}, only {neutral} is supported")
    cap = want(config, "clip_ratio", float, _CAP)
    if cap <= 0:
        raise invalid(f"loss_fn_config.clip_ratio: got {cap:g}, expected a number > 0")
    return cap
