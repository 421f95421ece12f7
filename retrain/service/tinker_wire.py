"""The bodies of the Tinker protocol, as pure functions.

A missing, unknown or invalid field is a ServiceError that names it. The codec in
`retrain.wire.tinker` reads and writes protobuf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.engine.drawing import Top
from retrain.errors import shown
from retrain.service import training_fields
from retrain.service.errors import invalid
from retrain.service.fields import INT64, Json, check_non_negative, integer, iso, objects, want
from retrain.service.jobs import RequestJob
from retrain.service.passes import Passed, TargetRow
from retrain.service.rows import datum_of
from retrain.service.sampling import SampleFindings, SampleRequest
from retrain.service.store import KINDS, CheckpointPlace, Kind, Saved
from retrain.wire.tinker import messages
from retrain.wire.tinker.messages import PROTOBUF
from retrain.wire.tinker.payloads import sample_to_json, tensor_to_json
from retrain.wire.tinker.values import (
    EMPTY,
    ForwardBackward,
    ForwardBackwardOutput,
    LossConfig,
    SampledSequence,
    SampleResult,
    Tensor,
    TopTokens,
)

T = TypeVar("T")
SCHEME = "tinker://"


def request_of(body: Json, *, forward_only: bool) -> ForwardBackward:
    """The JSON form of the protobuf request; it has a separate endpoint for `forward`."""
    given = want(body, "forward_input" if forward_only else "forward_backward_input", dict)
    loss = want(given, "loss_fn", str)
    expected = training_fields.known_loss(loss, training_fields.TINKER_LOSSES)
    return ForwardBackward(
        model_id=want(body, "model_id", str),
        seq_id=want(body, "seq_id", int),
        data=[datum_of(datum, expected) for datum in objects(given, "data")],
        loss=loss,
        config=want(given, "loss_fn_config", dict, {}),
        forward_only=forward_only,
    )


def place_of(path: str, kind: Kind | None = None) -> CheckpointPlace:
    """The checkpoint that `tinker://MODEL/KIND/NAME` names, of the given kind."""
    parts, kinds = path.removeprefix(SCHEME).split("/"), (kind,) if kind else KINDS
    if not path.startswith(SCHEME) or len(parts) != 3 or parts[1] not in kinds:
        expected = " or ".join(f"{SCHEME}MODEL/{one}/NAME" for one in kinds)
        raise invalid(f"path: got {shown(path)}, expected {expected}")
    return CheckpointPlace(parts[0], parts[1], parts[2])


def path_of(place: CheckpointPlace) -> str:
    return SCHEME + "/".join(place)


def loss_config(loss: str, given: LossConfig) -> Mapping[str, float]:
    """The settings of a loss under our names."""
    known = {
        "ppo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "gspo": {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        "cispo": {"clip_low_threshold": 0.0, "clip_high_threshold": 4.0},
        "dro": {"beta": 0.05},
    }.get(loss, {})
    if unknown := sorted(set(given) - set(known)):
        expected = ", ".join(known) or "no keys"
        raise invalid(
            f"loss_fn_config of {loss!r} has unknown keys {shown(unknown)}, expected {expected}"
        )
    check_non_negative("loss_fn_config", given)
    merged = {**known, **{key: float(value) for key, value in given.items()}}
    if "clip_low_threshold" not in merged:
        return merged
    low, high = merged["clip_low_threshold"], merged["clip_high_threshold"]
    if not low <= 1 <= high:
        raise invalid(f"clip thresholds: got {low} and {high}, expected one <= 1 and one >= 1")
    return {"epsilon": 1 - low, "epsilon_high": high - 1}


def output(passed: Passed, rows: Sequence[TargetRow]) -> ForwardBackwardOutput:
    shapes = [None if row.width is None else (len(row.tokens), row.width) for row in rows]
    return ForwardBackwardOutput(
        outputs=[
            {"logprobs": Tensor(logprobs, shape=shape)}
            for logprobs, shape in zip(passed.logprobs, shapes, strict=True)
        ],
        metrics={"loss:sum": passed.loss, "tokens:sum": passed.tokens},
        kind="ArrayRecord",
    )


def sampled(found: SampleFindings, request: SampleRequest) -> SampleResult:
    sequences = [
        SampledSequence(
            tokens=list(one.token_ids),
            logprobs=list(one.logprobs),
            stop_reason="stop" if one.stop_reason == "stop" else "length",
            top=None if top is None else _top(top),
        )
        for one, top in found.drawn
    ]
    more = found.alternatives
    return SampleResult(
        sequences,
        found.prompt_logprobs,
        None if more is None or more.top is None else prompt_top(more.top, request.scored),
        None if more is None or more.given is None else _targets(more.given, request),
    )


def prompt_top(top: Top, scored: int) -> TopTokens:
    """Of every token of the prompt; empty before position `scored`."""
    found = _top(top)
    empty = [[0] * found.width] * scored, [[EMPTY] * found.width] * scored
    return TopTokens(
        [*empty[0], *found.ids[scored - 1 :]],
        [*empty[1], *found.logprobs[scored - 1 :]],
        found.width,
    )


def _top(top: Top) -> TopTokens:
    logprobs = np.maximum(top.logprobs, EMPTY)
    return TopTokens(top.ids.tolist(), logprobs.tolist(), top.ids.shape[1])


def _targets(scores: list[list[float]], request: SampleRequest) -> Tensor:
    """In the shape and layout in which the ids came."""
    shape = len(scores), len(scores[0])
    if request.sparse is None:
        return Tensor([score for row in scores for score in row], shape=shape)
    starts, columns = request.sparse
    data = [
        scores[row][columns[place]]
        for row, (first, last) in enumerate(itertools.pairwise(starts))
        for place in range(first, last)
    ]
    return Tensor(data, shape=shape, sparse=request.sparse)


def result(result: ForwardBackwardOutput | SampleResult, protobuf: bool) -> Response:
    if isinstance(result, SampleResult):
        if protobuf:
            return Response(messages.encode_sample(result), media_type=PROTOBUF)
        return JSONResponse(sample_to_json(result))
    if protobuf:
        return Response(messages.encode_output(result), media_type=PROTOBUF)
    outputs = [{name: tensor_to_json(t) for name, t in one.items()} for one in result.outputs]
    return JSONResponse(
        {
            "loss_fn_output_type": result.kind,
            "loss_fn_outputs": outputs,
            "metrics": dict(result.metrics),
        }
    )


def try_again(job: RequestJob) -> Json:
    reply = {"type": "try_again", "request_id": job.id, "queue_state": "active"}
    if job.state == "waiting":
        reply["queue_state_reason"] = "a request with a lower seq_id has not arrived yet"
    return reply


def checkpoint(saved: Saved) -> Json:
    place = saved.place
    return {
        "checkpoint_id": f"{place.kind}/{place.name}",
        "checkpoint_type": "training" if place.kind == "weights" else "sampler",
        "time": iso(saved.created_at),
        "tinker_path": path_of(place),
        "size_bytes": saved.size_bytes,
        "public": False,
        "expires_at": iso(saved.expires_at),
        "user_metadata": dict(saved.metadata) or None,
    }


def page(request: Request, name: str, items: Sequence[T], show: Callable[[T], Json]) -> Json:
    """The part of `items` that `offset` and `limit` in the URL ask for."""
    try:
        given = {name: int(request.query_params.get(name, 0)) for name in ("offset", "limit")}
    except ValueError:
        raise invalid("limit and offset must be integers") from None
    first, count = max(0, integer(given, "offset", *INT64)), integer(given, "limit", *INT64)
    count = max(1, count or 100)
    cursor = {"offset": first, "limit": count, "total_count": len(items)}
    return {name: list(map(show, items[first : first + count])), "cursor": cursor}
