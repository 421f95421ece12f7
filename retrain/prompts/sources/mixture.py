"""Several sources in fixed proportions."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, chain, islice, pairwise, zip_longest
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from retrain.config import PromptsConfig
from retrain.config.problems import problems_of
from retrain.config.reading import prompts_section
from retrain.errors import PluginError, PromptError
from retrain.prompts.base import MIXTURE, Origin, PromptSource, numbers
from retrain.prompts.building import built
from retrain.prompts.files import place_in
from retrain.types import Row


class _Part(PromptsConfig):
    weight: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    name: str | None = None


class MixturePrompts(PromptSource):
    """Several sources in fixed proportions: `{type: mixture, sources: [{weight: 2, type: file,
    path: ...}, ...]}`.

    The proportions hold at every point of an epoch, to within one prompt. An epoch ends when one
    source is used up; the others continue in the next epoch where they stopped.

    Args:
        sources: Sections like `prompts`, each with a `weight` (default 1) and a `name` (by default
            its path or type), which is the column `mixture` in the metadata of its rows.
    """

    def __init__(self, sources: list[Any], origin: Origin) -> None:
        parts = [
            _section(part, f"{origin.where}.sources.{index}") for index, part in enumerate(sources)
        ]
        if not parts:
            raise PromptError("sources is empty, expected at least one source")
        self._take(
            [
                built(part, replace(origin, where=f"{origin.where}.sources.{index}"))
                for index, part in enumerate(parts)
            ],
            [part.weight for part in parts],
            _names(parts),
        )

    def _take(
        self, parts: Sequence[PromptSource], weights: Sequence[float], names: Sequence[str]
    ) -> None:
        self._parts, self._weights, self.mixed = parts, weights, names
        self._starts = [0, *accumulate(map(len, parts))]
        self.opened = any(part.opened for part in parts)
        self.sizes = array("Q", chain.from_iterable(part.sizes for part in parts))
        if len(self.sizes) < len(self):
            self.sizes = ()
        self.read_at_start = all(part.read_at_start for part in parts)
        self.warnings = [f"{n}: {w}" for n, p in zip(names, parts, strict=True) for w in p.warnings]
        held = zip((part.held_out for part in parts), weights, names, strict=True)
        rest = [part for part in held if part[0] is not None]
        self.held_out = self._of(*zip(*rest, strict=True)) if rest else None
        self._shares = _shares([len(part) for part in parts], weights)

    def _of(
        self, parts: Sequence[PromptSource], weights: Sequence[float], names: Sequence[str]
    ) -> MixturePrompts:
        made = MixturePrompts.__new__(MixturePrompts)
        made._take(parts, weights, names)
        return made

    def each(self, change: Callable[[PromptSource], PromptSource]) -> PromptSource:
        return self._of([part.each(change) for part in self._parts], self._weights, self.mixed)

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def epoch_length(self) -> int:
        return sum(self._shares)

    def row(self, index: int) -> Row:
        number, within = place_in(self._starts, index)
        row = self._parts[number].checked_row(within)
        return row._replace(metadata={**row.metadata, MIXTURE: self.mixed[number]})

    def checked_row(self, index: int) -> Row:
        return self.row(index)

    def first_rows(self, count: int) -> Sequence[int]:
        """The first row of each source, then the second of each, and so on."""
        sources = [range(*ends)[:count] for ends in pairwise(self._starts)]
        rounds = chain.from_iterable(zip_longest(*sources))
        return list(islice((row for row in rounds if row is not None), max(count, len(sources))))

    def location(self, index: int) -> str:
        number, within = place_in(self._starts, index)
        return f"{self.mixed[number]}, {self._parts[number].location(within)}"

    def place(self, index: int) -> str:
        number, within = place_in(self._starts, index)
        return self._parts[number].place(within)

    def order(self, epoch: int, seed: int, shuffle: bool) -> Sequence[int]:
        rows = [
            self._used(number, epoch, f"{seed}:{number}" if shuffle else None)
            for number in range(len(self._parts))
        ]
        return array("Q", (next(rows[number]) for number in _turns(self._shares, self._weights)))

    def _used(self, number: int, epoch: int, seed: str | None) -> Iterator[int]:
        """The rows of a source in an epoch: where the epoch before stopped, around and around."""
        length, share, start = len(self._parts[number]), self._shares[number], self._starts[number]
        order = numbers(start, start + length)
        if seed is not None:
            random.Random(seed).shuffle(order)
        first = epoch * share % length
        used = (order[first:] + order[:first])[:share]
        if seed is not None:
            random.Random(f"{seed}:{epoch}").shuffle(used)
        return iter(used)


def _section(part: Any, where: str) -> _Part:
    section = prompts_section(part)
    try:
        made = _Part.model_validate(section)
    except ValidationError as error:
        raise PluginError(*problems_of(error, _Part, prefix=where)) from None
    if made.type in ("mixture", "held_out"):
        raise PluginError(f"{where}.type: got {made.type}, which can't be part of a mixture")
    return made


def _names(parts: Sequence[_Part]) -> list[str]:
    """A name for each part: its own, or the stem of its path, or its type."""
    found: list[str] = []
    for part in parts:
        path = part.arguments.get("path")
        name = part.name or (Path(path).stem if isinstance(path, str) else part.type)
        found.append(name if name not in found else f"{name} {len(found)}")
    return found


def _turns(shares: Sequence[int], weights: Sequence[float]) -> Iterator[int]:
    """Which source is next, `sum(shares)` times: the one that is furthest behind its weight."""
    total, used = sum(weights), [0] * len(shares)
    for place in range(1, sum(shares) + 1):
        open_ones = [n for n, share in enumerate(shares) if used[n] < share]
        behind = max(open_ones, key=lambda n: (weights[n] / total * place - used[n], -n))
        used[behind] += 1
        yield behind


def _shares(lengths: Sequence[int], weights: Sequence[float]) -> list[int]:
    """Rows of each source in an epoch: by weight, as many as the source that ends first has."""
    per_weight = min(length / weight for length, weight in zip(lengths, weights, strict=True))
    exact = [per_weight * weight for weight in weights]
    return [max(1, min(length, round(share))) for length, share in zip(lengths, exact, strict=True)]
