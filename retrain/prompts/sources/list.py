"""Rows in the config itself."""

from __future__ import annotations

from typing import Any

from retrain.prompts.base import PromptSource, parse_rows
from retrain.types import Row


class ListPrompts(PromptSource):
    """Rows in the config itself: `{type: list, rows: [...]}`.

    Args:
        rows: Strings, or mappings with `prompt` or `messages`, `answer` and any other columns.
        prompt_column: The column of the prompt, if it is not `prompt` or `messages`.
        answer_column: The column of the answer, if it is not `answer`.
        system: A system message to put before every prompt.
        limit: Use only the first rows, at most this many.

    Raises PromptError for the first invalid row.
    """

    def __init__(
        self,
        rows: list[Any],
        prompt_column: str | None = None,
        answer_column: str | None = None,
        system: str | None = None,
        limit: int | None = None,
    ) -> None:
        numbered = [(f"row {index}", row) for index, row in enumerate(rows)]
        self._rows = parse_rows(numbered, "the list", prompt_column, answer_column, system, limit)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._rows[index]

    def checked_row(self, index: int) -> Row:
        return self._rows[index]  # they were checked when they were read
