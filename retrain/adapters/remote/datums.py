"""Samples in the form that remote services take: shifted by one, so position t predicts target t.

`shift` is the only place that aligns tokens and targets, for every loss and both services. For a
sample of T tokens every stream of the datum has T - 1 values:

    inputs[t]  = token_ids[t]          the context that predicts
    targets[t] = token_ids[t + 1]      what is predicted
    logprobs[t], advantages[t], mask[t] and each further stream belong to targets[t]

The first token of a sample has no context and is never a target.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from retrain.errors import NonFiniteError
from retrain.types import Sample

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Shifted:
    """One shifted training sequence; every stream has length T - 1."""

    inputs: Sequence[int]
    targets: Sequence[int]
    mask: Sequence[float]
    """1.0 where the target was sampled by the model, else 0.0."""
    logprobs: Sequence[float]
    """The sampler's log-prob of each target; 0.0 where the mask is 0."""
    advantages: Sequence[float]
    """Credit of each target; 0.0 where the mask is 0."""
    streams: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The sample's further streams, such as `reference_logprobs`."""
    run_id: str = ""
    """The rollout, of which other datums may hold further parts."""


class Average(NamedTuple):
    """What a server divides each row's loss by: a size of the row, times one of all rows of its
    request or step."""

    row: str = ""
    """`tokens`, `trained` (those with mask 1), or nothing."""
    rows: str = ""
    """`rows`, `tokens`, `trained`, or nothing."""
    of: str = "step"

    def undone(self, requests: Sequence[Sequence[Shifted]], unit: float = 1.0) -> list[Shifted]:
        """The rows, with advantages multiplied by what the service divides by, in units."""
        totals = [sum(_size(row, self.rows) for row in part) for part in requests]
        pools = [sum(totals)] * len(totals) if self.of == "step" else totals
        made = []
        for part, pool in zip(requests, pools, strict=True):
            for row in part:
                by = _size(row, self.row) * (pool if self.rows else 1.0) / unit
                made.append(replace(row, advantages=[a * by for a in row.advantages]))
        return made


SUM = Average()
"""The protocols' own: no division."""


def shift(sample: Sample) -> Shifted:
    """The datum of one sample.

    Values become 0.0 where the mask is 0, so that a service without a mask trains the same tokens.
    Raises NonFiniteError when a value with mask 1 is NaN or infinite.
    """
    mask = [1.0 if kept else 0.0 for kept in sample.loss_mask[1:]]
    return Shifted(
        inputs=list(sample.token_ids[:-1]),
        targets=list(sample.token_ids[1:]),
        mask=mask,
        logprobs=_masked(sample, "logprobs", mask),
        advantages=_masked(sample, "advantages", mask),
        streams={name: list(stream[1:]) for name, stream in sample.streams.items()},
        run_id=sample.run_id,
    )


def chunks(
    items: Sequence[T], size: Callable[[T], int], most: int, count: int = sys.maxsize
) -> list[list[T]]:
    """Consecutive parts of at most `count` items and the total size `most`.

    An item larger than `most` is a part by itself.
    """
    parts: list[list[T]] = []
    total = 0
    for item in items:
        total += size(item)
        if not parts or len(parts[-1]) >= count or total > most:
            parts.append([])
            total = size(item)
        parts[-1].append(item)
    return parts


def _size(row: Shifted, of: str) -> float:
    return {"tokens": len(row.targets), "trained": sum(row.mask)}.get(of, 1.0)


def _masked(sample: Sample, name: str, mask: Sequence[float]) -> list[float]:
    values = getattr(sample, name)[1:]
    masked = [float(value) if kept else 0.0 for value, kept in zip(values, mask, strict=True)]
    if not all(map(math.isfinite, masked)):
        raise NonFiniteError(
            f"the {name} of a sample of group {sample.group_id!r} are NaN or infinite. Check its "
            "reward and the sampler's log-probs."
        )
    return masked
