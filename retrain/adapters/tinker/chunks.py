"""A batch in requests of the size that the service advertises, and their results as one again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from retrain.protocols.tinker.values import Datum, ForwardBackwardOutput


def split(data: Sequence[Datum], *, most_datums: int, most_bytes: int) -> list[list[Datum]]:
    """Consecutive chunks within both limits; a datum larger than `most_bytes` goes alone."""
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
    """The result that one request would have had: outputs in order, metrics by their reduction.

    A metric is named `name:reduction`; means are weighted by datums. One that not every part has
    can't be reduced and is left out; one of an unknown reduction, or of none, keeps its last value.
    """
    if len(parts) == 1:
        return parts[0]
    outputs = [output for part in parts for output in part.outputs]
    weights = [len(part.outputs) for part in parts]
    metrics: dict[str, float] = {}
    for name in parts[0].metrics if parts else ():
        if all(name in part.metrics for part in parts):
            metrics |= _reduced(name, [part.metrics[name] for part in parts], weights)
    return ForwardBackwardOutput(outputs, metrics, parts[0].kind if parts else "")


def _reduced(name: str, values: list[float], weights: list[int]) -> dict[str, float]:
    reduction = name.rpartition(":")[2]
    if reduction == "unique":  # can't fold: each value keeps its own name
        return {name: values[0]} | {f"{name}_{i}": v for i, v in enumerate(values[1:], start=1)}
    reduce = _REDUCTIONS.get(reduction)
    return {name: reduce(values, weights) if reduce else values[-1]}


def _mean(values: list[float], weights: list[int]) -> float:
    total = sum(weights)
    if not total:
        return math.fsum(values) / len(values)
    return math.fsum(v * w for v, w in zip(values, weights, strict=True)) / total


_REDUCTIONS: Mapping[str, Callable[[list[float], list[int]], float]] = {
    "mean": _mean,
    "sum": lambda values, _: math.fsum(values),
    "min": lambda values, _: min(values),
    "max": lambda values, _: max(values),
    "slack": lambda values, weights: max(values) - _mean(values, weights),
    "hash2": lambda values, _: float(sum(int(v) % 2**64 for v in values) % 2**64),
}
