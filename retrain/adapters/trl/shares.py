"""What each rank trains of a batch: its share of every micro-batch.

A micro-batch is cut for all ranks together, and dealt out unit by unit (a sample, a pair, a
rollout). All ranks then do as many passes, in which they meet. Where TRL computes the loss, it
gathers numbers per row, so all ranks also need as many rows: missing ones are filled up with void
rows, copies that train no token. Otherwise a rank without a unit passes a copy of another's, whose
loss is multiplied by 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from retrain.adapters.trl.rows import units
from retrain.types import Batch, Sample


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's share of a micro-batch."""

    samples: Sequence[Sample]
    void: int = 0
    """How many of the samples, the last ones, are copies that train no token."""
    idle: bool = False
    """All of them are copies, whose loss counts as 0."""


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank trains in a step."""

    batch: Batch
    """Its denominators are the whole batch's, its samples the whole batch's or this rank's."""
    parts: Sequence[Part]

    def alone(self) -> Share:
        """The share without the samples of other ranks, to be sent to its rank."""
        own = [sample for part in self.parts for sample in part.samples]
        return Share(replace(self.batch, samples=own), self.parts)


def divide(
    batch: Batch,
    micro_batches: Sequence[Sequence[Sample]],
    size: int,
    *,
    paired: bool = False,
    rollouts: bool = False,
    even: bool = False,
) -> list[Share]:
    """The share of each of `size` ranks, by rank.

    `paired` and `rollouts` say what stays on one rank, as for `rows.micro_batches`; with `even` all
    ranks get as many rows of a micro-batch.
    """
    if size == 1:
        return [Share(batch, [Part(samples) for samples in micro_batches])]
    by_micro_batch = [_deal(samples, size, paired, rollouts, even) for samples in micro_batches]
    return [Share(batch, parts) for parts in zip(*by_micro_batch, strict=True)]


def _deal(
    samples: Sequence[Sample], size: int, paired: bool, rollouts: bool, even: bool
) -> list[Part]:
    whole = list(units(samples, paired, rollouts))
    dealt = [[row for unit in whole[rank::size] for row in unit] for rank in range(size)]
    if even:
        rows = max(map(len, dealt))
        filled = [[*mine, *[samples[0]] * (rows - len(mine))] for mine in dealt]
        return [
            Part(rows_, void=rows - len(mine)) for rows_, mine in zip(filled, dealt, strict=True)
        ]
    return [Part(mine) if mine else Part(whole[0], idle=True) for mine in dealt]
