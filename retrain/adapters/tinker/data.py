"""A batch on its way: checked before it is sent, and the results of its requests merged."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from retrain.wire.tinker.values import Datum, ForwardBackwardOutput, Tensor

FLOAT32_MAX = 3.4028234663852886e38


def check_data(data: Sequence[Datum]) -> None:
    """Raises ValueError on data that can't be sent: a service may train on what it can't read."""
    if not data:
        raise ValueError("the batch is empty, expected at least one datum")
    for number, datum in enumerate(data):
        count = len(datum.tokens)
        if not count or not all(0 <= token < 2**31 for token in datum.tokens):
            raise ValueError(f"datum {number}: expected tokens, each an integer from 0 to 2^31 - 1")
        for name, tensor in datum.inputs.items():
            if problem := _problem(tensor, count):
                raise ValueError(f"datum {number}: {name} {problem}")


def _problem(tensor: Tensor, count: int) -> str:
    """Why a tensor can't be an input of `count` tokens; empty if it can."""
    if len(tensor.data) != math.prod(tensor.dimensions) or tensor.dimensions[0] != count:
        return (
            f"has {len(tensor.data)} values of the shape {tensor.dimensions}, expected {count} "
            "along the first dimension"
        )
    if tensor.dtype == "float32" and not all(abs(value) <= FLOAT32_MAX for value in tensor.data):
        return "contains a value that is not a finite float32"
    return ""


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
        for name in parts[0].metrics
        if all(name in part.metrics for part in parts)
    }
    outputs = [output for part in parts for output in part.outputs]
    return ForwardBackwardOutput(outputs, metrics, parts[0].kind)


def _reduced(name: str, weighted: Sequence[tuple[float, int]]) -> float:
    values = [value for value, _ in weighted]
    match name.rpartition(":")[2]:
        case "sum":
            return math.fsum(values)
        case "min":
            return min(values)
        case "max":
            return max(values)
    return fmean(values, [count for _, count in weighted])
