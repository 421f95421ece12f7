"""The data of one batch: checked, split into requests, and the results merged again.

What the service would reject, or would compute wrongly without an error, is rejected here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from retrain.protocols.tinker.values import Datum, ForwardBackwardOutput, Tensor

_RATIO = ("target_tokens", "logprobs", "advantages")
LOSS_INPUTS: Mapping[str, Sequence[str]] = MappingProxyType(
    {
        "cross_entropy": ("target_tokens", "weights"),
        "importance_sampling": _RATIO,
        "ppo": _RATIO,
        "cispo": _RATIO,
        "dro": _RATIO,
    }
)
"""The inputs of each known loss; the service checks those of other losses."""

FLOAT32_MAX = 3.4028234663852886e38
MAX_TOKEN = 2**31 - 1


def check_data(data: Sequence[Datum], loss: str) -> None:
    """Raise ValueError on a datum whose lengths, numbers or inputs are wrong for `loss`."""
    if not data:
        raise ValueError("the batch is empty, expected at least one datum")
    for index, datum in enumerate(data):
        problem = _problem(datum, LOSS_INPUTS.get(loss))
        if problem:
            raise ValueError(f"datum {index} of the batch: {problem}")


def split(data: Sequence[Datum], *, most_datums: int, most_bytes: int) -> list[list[Datum]]:
    """Consecutive chunks within both limits; a datum larger than `most_bytes` gets its own."""
    chunks: list[list[Datum]] = []
    size = 0
    for datum in data:
        full = chunks and (len(chunks[-1]) >= most_datums or size + datum.size > most_bytes)
        if not chunks or full:
            chunks.append([])
            size = 0
        chunks[-1].append(datum)
        size += datum.size
    return chunks


def merge(parts: Sequence[ForwardBackwardOutput]) -> ForwardBackwardOutput:
    """The result that a single request would have given.

    Outputs keep their order. Metrics are named `name:reduction`: `sum`, `min` and `max` are
    reduced accordingly, all others are averaged over the datums. A metric that some part lacks is
    dropped.
    """
    if len(parts) == 1:
        return parts[0]
    metrics = {
        name: _reduced(name, [(part.metrics[name], len(part.outputs)) for part in parts])
        for name in (parts[0].metrics if parts else ())
        if all(name in part.metrics for part in parts)
    }
    outputs = [output for part in parts for output in part.outputs]
    return ForwardBackwardOutput(outputs, metrics, parts[0].kind if parts else "")


def _reduced(name: str, weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    reduction = name.rpartition(":")[2]
    if reduction == "sum":
        return math.fsum(values)
    if reduction in ("min", "max"):
        return min(values) if reduction == "min" else max(values)
    total = sum(max(count, 1) for _, count in weighted)
    return math.fsum(value * max(count, 1) for value, count in weighted) / total


def _problem(datum: Datum, expected: Sequence[str] | None) -> str:
    if not datum.tokens:
        return "it has no tokens"
    if not all(0 <= token <= MAX_TOKEN for token in datum.tokens):
        return "a token id is negative or not an int32"
    if expected is not None and set(datum.inputs) != set(expected):
        got, wanted = sorted(datum.inputs), sorted(expected)
        return f"got the loss inputs {got}, expected {wanted}"
    for name, tensor in datum.inputs.items():
        problem = _tensor_problem(tensor, len(datum.tokens))
        if problem:
            return f"{name}: {problem}"
    return ""


def _tensor_problem(tensor: Tensor, length: int) -> str:
    if math.prod(tensor.dimensions) != len(tensor.data):
        return f"got {len(tensor.data)} numbers for the shape {list(tensor.dimensions)}"
    if tensor.dimensions[0] != length:
        return f"got {tensor.dimensions[0]} values for {length} tokens, expected one per token"
    if tensor.dtype == "int64":
        whole = all(isinstance(value, int) for value in tensor.data)
        return "" if whole else "an int64 tensor holds a number that is not an integer"
    if not all(-FLOAT32_MAX <= value <= FLOAT32_MAX for value in tensor.data):  # NaN fails as well
        return "a number is NaN, infinite or not a float32"
    return ""
