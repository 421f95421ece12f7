"""Tinker's bodies, as pure functions: requests in our words, and results as they go out.

Whatever a body lacks or holds in excess is a ServiceError that names it. Protobuf is read and
written by the codec of `retrain.adapters.tinker`, which is held to the protocol's golden vectors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, cast

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.protocols.tinker import messages, payloads
from retrain.protocols.tinker.messages import PROTOBUF
from retrain.protocols.tinker.values import (
    Datum,
    Dtype,
    ForwardBackward,
    ForwardBackwardOutput,
    LossConfig,
    SampledSequence,
    SampleResult,
    Tensor,
)
from retrain.protocols.training import AdamParams
from retrain.sampler import SamplingParams
from retrain.service.errors import invalid
from retrain.service.jobs import Job
from retrain.service.store import KINDS, Place, Saved
from retrain.service.trainer import Passed, Row, Tuning
from retrain.service.validation import (
    TINKER_LOSSES,
    Limits,
    Values,
    finite,
    known_loss,
    training_row,
)
from retrain.service.web import Json, json_object, want
from retrain.types import Completion

SCHEME = "tinker://"
_ENOUGH = 4096
"""Tokens of a completion when neither the request nor the model sets a limit."""


def forward_backward_request(body: bytes) -> ForwardBackward:
    """The JSON form of the protobuf request; `forward` is an endpoint of its own there."""
    return _request(json_object(body), "forward_backward_input", forward_only=False)


def forward_request(body: bytes) -> ForwardBackward:
    return _request(json_object(body), "forward_input", forward_only=True)


def rows(call: ForwardBackward, limits: Limits) -> list[Row]:
    """What is to be trained; raises ServiceError on anything that doesn't fit the loss."""
    expected = known_loss(call.loss, TINKER_LOSSES)
    if not call.data:
        raise invalid("there is no data: expected one datum at least")
    return [
        training_row(
            index,
            list(datum.tokens),
            {n: Values(t.data, t.dtype, t.dimensions) for n, t in datum.inputs.items()},
            expected,
            limits,
        )
        for index, datum in enumerate(call.data)
    ]


def prompt_tokens(prompt: Json) -> list[int]:
    """The tokens of a list of text chunks; raises ServiceError on images and audio."""
    tokens: list[int] = []
    for chunk in want(prompt, "chunks", list):
        if not isinstance(chunk, dict) or chunk.get("type", "encoded_text") != "encoded_text":
            raise invalid("only chunks of the type encoded_text are served")
        tokens += want(chunk, "tokens", list)
    return tokens


def sampling_params(body: Json, prompt_length: int, context: int | None) -> SamplingParams:
    """A completion without max_tokens may fill the context."""
    stop = body.get("stop")
    if stop == []:
        raise invalid("stop: [] (never stop) is not served: leave stop out, and set max_tokens")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or not all(type(one) in (str, int) for one in stops):
        raise invalid("stop must be a text, a list of texts or a list of token ids")
    room = _ENOUGH if context is None else max(1, context - prompt_length)
    return SamplingParams(
        max_tokens=want(body, "max_tokens", int, room),
        temperature=want(body, "temperature", float, 1.0),
        top_p=want(body, "top_p", float, 1.0),
        top_k=max(0, want(body, "top_k", int, -1)),
        stop=tuple(one for one in stops if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
        seed=want(body, "seed", int, None),
    )


def place_of(path: str) -> Place:
    """What `tinker://MODEL/KIND/NAME` names; raises ServiceError when it's no such path."""
    parts = path.removeprefix(SCHEME).split("/")
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
        raise invalid(
            f"{path!r} is no path: expected {SCHEME}MODEL/weights/NAME or .../sampler_weights/NAME"
        )
    model_id, kind, name = parts
    return Place(model_id, "weights" if kind == "weights" else "sampler_weights", name)


def path_of(place: Place) -> str:
    return SCHEME + "/".join(place)


def adam_params(body: Json) -> AdamParams:
    """AdamW's fields; raises ServiceError on unknown ones and on values that make no step."""
    given = dict(body)
    given.pop("type", None)
    if unknown := sorted(set(given) - set(AdamParams.__slots__)):
        raise invalid(
            f"adam_params has unknown fields {unknown}: it takes {list(AdamParams.__slots__)}"
        )
    finite("adam_params", given, dict.fromkeys(given, 0.0))
    adam = AdamParams(**given)
    if adam.beta1 >= 1 or adam.beta2 >= 1:
        raise invalid(f"beta1 {adam.beta1} and beta2 {adam.beta2} must be below 1")
    return adam


def tuning(lora: Json) -> Tuning:
    rank = want(lora, "rank", int, Tuning().rank)
    if not 0 <= rank <= 1024:
        raise invalid(f"lora_config.rank is {rank}: expected 1 to 1024, or 0 for the full weights")
    return Tuning(
        rank=rank,
        attention=want(lora, "train_attn", bool, True),
        mlp=want(lora, "train_mlp", bool, True),
        unembed=want(lora, "train_unembed", bool, True),
        seed=want(lora, "seed", int, 0),
    )


def check_optimizer(body: Json) -> None:
    kind = want(body, "optimizer_config", dict, {}).get("type", "adamw")
    if kind != "adamw":
        raise invalid(f"the optimizer {kind!r} is not served: expected 'adamw'")


def loss_config(loss: str, given: LossConfig) -> Mapping[str, float]:
    """The loss's keys in our words."""
    known = {
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
    }.get(loss, {})
    if unknown := sorted(set(given) - set(known)):
        expected = ", ".join(known) or "no keys"
        raise invalid(f"loss_fn_config of {loss!r} has unknown keys {unknown}: it takes {expected}")
    finite("loss_fn_config", given, dict.fromkeys(given, 0.0))
    merged = {**known, **{key: float(value) for key, value in given.items()}}
    if "clip_low_threshold" not in merged:
        return merged
    low, high = merged["clip_low_threshold"], merged["clip_high_threshold"]
    if not low <= 1 <= high:
        raise invalid(f"clip thresholds {low} and {high} must have 1 between them")
    return {"epsilon": 1 - low, "epsilon_high": high - 1}


def output(passed: Passed) -> ForwardBackwardOutput:
    return ForwardBackwardOutput(
        outputs=[{"logprobs": Tensor(row)} for row in passed.logprobs],
        metrics={"loss:sum": passed.loss, "tokens:sum": passed.tokens},
        kind="ArrayRecord",
    )


def sampled(
    completions: list[Completion], prompt_logprobs: list[float | None] | None
) -> SampleResult:
    sequences = [
        SampledSequence(
            tokens=list(one.token_ids),
            logprobs=list(one.logprobs),
            stop_reason="stop" if one.stop_reason == "stop" else "length",
        )
        for one in completions
    ]
    return SampleResult(sequences, prompt_logprobs)


def result(result: ForwardBackwardOutput | SampleResult, protobuf: bool) -> Response:
    if not protobuf:
        return JSONResponse(_as_json(result))
    if isinstance(result, SampleResult):
        return Response(messages.encode_sample(result), media_type=PROTOBUF)
    return Response(messages.encode_output(result), media_type=PROTOBUF)


def future(job: Job) -> dict[str, Any]:
    return {"request_id": job.id, **job.facts}


def try_again(job: Job) -> Json:
    reply = {"type": "try_again", "request_id": job.id, "queue_state": "active"}
    if job.state == "waiting":
        reply["queue_state_reason"] = "a request with a lower seq_id has not come yet"
    return reply


def save_options(body: Json) -> dict[str, Any]:
    return {"seconds": ttl(body), "metadata": want(body, "user_metadata", dict, {})}


def ttl(body: Json) -> float | None:
    seconds = want(body, "ttl_seconds", int, None)
    if seconds is not None and seconds < 1:
        raise invalid(f"ttl_seconds is {seconds}: expected 1 or more, or null to keep it")
    return seconds


def place_in_url(request: Request) -> Place:
    given = request.path_params
    if given["kind"] not in KINDS:
        raise invalid(f"{given['kind']!r} is no kind of checkpoint: expected one of {KINDS}")
    return Place(given["model_id"], given["kind"], given["name"])


def checkpoint(saved: Saved) -> Json:
    place = saved.place
    return {
        "checkpoint_id": f"{place.kind}/{place.name}",
        "checkpoint_type": "training" if place.kind == "weights" else "sampler",
        "time": iso(saved.created_at),
        "tinker_path": path_of(place),
        "size_bytes": saved.size_bytes,
        "public": False,
        "expires_at": None if saved.expires_at is None else iso(saved.expires_at),
        "user_metadata": dict(saved.metadata) or None,
    }


def page(request: Request) -> tuple[int, int]:
    try:
        first = int(request.query_params.get("offset", 0))
        count = int(request.query_params.get("limit", 100))
    except ValueError:
        raise invalid("limit and offset must be integers") from None
    return max(0, first), max(1, count)


def cursor(first: int, count: int, total: int) -> Json:
    return {"offset": first, "limit": count, "total_count": total}


def iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def _request(body: Json, key: str, *, forward_only: bool) -> ForwardBackward:
    given = want(body, key, dict)
    return ForwardBackward(
        model_id=want(body, "model_id", str),
        seq_id=want(body, "seq_id", int),
        data=[_datum(datum) for datum in want(given, "data", list)],
        loss=want(given, "loss_fn", str),
        config=want(given, "loss_fn_config", dict, {}),
        forward_only=forward_only,
    )


def _datum(datum: Json) -> Datum:
    inputs = want(datum, "loss_fn_inputs", dict)
    tokens = prompt_tokens(want(datum, "model_input", dict))
    return Datum(tokens, {name: _tensor(tensor) for name, tensor in inputs.items()})


def _tensor(tensor: Json) -> Tensor:
    if tensor.get("sparse_crow_indices") is not None:
        raise invalid("sparse tensors are not served: send them dense")
    shape = want(tensor, "shape", list, None)
    dtype = cast(Dtype, want(tensor, "dtype", str))  # validation compares it
    data: Sequence[float] = want(tensor, "data", list)
    return Tensor(data, dtype, None if shape is None else tuple(shape))


def _as_json(result: ForwardBackwardOutput | SampleResult) -> Json:
    if isinstance(result, SampleResult):
        sequences = [
            {"tokens": s.tokens, "logprobs": s.logprobs, "stop_reason": s.stop_reason}
            for s in result.sequences
        ]
        reply: dict[str, Any] = {"type": "sample", "sequences": sequences}
        if result.prompt_logprobs is not None:
            reply["prompt_logprobs"] = result.prompt_logprobs
        return reply
    outputs = [
        {name: payloads.tensor_to_json(tensor) for name, tensor in output.items()}
        for output in result.outputs
    ]
    return {
        "loss_fn_output_type": result.kind,
        "loss_fn_outputs": outputs,
        "metrics": dict(result.metrics),
    }
