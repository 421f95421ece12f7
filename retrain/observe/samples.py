"""A few rollouts worth reading, and counts over all rollouts of rollouts.jsonl.

The file is read once, in bounded memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from operator import itemgetter
from typing import Any

from retrain.observe.charts import known
from retrain.observe.histogram import Histogram

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

    Rollouts of evaluations, whose tickets have the epoch -1, are counted and shown separately.
    """

    def __init__(self, rollouts: Iterable[Rollout]) -> None:
        self.count = 0
        self.evaluated = 0
        self.errors: Counter[str] = Counter()
        """Failed rollouts, by the first line of their error."""
        self.stop_reasons: Counter[str] = Counter()
        """Turns, by stop reason."""
        self.seconds: Counter[str] = Counter()
        """Summed over rollouts, by stage."""
        self.components: dict[str, Histogram] = {}
        """The values of each component of the scored rollouts."""
        self._kept: dict[str, list[Ranked]] = {kind: [] for kind in KINDS}
        for rollout in rollouts:
            self._add(rollout)

    def picked(self) -> dict[str, list[dict[str, Any]]]:
        """Shortened rollouts, by why they are shown."""
        return {
            kind: [_shortened(rollout) for *_, rollout in kept]
            for kind, kept in self._kept.items()
            if kept
        }

    def _add(self, rollout: Rollout) -> None:
        if str(rollout.get("ticket")).startswith("-"):
            self.evaluated += 1
            self._keep("eval", rollout)
            if rollout.get("outcome") != "ok":
                self.errors[f"eval: {_cause(rollout)}"] += 1
            return
        self.count += 1
        self.stop_reasons.update(rollout.get("stop_reasons") or ())
        self.seconds.update(rollout.get("seconds") or {})
        if self.count <= PICKED:
            self._keep("first", rollout)
        self._keep("last", rollout)
        reward = rollout.get("reward")
        if rollout.get("outcome") != "ok":
            self.errors[_cause(rollout)] += 1
            self._keep("failed", rollout)
        elif reward is not None and known(reward):
            self._keep("best", rollout, float(reward))
            self._keep("worst", rollout, -float(reward))
            for name, value in (rollout.get("rewards") or {}).items():
                if known(value):
                    self.components.setdefault(name, Histogram()).add(float(value))

    def _keep(self, kind: str, rollout: Rollout, rank: float | None = None) -> None:
        """Keep the highest ranks; of equal ones the latest, since it shows the current model."""
        kept = [*self._kept[kind], (rank or 0.0, self.count, rollout)]
        if rank is not None:
            kept.sort(key=itemgetter(0, 1), reverse=True)
        self._kept[kind] = kept[-PICKED:] if rank is None else kept[:PICKED]


def _cause(rollout: Rollout) -> str:
    return str(rollout.get("error") or rollout.get("outcome")).partition("\n")[0][:300]


def _shortened(rollout: Rollout) -> dict[str, Any]:
    short = {**rollout, "messages": _texts_cut(rollout.get("messages"))}
    if calls := rollout.get("calls"):
        short["calls"] = [
            {**call, "messages": _texts_cut(call.get("messages"))} for call in calls[:MAX_CALLS]
        ]
        short["calls_left_out"] = max(0, len(calls) - MAX_CALLS)
    return short


def _texts_cut(messages: Any) -> list[dict[str, Any]]:
    return [{**message, "content": _cut(message.get("content"))} for message in messages or ()]


def _cut(content: Any) -> str:  # any: a string, or the parts of a multi-modal message
    text = content if isinstance(content, str) else "" if content is None else str(content)
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]} ... ({left:,} more characters)"
