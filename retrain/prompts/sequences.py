"""Rows in memory, or of a sequence that makes them on demand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain.errors import PromptError, shown
from retrain.prompts.base import PromptSource

MOST = 5_000_000
"""Rows of an iterator that are read into memory: more, and it may have no end."""


class SequencePrompts(PromptSource):
    """The items of a sequence. All of a list or a tuple are checked at the start."""

    def __init__(self, rows: Sequence[Any], name: str) -> None:
        self._rows, self.name = rows, name
        self.read_at_start = isinstance(rows, list | tuple)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Any:  # checked by the caller
        return self._rows[index]


class IteratedPrompts(SequencePrompts):
    """What an iterator yields: read once, as far as it is needed, and kept in memory."""

    def __init__(self, rows: Iterator[Any], name: str) -> None:
        self._read: list[Any] = []
        super().__init__(self._read, name)
        self._iterator = rows

    def rows(self) -> Iterator[Any]:
        yield from self._read
        for row in self._iterator:
            if len(self._read) == MOST:
                raise PromptError(
                    f"{self.name} yields more than {MOST:,} rows, perhaps without an end; set "
                    "`limit` to the number of rows to use"
                )
            self._read.append(row)
            yield row


def source_of(rows: Any, name: str) -> PromptSource:
    """The source of what a user's function returned. Raises PromptError if that is no rows."""
    if isinstance(rows, PromptSource):
        return rows
    if not isinstance(rows, str | bytes | Mapping):
        if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
            return SequencePrompts(rows, name)
        if hasattr(rows, "__iter__"):
            return IteratedPrompts(iter(rows), name)
    raise PromptError(f"{name} returned {shown(rows)}, expected rows")
