"""Sequences of similar lengths in one batch, so that little is padded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence


def of_like_length(lengths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Indices of sequences in batches of at most `limit` tokens, padding included.

    The shortest come first. A sequence longer than `limit` is a batch of its own.
    """
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lengths.__getitem__):
        if batch and (len(batch) + 1) * lengths[index] > limit:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
