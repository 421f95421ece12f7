"""Count what a step's row of metrics.jsonl reports.

A group counts when the learner takes it, to train or to drop it. So `reward/*` covers every scored
rollout once, trained or not, and every row has rewards even when groups finish in bursts. In a
rollout with seats, each seat's trajectory counts as a rollout, and `reward/SEAT/mean` is its own.
In a mixture, `reward/mixture/SOURCE/mean` is that of the rows of one source.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean

from retrain.algorithms.batching import branches
from retrain.algorithms.functional import std
from retrain.pipeline.signal import without_signal
from retrain.prompts import MIXTURE
from retrain.types import Group, Metrics, Trajectory

NOT_SAMPLED = ("kl/sampler_trainer", "entropy", "clip_fraction")
"""Metrics of an adapter that, like `ratio/*`, mean nothing where no token was sampled."""


DROPS = ("stale", "failed", "outage", "no_signal")
"""Causes for which a group is dropped."""
TOOLS = ("tool_calls", "tool_errors")
"""What environments with tools count in the `info` of a rollout."""
ENDS = ("truncated", "unusable")
"""Why a scored rollout ended early, in its `info`."""


class Meter:
    """Counts what happened since the last `row`.

    `sampled` is false where rows of the dataset are trained: metrics of rewards and of the sampler
    are omitted. `by_group` is false where a group with equal rewards still has a signal. `mixed`
    are the names of the sources of a mixture.
    """

    def __init__(
        self, *, sampled: bool = True, by_group: bool = True, mixed: Collection[str] = ()
    ) -> None:
        self._sampled, self._by_group, self._mixed = sampled, by_group, mixed
        self.begin()
        self._clear()

    def begin(self) -> None:
        """Training begins: the time before it counts for no step."""
        self._began = time.perf_counter()
        self.start()

    def start(self) -> None:
        """The first stage of a step begins."""
        self._lap, self._seconds = time.perf_counter(), dict[str, float]()

    def lap(self, stage: str) -> None:
        """The stage ends, and the next one begins."""
        now = time.perf_counter()
        self._seconds[stage], self._lap = now - self._lap, now

    def group(self, group: Group, dropped: str = "") -> None:
        """The learner took a group: to train it, or to drop it for the cause `dropped`."""
        rewards: list[float] = []
        components = self._components
        versions: list[int] = []
        turns = sampled = total = more = 0
        for trajectory in group.trajectories:
            if trajectory.outcome == "ok":
                rewards.append(trajectory.reward)
                if trajectory.seat:
                    components[trajectory.seat].append(trajectory.reward)
                for name, value in trajectory.rewards.items():
                    components[name].append(value)
                for turn in trajectory.turns:
                    versions.append(turn.completion.version)  # noqa: PERF401 - a comprehension takes longer
            if trajectory.info:
                self._count_info(group, trajectory)
            played = trajectory.turns
            turns += len(played)
            said = trajectory.sampled_tokens
            sampled += said
            if len(played) == 1:  # the common case, fast
                total += len(played[0].prompt_ids) + said
                continue
            made = branches(played)
            # The last turn of a branch contains the tokens of its earlier ones.
            total += sum([played[branch[-1]].length for branch in made])
            more += max(0, len(made) - 1)
        self._rewards += rewards
        if self._mixed and rewards:
            components[f"{MIXTURE}/{group.prompt.metadata[MIXTURE]}"] += rewards
        if not dropped:
            self._versions += versions
        counts = self._counts
        counts[dropped] += 1
        counts["failed rollouts"] += len(group.trajectories) - len(rewards)
        counts["flat"] += self._by_group and without_signal(group)
        counts["turns"] += turns
        counts["sampled"] += sampled
        counts["prompt"] += total - sampled
        counts["branches"] += more

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
        now, counts = time.perf_counter(), self._counts
        elapsed = now - self._began
        ages = [trained - sampled for sampled in self._versions if sampled >= 0]
        row: Metrics = {
            "step": step,
            "version": version,
            "loss": math.nan,
            "grad_norm": math.nan,
            **(self._sampling(adapter, ages) if self._sampled else _unsampled(adapter)),
            "groups/trained": len(groups),
            **{f"groups/dropped_{cause}": counts[cause] for cause in DROPS},
            "rollouts/ok": len(self._rewards),
            "rollouts/failed": counts["failed rollouts"],
            "rollouts/turns": counts["turns"],
            "rollouts/branches": counts["branches"],
            **{f"rollouts/{name}": count for name, count in self._found.items()},
            "tokens/prompt": counts["prompt"],
            "tokens/completion": counts["sampled"],
            "tokens/per_second": counts["sampled"] / elapsed,
            "time/step": elapsed,
            **{f"time/{stage}": seconds for stage, seconds in self._seconds.items()},
            "trainer/idle_fraction": self._seconds["wait_for_batch"] / elapsed,
        }
        self._began = now
        self._clear()
        return row

    def evaluation(self) -> Metrics:
        rewards = self._rewards
        return {
            "eval/rollouts/ok": len(rewards),
            "eval/rollouts/failed": self._counts["failed rollouts"],
            "eval/tokens/completion": self._counts["sampled"],
            **{f"eval/rollouts/{name}": count for name, count in self._found.items()},
            **({"eval/reward/mean": fmean(rewards)} if rewards else {}),
            **({"eval/reward/std": std(rewards, ddof=0)} if rewards else {}),
            **{f"eval/reward/{n}/mean": fmean(values) for n, values in self._components.items()},
        }

    def _sampling(self, adapter: Mapping[str, float], ages: Sequence[int]) -> Metrics:
        return {
            "reward/mean": fmean(self._rewards) if self._rewards else math.nan,
            "reward/std": std(self._rewards, ddof=0) if self._rewards else math.nan,
            **{
                f"reward/{name}/{key}": value
                for name, values in self._components.items()
                for key, value in spread(values).items()
            },
            "kl/sampler_trainer": math.nan,
            "entropy": math.nan,
            **adapter,
            "staleness/mean": fmean(ages) if ages else 0.0,
            "staleness/max": max(ages, default=0),
            "groups/zero_signal": self._counts["flat"],
        }

    def _count_info(self, group: Group, trajectory: Trajectory) -> None:
        """Count the `info` of a rollout, once if it has seats: all of them have it."""
        if trajectory.seat == group.trajectories[0].seat:
            info, found = trajectory.info, self._found
            found.update({name: n for name in TOOLS if type(n := info.get(name)) is int})
            if trajectory.outcome == "ok":
                found.update(name for name in ENDS if isinstance(info.get(name), str))

    def _clear(self) -> None:
        self._rewards: list[float] = []
        self._versions: list[int] = []
        """Those that sampled each turn of the scored rollouts that are trained."""
        self._components: defaultdict[str, list[float]] = defaultdict(list)
        self._counts: Counter[str] = Counter()
        self._found: Counter[str] = Counter()
        """In the `info` of rollouts: only what any of them has."""


def spread(values: Sequence[float]) -> Metrics:
    return {
        "mean": fmean(values),
        "std": std(values, ddof=0),
        "min": min(values),
        "max": max(values),
    }


def _unsampled(adapter: Mapping[str, float]) -> Metrics:
    """The metrics of an update on examples, less those that compare with a sampler."""
    return {
        name: value
        for name, value in adapter.items()
        if name not in NOT_SAMPLED and not name.startswith("ratio/")
    }
