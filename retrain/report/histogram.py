"""The distribution of a stream of numbers, in bounded memory."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

BARS = 20
"""The most bars of a histogram."""
MAX_DISTINCT = 2000
"""Different values that are kept apart. More of them are rounded, to fewer digits each time."""


class Histogram:
    """Counts values, which are rounded when there are too many different ones."""

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._digits = 17

    def add(self, value: float) -> None:
        self._counts[self._rounded(value)] += 1
        while len(self._counts) > MAX_DISTINCT and self._digits > 1:
            self._digits = min(self._digits, 6) - 1
            merged: Counter[float] = Counter()
            for number, count in self._counts.items():
                merged[self._rounded(number)] += count
            self._counts = merged

    def drawn(self) -> dict[str, Any]:
        """The lowest and the highest value, and the counts of equal parts between them."""
        low, high = min(self._counts), max(self._counts)
        bars = [0] * (min(BARS, len(self._counts)) if high > low else 1)
        for value, count in self._counts.items():
            place = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
            bars[min(len(bars) - 1, math.floor(place * len(bars)))] += count
        return {"low": low, "high": high, "bars": bars, "count": self._counts.total()}

    def _rounded(self, value: float) -> float:
        return value if self._digits >= 17 else float(f"{value:.{self._digits}g}")
