"""Charts of metrics.jsonl and the `eval` events, as values that the report draws."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from statistics import fmean
from typing import Any

from retrain.observe.journal import Row, known, shares

MAX_POINTS = 600
"""Points per series; longer series are averaged in equal parts."""

MAX_BARS = 20
"""Bars of a histogram."""

Point = tuple[float, float]
"""(step, value)."""

MAIN = (
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Entropy", ("entropy",)),
    ("KL between sampler and trainer", ("kl/sampler_trainer",)),
    ("Staleness (versions)", ("staleness/mean", "staleness/max")),
    ("Tokens per second", ("tokens/per_second",)),
    ("Tokens per step", ("tokens/prompt", "tokens/completion")),
    ("Seconds per step", ("time/step", "time/wait_for_batch", "time/update", "time/publish")),
    ("Trainer idle fraction", ("trainer/idle_fraction",)),
    ("Unused groups", ("groups/zero_signal", "groups/dropped_stale")),
    ("Failed rollouts", ("rollouts/failed",)),
)
SPREAD = ("min", "max", "std")
"""What a chart of a component shows beside its mean."""


def charts(rows: Sequence[Row], evaluations: Sequence[Row]) -> list[dict[str, Any]]:
    """Charts in reading order: reward, evaluation, the main ones, then every other key."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    components = [key for key in keys if key.startswith("reward/") and key.endswith("/mean")]
    rewards = list(dict.fromkeys(["reward/mean", *components]))
    main = [_chart(title, names, rows, "main") for title, names in MAIN]
    further = [_chart(title, names, rows, "further") for title, names in _further(keys, rewards)]
    drawn = [_chart("Reward", rewards, rows, "wide"), _evaluation(evaluations), *main, *further]
    return [chart for chart in drawn if chart["series"]]


def _further(keys: Sequence[str], rewards: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Titles and keys of the charts of what no other chart shows: spreads, then single keys."""
    spreads = [
        (name, [f"{name}/mean", *found])
        for name in [mean.removesuffix("/mean") for mean in rewards]
        if (found := [key for end in SPREAD if (key := f"{name}/{end}") in keys])
    ]
    drawn = chain.from_iterable(names for _, names in (*MAIN, *spreads))
    used = {"step", "version", *rewards, *drawn}
    others = [key for key in keys if key not in used and not key.startswith("eval/")]
    return spreads + [(key, [key]) for key in others]


def _evaluation(events: Sequence[Row]) -> dict[str, Any]:
    rows = [{"step": event.get("eval/step"), **event} for event in events]
    passes = dict.fromkeys(key for row in rows for key in row if key.startswith("eval/pass@"))
    keys = ["eval/reward/mean", "eval/loss", *passes]
    return _chart("Evaluation on held-out prompts", keys, rows, "wide")


def _chart(title: str, keys: Sequence[str], rows: Sequence[Row], place: str) -> dict[str, Any]:
    series = [{"name": key, "points": thin(points(rows, key))} for key in keys]
    shown = [one for one in series if one["points"]]
    axis = _axis(keys, rows) if place == "wide" else None
    return {"title": title, "place": place, "series": shown, "axis": axis}


def _axis(keys: Sequence[str], rows: Sequence[Row]) -> Point | None:
    """The least and the greatest value that an axis of rewards must show; None: those drawn.

    An axis that ends at the curve makes noise look like a climb. Rewards between 0 and 1 have that
    axis; others have at least four standard errors of the first of `keys`, if these are known.
    """
    values = [y for key in keys for _, y in points(rows, key)]
    if not keys[0].endswith("reward/mean") or not points(rows, keys[0]):
        return None
    low, high = min(values), max(values)
    if low >= 0 and high <= 1:
        return 0.0, 1.0
    middle, half = (low + high) / 2, 2 * max(map(_error, rows), default=0.0)
    return min(low, middle - half), max(high, middle + half)


def _error(row: Row) -> float:
    """The standard error of the mean reward of a step or of an evaluation; 0.0 if unknown."""
    prefix = "eval/" if "eval/reward/std" in row else ""
    spread, count = row.get(f"{prefix}reward/std"), row.get(f"{prefix}rollouts/ok")
    return spread / math.sqrt(count) if known(spread) and known(count) and count else 0.0


def histogram(values: Counter[float]) -> dict[str, Any]:
    """The lowest and the highest value, and the counts of equal parts between them."""
    low, high = min(values), max(values)
    bars = [0] * (min(MAX_BARS, len(values)) if high > low else 1)
    for value, count in values.items():
        place = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.0
        bars[min(len(bars) - 1, math.floor(place * len(bars)))] += count
    return {"low": low, "high": high, "bars": bars, "count": values.total()}


def points(rows: Sequence[Row], key: str) -> list[Point]:
    """The finite values of `key`, by step."""
    found = ((row.get("step"), row.get(key)) for row in rows)
    return [(float(x), float(y)) for x, y in found if known(x) and known(y)]


def thin(series: list[Point], most: int = MAX_POINTS) -> list[Point]:
    """At most `most` points, each the mean of its part."""
    return [(fmean(x for x, _ in some), fmean(y for _, y in some)) for some in shares(series, most)]
