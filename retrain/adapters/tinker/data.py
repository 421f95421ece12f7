"""The results of the requests of one batch, merged into one."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrain.protocols.tinker.values import ForwardBackwardOutput


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
