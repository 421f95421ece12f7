"""Rows in the config itself."""

from __future__ import annotations

from typing import Any

from retrain.prompts.sequences import SequencePrompts


class ListPrompts(SequencePrompts):
    """Rows in the config itself: `{type: list, rows: [...]}`.

    Args:
        rows: Strings, or mappings with `prompt` or `messages`, `answer` and any other columns.
    """

    def __init__(self, rows: list[Any]) -> None:
        super().__init__(rows, "the list")
