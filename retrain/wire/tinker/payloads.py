"""The JSON forms of the values: of prompts, and of all values for servers without protobuf."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from retrain.wire.tinker.values import (
    EMPTY,
    Datum,
    Dtype,
    ForwardBackward,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    StopReason,
    Tensor,
    TopTokens,
)


def request_to_json(request: ForwardBackward) -> dict[str, Any]:
    """The body of a request in JSON, in which `forward` has a separate endpoint."""
    payload: dict[str, Any] = {
        "data": [datum_to_json(datum) for datum in request.data],
        "loss_fn": request.loss,
    }
    if request.config:
        payload["loss_fn_config"] = dict(request.config)
    name = "forward_input" if request.forward_only else "forward_backward_input"
    kind = "forward" if request.forward_only else "forward_backward"
    return {name: payload, "model_id": request.model_id, "seq_id": request.seq_id, "type": kind}


def datum_to_json(datum: Datum) -> dict[str, Any]:
    return {
        "model_input": prompt_to_json(datum.tokens),
        "loss_fn_inputs": {name: tensor_to_json(t) for name, t in datum.inputs.items()},
    }


def prompt_to_json(tokens: Sequence[int]) -> dict[str, Any]:
    """A prompt as the protocol's list of chunks."""
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def output_from_json(body: Mapping[str, Any]) -> ForwardBackwardOutput:
    """Raises KeyError or ValueError on JSON that isn't a ForwardBackwardOutput."""
    outputs = [
        {name: _tensor_from_json(tensor) for name, tensor in output.items()}
        for output in body["loss_fn_outputs"]
    ]
    metrics = {name: float(value) for name, value in (body.get("metrics") or {}).items()}
    return ForwardBackwardOutput(outputs, metrics, body.get("loss_fn_output_type") or "")


def sample_from_json(body: Mapping[str, Any]) -> SampleResult:
    """Raises KeyError or ValueError on JSON that isn't a SampleResponse."""
    sequences = [
        SampledSequence(
            tokens=[int(token) for token in sequence["tokens"]],
            logprobs=sequence.get("logprobs"),
            stop_reason=_stop_reason(sequence.get("stop_reason", "stop")),
        )
        for sequence in body["sequences"]
    ]
    return SampleResult(sequences, body.get("prompt_logprobs"))


def sample_to_json(result: SampleResult) -> dict[str, Any]:
    """Likeliest tokens are lists of (id, log-prob), None where there are none."""
    sequences = [
        {
            "tokens": list(one.tokens),
            "logprobs": None if one.logprobs is None else list(one.logprobs),
            "stop_reason": one.stop_reason,
            **({} if one.top is None else {"topk_logprobs": top_to_json(one.top)}),
        }
        for one in result.sequences
    ]
    body: dict[str, Any] = {
        "type": "sample",
        "sequences": sequences,
        "prompt_logprobs": result.prompt_logprobs,
    }
    if result.prompt_top is not None:
        body["topk_prompt_logprobs"] = top_to_json(result.prompt_top)
    if result.targets is not None:
        body["target_prompt_logprobs"] = tensor_to_json(result.targets)
    return body


def top_to_json(top: TopTokens) -> list[list[tuple[int, float]] | None]:
    rows = (zip(*row, strict=True) for row in zip(top.ids, top.logprobs, strict=True))
    found = ([(token, logprob) for token, logprob in row if logprob != EMPTY] for row in rows)
    return [row or None for row in found]


def tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    body = {"data": list(tensor.data), "dtype": tensor.dtype, "shape": list(tensor.dimensions)}
    if tensor.sparse is not None:
        starts, columns = map(list, tensor.sparse)
        body |= {"sparse_crow_indices": starts, "sparse_col_indices": columns}
    return body


def _tensor_from_json(body: Mapping[str, Any]) -> Tensor:
    if body.get("sparse_crow_indices") is not None:
        raise ValueError("a tensor is sparse: send it dense")
    shape = body.get("shape")
    dtype = body["dtype"]
    if dtype not in get_args(Dtype):
        raise ValueError(f"tensor type: got {dtype!r}, expected int64 or float32")
    return Tensor(list(body["data"]), dtype, None if shape is None else tuple(shape))


def _stop_reason(name: str) -> StopReason:
    if name not in get_args(StopReason):
        raise ValueError(f"stop reason: got {name!r}, expected stop or length")
    return cast(StopReason, name)
