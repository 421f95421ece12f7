"""Errors, counted by kind."""

from __future__ import annotations

import re
from collections import Counter

from retrain.errors import alike

MAX_KINDS = 64
OTHERS = "other errors"
MAX_TEXT = 300
CUT = " ..."
_PLACE = re.compile(r" \([^()\s]+:\d+\)$")
"""The line of code that raised the error, if it is known: see `blame`."""


class Causes(Counter[str]):
    """The first error of each kind in one line, with the number of errors of the kind.

    Those with alike first lines, and from one line of code, are of one kind.
    """

    def __init__(self) -> None:
        super().__init__()
        self._texts: dict[str, str] = {}

    def add(self, error: str) -> str | None:
        """Count an error; returns its text if it is the first of its kind."""
        text, kind = _in_one_line(error)
        known = self._texts.get(kind)
        if known is None and len(self._texts) >= MAX_KINDS:
            self[OTHERS] += 1
            return None
        self[self._texts.setdefault(kind, text)] += 1
        return text if known is None else None


def _in_one_line(error: str) -> tuple[str, str]:
    """The error in at most MAX_TEXT characters, and its kind.

    An error of code keeps its lines and ends with the place that raised it; others are cut to the
    first line.
    """
    place = found[0] if (found := _PLACE.search(error)) else ""
    said = error.removesuffix(place)
    first = said.partition("\n")[0]
    text = " ".join(said.split()) if place else first
    if len(text) > (room := max(0, MAX_TEXT - len(place))):
        text = text[: max(0, room - len(CUT))] + CUT
    return text + place, alike(first[:MAX_TEXT] + place)
