"""Samples as a few numpy arrays, which cost a fraction of pickled objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.types import Sample

_OWN: Mapping[str, Any] = {  # numpy types
    "token_ids": np.int32,
    "loss_mask": np.int8,
    "logprobs": np.float32,
    "advantages": np.float32,
    "versions": np.int32,
}


@dataclass(frozen=True, slots=True)
class Packed:
    """The samples' values one after the other, with N tokens in all."""

    lengths: NDArray[Any]
    """(samples,)."""
    own: Mapping[str, NDArray[Any]]
    """The fields of a Sample that have a value per token, (N,) each."""
    streams: Mapping[str, tuple[NDArray[Any], NDArray[Any]]]
    """Further streams: the numbers of the samples that have it, and their values."""
    groups: Sequence[str]
    runs: Sequence[str]


def pack(samples: Sequence[Sample]) -> Packed:
    """Floats become float32, the type in which a loss reads them."""
    names = dict.fromkeys(name for sample in samples for name in sample.streams)
    return Packed(
        np.array([len(sample.token_ids) for sample in samples], np.int64),
        {
            name: _flat([getattr(sample, name) for sample in samples], kind)
            for name, kind in _OWN.items()
        },
        {name: _stream(samples, name) for name in names},
        [sample.group_id for sample in samples],
        [sample.run_id for sample in samples],
    )


def unpack(packed: Packed) -> list[Sample]:
    """The samples of `pack`, in their order."""
    own = {name: _cut(values, packed.lengths) for name, values in packed.own.items()}
    streams: list[dict[str, list[float]]] = [{} for _ in packed.groups]
    for name, (numbers, values) in packed.streams.items():
        parts = _cut(values, packed.lengths[numbers])
        for number, part in zip(numbers.tolist(), parts, strict=True):
            streams[number][name] = part
    return [
        Sample(
            **{name: parts[number] for name, parts in own.items()},
            streams=streams[number],
            group_id=packed.groups[number],
            run_id=packed.runs[number],
        )
        for number in range(len(packed.groups))
    ]


def _stream(samples: Sequence[Sample], name: str) -> tuple[NDArray[Any], NDArray[Any]]:
    numbers = [number for number, sample in enumerate(samples) if name in sample.streams]
    values = _flat([samples[number].streams[name] for number in numbers], np.float32)
    return np.array(numbers, np.int64), values


def _flat(rows: Sequence[Sequence[float]], kind: Any) -> NDArray[Any]:
    return np.fromiter(chain.from_iterable(rows), kind, sum(map(len, rows)))


def _cut(values: NDArray[Any], lengths: NDArray[Any]) -> list[list[Any]]:
    ends = np.cumsum(lengths).tolist()
    return [
        values[end - length : end].tolist()
        for end, length in zip(ends, lengths.tolist(), strict=True)
    ]
