"""The keys that every source has: which rows are used, and what is made of them.

All rows of most sources are read once, at the start: bad ones are errors, empty ones are skipped,
and equal ones are counted. What is kept is the index of each row, not the row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import compress, pairwise
from pathlib import Path
from typing import NoReturn

from retrain.config import PromptsConfig
from retrain.errors import ConfigError, PromptError, blame
from retrain.prompts.base import EmptyPromptError, PromptSource, Raw, RowShape
from retrain.types import Message, Row

NAMED = 5
"""How many rows a warning names."""
TRIED = 200
"""Rows that are tokenised, the longest ones."""
_SCALE = 2**64
NOTHING = PromptsConfig(type="given")
SHAPING = ("filter", "map", "system", "prompt_column", "answer_column")
"""The keys that choose or change rows."""


class PreparedPrompts(PromptSource):
    """Some rows of a source, changed."""

    def __init__(
        self,
        source: PromptSource,
        shape: RowShape,
        kept: Sequence[int],
        sizes: Sequence[int] = (),
    ) -> None:
        self._source, self._shape, self._kept, self.sizes = source, shape, kept, sizes
        self.name, self.opened = source.name, source.opened
        self.read_at_start = source.read_at_start

    def __len__(self) -> int:
        return len(self._kept)

    def row(self, index: int) -> Row:
        shape = self._shape
        return shape.row(shape.changed(self._source.row(self._kept[index])))

    def checked_row(self, index: int) -> Row:
        try:
            return self.row(index)
        except Exception as error:  # noqa: BLE001 - of a filter or map, raised with the row's place
            _raise(self.place(index), error)

    def location(self, index: int) -> str:
        return self._source.location(self._kept[index])

    def place(self, index: int) -> str:
        return self._source.place(self._kept[index])


def prepared(
    source: PromptSource, keys: PromptsConfig = NOTHING, base_dir: Path = Path(), where: str = ""
) -> PromptSource:
    """The source with its keys applied; of a mixture, to each of its sources.

    Raises PromptError for the first invalid row, and if no row is left.
    """
    where = where or "prompts"
    return source.each(partial(_prepared, keys=keys, base_dir=base_dir, where=where))


def _prepared(
    source: PromptSource, keys: PromptsConfig, base_dir: Path, where: str
) -> PromptSource:
    shape, changed = RowShape(), any(getattr(keys, name) is not None for name in SHAPING)
    if source.opened or changed:
        from retrain.prompts.shaping import ShapedBy

        shape = ShapedBy(keys, base_dir, where, source.opened)
    if isinstance(source, PreparedPrompts) and keys.model_fields_set <= {"type"}:
        return source
    if source.read_at_start or keys.filter is not None or keys.held_out is not None:
        return _read(source, shape, keys)
    _count(len(source), source)
    if not changed and keys.limit is None:
        return source
    made = PreparedPrompts(source, shape, range(min(len(source), keys.limit or len(source))))
    made.warnings, made.held_out = source.warnings, source.held_out
    return made


@dataclass
class _Reading:
    """What is found in the rows."""

    kept: array[int] = field(default_factory=lambda: array("Q"))
    sizes: array[int] = field(default_factory=lambda: array("Q"))
    hashes: array[int] = field(default_factory=lambda: array("q"))
    sides: array[int] = field(default_factory=lambda: array("Q"))
    """Where between 0 and 2**64 - 1 each row lies; the lowest ones are held out."""
    empty: array[int] = field(default_factory=lambda: array("Q"))
    why: str = ""
    """Why the first empty row is empty."""


def _read(source: PromptSource, shape: RowShape, keys: PromptsConfig) -> PromptSource:
    found, total = _Reading(), 0
    for index, raw in enumerate(source.rows()):
        total += 1
        try:
            if not shape.keeps(raw):
                continue
            changed = shape.changed(raw)
            size = quick_size(changed) if shape.plain else 0
            row = None if size else shape.row(changed)
            if row is not None:
                size = size_of(row)
        except EmptyPromptError as error:
            found.why = found.why or f"{source.place(index)}: {error}"
            found.empty.append(index)
            continue
        except Exception as error:  # noqa: BLE001 - of a filter or map, raised with the row's place
            _raise(source.place(index), error)
        found.kept.append(index)
        found.sizes.append(size)
        # Tasks without a row of their own differ by their seed.
        found.hashes.append(index if changed == Row(()) else _hash(changed))
        if keys.held_out is not None:
            found.sides.append(_side(row or shape.row(changed), index))
        if len(found.kept) == keys.limit:
            break
    _count(total, source)
    return _split(source, shape, keys, found, total)


def _split(
    source: PromptSource, shape: RowShape, keys: PromptsConfig, found: _Reading, total: int
) -> PromptSource:
    if not found.kept:
        name = source.name or type(source).__name__
        seen = shape.filtered_values(source.rows())
        raise PromptError(found.why or f"{name}: filter keeps none of its {total} rows{seen}")

    made = PreparedPrompts(source, shape, found.kept, found.sizes)
    made.held_out = source.held_out
    if keys.held_out is not None:
        limit = max(int(keys.held_out * _SCALE), min(found.sides) + 1)

        def part(held: bool) -> PreparedPrompts:
            chosen = [(side < limit) is held for side in found.sides]
            columns = (array("Q", compress(rows, chosen)) for rows in (found.kept, found.sizes))
            return PreparedPrompts(source, shape, *columns)

        made = part(False)
        made.held_out = part(True)
        if not len(made):
            raise PromptError(
                f"held_out: {keys.held_out:g} of {len(found.kept)} rows leaves none to train on; "
                "use a smaller fraction, or more rows"
            )
    made.warnings = source.warnings
    if not isinstance(source, PreparedPrompts):  # else they are known
        made.warnings = [*source.warnings, *_warnings(source, found, total)]
    return made


def _warnings(source: PromptSource, found: _Reading, total: int) -> Iterator[str]:
    if found.empty:
        yield (
            f"skipped {len(found.empty)} of {total} rows, whose prompt is empty: "
            f"{named(source, found.empty)}"
        )
    if again := repeated(found.hashes):
        rows = [found.kept[index] for index in again]
        yield (
            f"{len(rows)} of {len(found.kept)} rows repeat an earlier row, which is thus used more "
            f"often than others: {named(source, rows)}"
        )


def repeated(hashes: array[int]) -> list[int]:
    """The indices of the values that occur earlier too."""
    in_order = sorted(hashes)
    twice = {a for a, b in pairwise(in_order) if a == b}
    again: list[int] = []
    if twice:
        seen: set[int] = set()
        for index, value in enumerate(hashes):
            if value in twice:
                if value in seen:
                    again.append(index)
                seen.add(value)
    return again


def named(source: PromptSource, rows: Sequence[int]) -> str:
    """The places of the first of these rows."""
    first = ", ".join(source.location(row) for row in rows[:NAMED])
    more = f" and {len(rows) - NAMED} more" if len(rows) > NAMED else ""
    return f"{source.name}, {first}{more}" if source.name else f"{first}{more}"


def long_prompts(
    source: PromptSource, tokens: Callable[[Sequence[Message]], int], limit: int
) -> str:
    """A sentence about the rows of more than `limit` tokens; empty if there are none.

    A token has at least one byte, so a row with fewer bytes than `limit`, less those of the chat
    template, is not tokenised.
    """
    sizes = source.sizes
    if not sizes or limit < 1:
        return ""
    template = tokens(source.checked_row(0).messages)  # at most
    suspects = [row for row, size in enumerate(sizes) if size + template > limit]
    suspects.sort(key=sizes.__getitem__, reverse=True)
    tried = suspects[:TRIED]
    found = sorted(row for row in tried if tokens(source.checked_row(row).messages) > limit)
    if not found:
        return ""
    least = "at least " if len(tried) < len(suspects) else ""
    return (
        f"{least}{len(found)} of {len(sizes)} prompts have more than {limit} tokens: "
        f"{named(source, found)}"
    )


def _count(total: int, source: PromptSource) -> None:
    if not total:
        name = source.name or type(source).__name__
        raise PromptError(f"{name} is empty, expected at least one prompt")


def quick_size(raw: Raw) -> int:
    """The bytes of the prompt of a row that is obviously valid; 0 for all others."""
    text = raw
    if type(raw) is dict:
        if raw.get("messages") is not None:
            return 0
        text = raw.get("prompt")
    if type(text) is not str or text.isspace():
        return 0
    return len(text) if text.isascii() else len(text.encode(errors="replace"))


def size_of(row: Row) -> int:
    """The bytes of the messages of a row."""
    texts = [message["content"] for message in row.messages]
    return sum(len(t) if t.isascii() else len(t.encode(errors="replace")) for t in texts)


def _hash(raw: Raw) -> int:
    """Of all columns; only valid in this process."""
    try:
        return hash(tuple(raw.items()) if type(raw) is dict else raw)
    except TypeError:  # a list of messages, for example
        return hash(repr(raw))


def _side(row: Row, index: int) -> int:
    """A number by the prompt only: equal prompts are on the same side, whatever their place."""
    parts: object = [(message["role"], message["content"]) for message in row.messages]
    if not parts:
        parts = (row.answer, sorted(row.metadata.items())) if row.metadata else (row.answer, index)
    digest = hashlib.blake2b(repr(parts).encode(errors="replace"), digest_size=8)
    return int.from_bytes(digest.digest(), "big")


def _raise(place: str, error: Exception) -> NoReturn:
    """Raise what a row raised as a PromptError that names its place."""
    if isinstance(error, ConfigError):
        raise error
    if type(error) is ValueError or isinstance(error, EmptyPromptError):
        raise PromptError(f"{place}: {error}") from None
    raise PromptError(str(blame(f"{place}: filter or map", error))) from error
