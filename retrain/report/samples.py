"""A few rollouts worth reading, and counts over all rollouts of rollouts.jsonl.

The file is read once, in bounded memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import count, groupby
from operator import itemgetter
from typing import Any

from retrain.observe.causes import Causes
from retrain.observe.journal import known

PICKED = 6
"""Rollouts of each kind that a report shows."""
MAX_TEXT = 20_000
"""Characters of one message that a report shows."""
MAX_CALLS = 100
"""Calls of one agent's rollout that a report shows."""

KINDS = ("best", "worst", "first", "last", "failed", "eval")
Rollout = Mapping[str, Any]  # a JSON object of rollouts.jsonl
Ranked = tuple[float, int, Rollout]
"""(rank by reward, number, rollout)."""


class Samples:
    """The first, last, best, worst and failed rollouts.

    Rollouts of evaluations, whose tickets have the epoch -1, are counted and shown separately. The
    seats of one rollout are counted one by one and shown together: their lines follow each other.
    """

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self.count = 0
        self.evaluated = 0
        self.errors = Causes()
        """Failed rollouts, by the first line of their error."""
        self.stop_reasons: Counter[str] = Counter()
        """Turns, by stop reason."""
        self.seconds: Counter[str] = Counter()
        """Summed over rollouts, by stage."""
        self.components: dict[str, Counter[float]] = {}
        """The values of each component of the scored rollouts, rounded so that they are few."""
        self._kept: dict[str, list[Ranked]] = {kind: [] for kind in KINDS}
        numbers = count()
        for _, lines in groupby(
            rollouts,
            lambda line: (line["ticket"], line["index"]) if line.get("seat") else next(numbers),
        ):
            self._add(list(lines))

    def picked(self) -> dict[str, list[dict[str, Any]]]:
        """Shortened rollouts, by why they are shown."""
        return {
            kind: [_shortened(rollout) for *_, rollout in kept]
            for kind, kept in self._kept.items()
            if kept
        }

    def _add(self, seats: Sequence[Rollout]) -> None:
        """Add a rollout: one line, or one of each of its seats."""
        whole = seats[0] if len(seats) == 1 else {**seats[0], "seats": seats}
        held_out = str(whole.get("ticket")).startswith("-")
        failed = [seat for seat in seats if seat.get("outcome") != "ok"]
        for seat in failed:
            self.errors.add(f"eval: {_cause(seat)}" if held_out else _cause(seat))
        if held_out:
            self.evaluated += len(seats)
            self._keep("eval", whole)
        else:
            for seat in seats:
                self._count(seat)
            self._pick(whole, failed, [float(r) for s in seats if known(r := s.get("reward"))])

    def _pick(self, whole: Rollout, failed: Sequence[Rollout], rewards: Sequence[float]) -> None:
        if len(self._kept["first"]) < PICKED:
            self._keep("first", whole)
        self._keep("last", whole)
        if failed:
            self._keep("failed", whole)
        elif rewards:
            self._keep("best", whole, max(rewards))
            self._keep("worst", whole, -min(rewards))

    def _count(self, seat: Rollout) -> None:
        self.count += 1
        self.stop_reasons.update(seat.get("stop_reasons") or ())
        self.seconds.update(seat.get("seconds") or {})
        scored = (seat.get("rewards") or {}) if seat.get("outcome") == "ok" else {}
        for name, value in scored.items():
            if known(value):
                self.components.setdefault(name, Counter())[float(f"{value:.4g}")] += 1

    def _keep(self, kind: str, rollout: Rollout, rank: float | None = None) -> None:
        """Keep the highest ranks; of equal ones the latest, since it shows the current model."""
        kept = [*self._kept[kind], (rank or 0.0, self.count, rollout)]
        if rank is not None:
            kept.sort(key=itemgetter(0, 1), reverse=True)
        self._kept[kind] = kept[-PICKED:] if rank is None else kept[:PICKED]


def _cause(rollout: Rollout) -> str:
    return str(rollout.get("error") or rollout.get("outcome"))


def _shortened(rollout: Rollout) -> dict[str, Any]:
    short = {**rollout, "messages": _texts_cut(rollout.get("messages"))}
    if calls := rollout.get("calls"):
        short["calls"] = [
            {**call, "messages": _texts_cut(call.get("messages"))} for call in calls[:MAX_CALLS]
        ]
        short["calls_left_out"] = max(0, len(calls) - MAX_CALLS)
    if seats := rollout.get("seats"):
        short["seats"] = [_shortened(seat) for seat in seats]
    return short


def _texts_cut(messages: Any) -> list[dict[str, Any]]:
    return [{**message, "content": _cut(message.get("content"))} for message in messages or ()]


def _cut(content: Any) -> str:  # any: a string, or the parts of a multi-modal message
    text = content if isinstance(content, str) else "" if content is None else str(content)
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]} ... ({left:,} more characters)"
