"""A few rollouts worth reading, and counts over all rollouts of rollouts.jsonl.

The file is read once, in bounded memory.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

from retrain.observe.charts import known

PICKED = 6
"""Rollouts of each kind that a report shows."""
MAX_TEXT = 20_000
"""Characters of one message that a report shows."""

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
        self._first: list[Rollout] = []
        self._last: deque[Rollout] = deque(maxlen=PICKED)
        self._failed: deque[Rollout] = deque(maxlen=PICKED)
        self._evaluated: deque[Rollout] = deque(maxlen=PICKED)
        self._best: list[Ranked] = []
        self._worst: list[Ranked] = []
        for rollout in rollouts:
            self._add(rollout)

    def picked(self) -> dict[str, list[dict[str, Any]]]:
        """Shortened rollouts, by why they are shown."""
        kinds = {
            "best": [rollout for *_, rollout in self._best],
            "worst": [rollout for *_, rollout in self._worst],
            "first": self._first,
            "last": list(self._last),
            "failed": list(self._failed),
            "eval": list(self._evaluated),
        }
        return {kind: [_shortened(r) for r in found] for kind, found in kinds.items() if found}

    def _add(self, rollout: Rollout) -> None:
        if str(rollout.get("ticket")).startswith("-"):
            self.evaluated += 1
            self._evaluated.append(rollout)
            if rollout.get("outcome") != "ok":
                self.errors[f"eval: {_cause(rollout)}"] += 1
            return
        self.count += 1
        self.stop_reasons.update(rollout.get("stop_reasons") or ())
        self.seconds.update(rollout.get("seconds") or {})
        if len(self._first) < PICKED:
            self._first.append(rollout)
        self._last.append(rollout)
        reward = rollout.get("reward")
        if rollout.get("outcome") != "ok":
            self.errors[_cause(rollout)] += 1
            self._failed.append(rollout)
        elif reward is not None and known(reward):
            # of equal rewards the latest, since it shows the current model
            self._best = _largest([*self._best, (float(reward), self.count, rollout)])
            self._worst = _largest([*self._worst, (-float(reward), self.count, rollout)])


def _cause(rollout: Rollout) -> str:
    return str(rollout.get("error") or rollout.get("outcome")).partition("\n")[0][:300]


def _largest(ranked: Sequence[Ranked]) -> list[Ranked]:
    return heapq.nlargest(PICKED, ranked, key=itemgetter(0, 1))


def _shortened(rollout: Rollout) -> dict[str, Any]:
    messages = [
        {**message, "content": _cut(message.get("content"))}
        for message in rollout.get("messages") or ()
    ]
    return {**rollout, "messages": messages}


def _cut(content: Any) -> str:  # any: a string, or the parts of a multi-modal message
    text = content if isinstance(content, str) else "" if content is None else str(content)
    left = len(text) - MAX_TEXT
    return text if left <= 0 else f"{text[:MAX_TEXT]} ... ({left:,} more characters)"
