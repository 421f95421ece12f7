"""A step's line of metrics.jsonl.

A group counts when the learner takes it, to train or to drop it: so `reward/*` covers every scored
rollout once, trained or not, and no line is without rewards because groups came in bursts.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean

from retrain.algorithms.functional import is_flat, std
from retrain.types import Group, Metrics

NOT_SAMPLED = ("kl/sampler_trainer", "entropy", "clip_fraction")
"""Metrics of an adapter that mean nothing where no token was sampled; `ratio/*` neither."""


class Meter:
    """Counts what happened since the last `row`.

    `sampled` is false where rows of the data set are trained: what speaks of rewards and of the
    sampler is then left out. `by_group` is false where equal rewards in a group are a signal.
    """

    def __init__(self, *, sampled: bool = True, by_group: bool = True) -> None:
        self._sampled = sampled
        self._by_group = by_group
        self._began = self._lap = time.perf_counter()
        self._seconds: dict[str, float] = {}
        self._clear()

    def start(self) -> None:
        """The first stage of a step begins."""
        self._lap, self._seconds = time.perf_counter(), {}

    def lap(self, stage: str) -> None:
        """The stage ends, and the next one begins."""
        now = time.perf_counter()
        self._seconds[stage], self._lap = now - self._lap, now

    def group(self, group: Group) -> None:
        """The learner took a group."""
        scored = group.scored
        self._ok += len(scored)
        self._rewards += [t.reward for t in scored]
        for trajectory in scored:
            for name, value in trajectory.rewards.items():
                self._components[name].append(value)
        self._failed += len(group.trajectories) - len(scored)
        flat = len(scored) > 1 and is_flat([t.reward for t in scored])
        self._zero_signal += flat and self._by_group
        for trajectory in group.trajectories:
            if not trajectory.turns:
                continue
            last, sampled = trajectory.turns[-1], trajectory.sampled_tokens
            self._turns += len(trajectory.turns)
            self._completion_tokens += sampled
            # The last prompt holds the earlier turns' replies.
            self._prompt_tokens += len(last.prompt_ids) + len(last.completion.token_ids) - sampled

    def dropped(self, cause: str) -> None:
        """A group that was taken is not trained."""
        self._dropped[cause] += 1

    def row(
        self,
        step: int,
        groups: Sequence[Group],
        adapter: Mapping[str, float],
        trained: int,
        version: int,
    ) -> Metrics:
        """The row of a step that trained the weights of version `trained` and serves `version`.

        `adapter` holds the metrics of the update. The counters are reset.
        """
        for group in groups:
            self.group(group)
        now = time.perf_counter()
        elapsed = now - self._began
        ages = [trained - v for g in groups for t in g.scored for v in t.versions if v >= 0]
        row: Metrics = {
            "step": step,
            "version": version,
            "loss": math.nan,
            "grad_norm": math.nan,
            **(self._sampling(adapter, ages) if self._sampled else _unsampled(adapter)),
            "groups/trained": len(groups),
            **{f"groups/dropped_{c}": self._dropped[c] for c in ("stale", "failed", "no_signal")},
            "rollouts/ok": self._ok,
            "rollouts/failed": self._failed,
            "rollouts/turns": self._turns,
            "tokens/prompt": self._prompt_tokens,
            "tokens/completion": self._completion_tokens,
            "tokens/per_second": self._completion_tokens / elapsed,
            "time/step": elapsed,
            **{f"time/{stage}": value for stage, value in self._seconds.items()},
            "trainer/idle_fraction": self._seconds["wait_for_batch"] / elapsed,
        }
        self._began = now
        self._clear()
        return row

    def _sampling(self, adapter: Mapping[str, float], ages: Sequence[int]) -> Metrics:
        """What there is to say of rollouts, and what the adapter says."""
        return {
            "reward/mean": fmean(self._rewards) if self._rewards else math.nan,
            "reward/std": std(self._rewards, ddof=0) if self._rewards else math.nan,
            **{f"reward/{name}/mean": fmean(v) for name, v in self._components.items()},
            "kl/sampler_trainer": math.nan,
            "entropy": math.nan,
            **adapter,
            "staleness/mean": fmean(ages) if ages else 0.0,
            "staleness/max": max(ages, default=0),
            "groups/zero_signal": self._zero_signal,
        }

    def _clear(self) -> None:
        self._rewards: list[float] = []
        self._components: defaultdict[str, list[float]] = defaultdict(list)
        self._dropped: defaultdict[str, int] = defaultdict(int)
        self._ok = self._failed = self._zero_signal = self._turns = 0
        self._prompt_tokens = self._completion_tokens = 0


def _unsampled(adapter: Mapping[str, float]) -> Metrics:
    """What an adapter says of a batch of examples, less what compares with a sampler."""
    return {
        name: value
        for name, value in adapter.items()
        if name not in NOT_SAMPLED and not name.startswith("ratio/")
    }
