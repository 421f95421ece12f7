"""Errors, counted by kind."""

from __future__ import annotations

from collections import Counter

from retrain.errors import alike

MAX_KINDS = 64
OTHERS = "other errors"
MAX_TEXT = 300


class Causes(Counter[str]):
    """The first line of the first error of each kind, with the number of errors of the kind."""

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, str] = {}

    def add(self, error: str) -> str | None:
        """Count an error; returns its text if it is the first of its kind."""
        text = error.partition("\n")[0][:MAX_TEXT]
        kind = alike(text)
        known = self._texts.get(kind)
        if known is None and len(self._texts) >= MAX_KINDS:
            self[OTHERS] += 1
            return None
        self[self._texts.setdefault(kind, text)] += 1
        return text if known is None else None
