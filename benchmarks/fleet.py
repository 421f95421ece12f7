"""Simulate the real pipe over 1 to 100 vLLM-like engines, then measure the limit of one process.

    python -m benchmarks.fleet [--quick]

The first tables are in virtual time, and the same on every machine. The trainer, the engines and
the pushes of weights are simulated (`fleet_engine`, `fleet_adapter`); everything else is the code
of a run. Groups have 8 rollouts. The trainer is as large as the fleet: an update takes 0.8 of the
time that the engines need for its batch.

The fraction is that of the best asynchronous schedule, which keeps every engine full and loses
only the pauses of the pushes. A step of R rollouts takes it
max(update + push + pause, R x seconds per rollout / engines + pause), where the seconds per rollout
are those of its tokens at the number of rows with the highest throughput, and of its prompts when
each is prefilled once per group. Staleness counts a rollout by its oldest token, as the bound does.
`stale` and `lost` are shares of the sampled tokens: those dropped as too old, and those that were
lost with a dead engine. `recomputed` is the share of the engines' time that goes into computing
the KV cache again after pushes. `idle` is the share of the time in which the trainer updates
nothing.

The last table is in real time: engines that cost nothing answer so fast that one core is full.
Bar: a fraction of at least 0.9 at 128 rollouts per engine and step and S=4, with D=8 or more.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import resource
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks import orchestration
from benchmarks.fleet_adapter import ANSWER, OPENING, Fleet, FleetOptions
from benchmarks.fleet_engine import TOKENS
from benchmarks.mock_engine import mock_config
from retrain.config import RunConfig
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.types import Metrics
from tests.chaos.virtual_time import VirtualLoop, virtual

GROUP_SIZE = 8
ROWS = 1024
"""Prompts of the dataset."""
MAX_TOKENS = 16_384


@dataclass(frozen=True)
class Case:
    """A run to simulate."""

    engines: int
    target: int
    bound: int | None = None
    per_engine: int = 128
    """Rollouts per engine and step."""
    turns: int = 1
    steps: int = 12
    """Steps that are measured, after S + 4 steps of warm-up."""
    fleet: dict[str, Any] = field(default_factory=dict)  # keys of FleetOptions

    @property
    def groups(self) -> int:
        return max(1, self.per_engine * self.engines // GROUP_SIZE)

    @property
    def options(self) -> FleetOptions:
        options = FleetOptions(**{"in_flight": "adapter", **self.fleet, "engines": self.engines})
        return options.model_copy(update={"update": 0.8 * self.generating(options)})

    @property
    def limit(self) -> float:
        """Seconds per step of the best asynchronous schedule."""
        options = self.options
        return max(
            options.update + options.push + options.pause,
            self.generating(options) + options.pause,
        )

    def generating(self, options: FleetOptions) -> float:
        """Seconds in which engines that are always full generate the rollouts of a step."""
        ids, curve = _mean_length(options.mean_tokens, options.sigma), options.curve
        prompt = OPENING / GROUP_SIZE + (self.turns - 1) * len(ANSWER)
        each = TOKENS * (self.turns * ids * curve.best + prompt * curve.compute)
        return self.groups * GROUP_SIZE * each / options.engines

    def config(self, folder: Path) -> RunConfig:
        talk = {"type": "benchmarks.fleet_adapter:Talk", "turns": self.turns}
        options = self.options.model_dump(exclude_defaults=True)
        return mock_config(
            folder,
            prompts={"type": "list", "rows": [f"{row:0{OPENING}d}" for row in range(ROWS)]},
            environment=talk if self.turns > 1 else {"type": "single_turn"},
            rewards=[{"type": "benchmarks.fleet_adapter:luck"}],
            algorithm={"group_size": GROUP_SIZE},
            backend={"type": "benchmarks.fleet_adapter:FleetOptions", **options},
            sampling={"max_tokens": MAX_TOKENS // TOKENS},
            rollout={"max_turns": self.turns},
            train={
                "total_train_steps": 10_000,  # it is stopped: the last steps admit less work
                "groups_per_step": self.groups,
                "stop_after_flat_steps": 10_000,
            },
            staleness={"target": self.target, "max": self.bound},
            checkpoint={"every": 0},
            deadlines={"blocked": 1e6},  # in real time, where a large fleet takes minutes
        )


@cache
def _mean_length(mean_tokens: float, sigma: float) -> float:
    """The mean length of a completion in ids, of 20,000 draws."""
    fleet = Fleet(FleetOptions(mean_tokens=mean_tokens, sigma=sigma))
    draw = random.Random(0)
    return fmean(fleet.length(draw, MAX_TOKENS // TOKENS) for _ in range(20_000))


@dataclass(frozen=True)
class Outcome:
    """What a run reached in its measured steps; shares are between 0 and 1."""

    fraction: float
    staleness_mean: float
    staleness_max: float
    stale: float
    lost: float
    recomputed: float
    idle: float
    longest: float
    """Seconds of the longest request, in the whole run."""
    deaths: int
    wrong: Sequence[str]


class Window(Callback):
    """Measures `steps` steps after `first`, then stops the run."""

    def __init__(self, first: int, steps: int) -> None:
        self.first, self.last = first, first + steps
        self.rows: list[Metrics] = []

    def on_train_begin(self, trainer: Any) -> None:  # any: the run
        self.fleet: Fleet = trainer.backend.adapter

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:  # any: the run
        if step == self.first:
            self.began = self._totals()
        elif step > self.first:
            self.rows.append(metrics)
        if step == self.last:
            self.ended = self._totals()
            trainer.request_stop()

    def outcome(self, limit: float) -> Outcome:
        seconds, updating, trained, lost, recomputed = (
            after - before for before, after in zip(self.began, self.ended, strict=True)
        )
        taken = TOKENS * sum(row["tokens/completion"] for row in self.rows)
        fleet = self.fleet
        return Outcome(
            fraction=limit * len(self.rows) / seconds,
            staleness_mean=fmean(row["staleness/mean"] for row in self.rows),
            staleness_max=max(row["staleness/max"] for row in self.rows),
            stale=(taken - trained) / (taken + lost),
            lost=lost / (taken + lost),
            recomputed=recomputed / (seconds * len(fleet.engines)),
            idle=1 - updating / seconds,
            longest=fleet.longest,
            deaths=fleet.deaths,
            wrong=fleet.wrong,
        )

    def _totals(self) -> tuple[float, ...]:
        fleet, now = self.fleet, asyncio.get_running_loop().time()
        lost = sum(engine.lost for engine in fleet.engines)
        recomputed = sum(engine.recomputed for engine in fleet.engines)
        return now, fleet.updating, fleet.trained_tokens, lost, recomputed


def play(case: Case, folder: Path | None = None) -> Outcome:
    """Simulate a run; its run directory is `folder`, which must not exist."""
    with tempfile.TemporaryDirectory() as temporary:
        window = Window(case.target + 4, case.steps)
        config = case.config(folder or Path(temporary) / "run")
        with virtual(), asyncio.Runner(loop_factory=VirtualLoop) as runner:
            runner.run(train(config, callbacks=[window], console=False))
    return window.outcome(case.limit)


Column = tuple[str, Callable[[Case, Outcome], str]]
RESULTS: list[Column] = [
    ("fraction", lambda _, o: f"{o.fraction:.2f}"),
    ("staleness", lambda _, o: f"{o.staleness_mean:.1f} / {o.staleness_max:.0f}"),
    ("stale", lambda _, o: f"{o.stale:.1%}"),
    ("lost", lambda _, o: f"{o.lost:.1%}"),
    ("recomputed", lambda _, o: f"{o.recomputed:.0%}"),
    ("idle", lambda _, o: f"{o.idle:.2f}"),
    ("longest s", lambda _, o: f"{o.longest:.0f}"),
]
SETTINGS: list[Column] = [
    ("S", lambda c, _: f"{c.target}"),
    ("D", lambda c, _: f"{c.bound}"),
]
ENGINES: Column = ("engines", lambda c, _: f"{c.engines}")
PER_ENGINE: Column = ("rollouts", lambda c, _: f"{c.per_engine}")
TURNS: Column = ("turns", lambda c, _: f"{c.turns}")
FLEET: Column = ("fleet", lambda c, _: " ".join(f"{v}" for v in c.fleet.values()) or "-")


def tables(quick: bool) -> list[tuple[str, list[Column], list[Case]]]:
    """Title, columns and cases of each table in virtual time."""
    staleness = ((0, 0), (1, 3), (4, 12))
    sizes = ((1, 12), (4, 12)) if quick else ((1, 12), (16, 6))  # engines and steps
    scale = [Case(n, s, d, steps=steps) for n, steps in sizes for s, d in staleness]
    if quick:
        return [("Engines, 128 rollouts each per step", [ENGINES, *SETTINGS], scale)]
    scale.append(Case(100, 4, 12, steps=2))  # it takes ten seconds
    bounds = ((1, 3), (2, 6), (4, 8), (4, 12))
    fill = [Case(2, s, d, r, steps=16) for r in (32, 64, 128, 256) for s, d in bounds]
    modes = ("adapter", "keep_cache", "recompute", "drain")
    pushes = [Case(2, s, 3 * s, fleet={"in_flight": mode}) for mode in modes for s in (1, 4)]
    faults = [Case(8, 2, 6, fleet={"failures": seconds}) for seconds in (0.0, 900.0)]
    turns = [Case(2, 2, 6, 64, turns=count) for count in (1, 4)]
    return [
        ("Engines, 128 rollouts each per step", [ENGINES, *SETTINGS], scale),
        ("Rollouts per engine and step, 2 engines", [PER_ENGINE, *SETTINGS], fill),
        ("What a push does to requests in flight, 2 engines", [FLEET, *SETTINGS], pushes),
        ("Mean seconds between deaths of an engine, 8 engines", [FLEET, *SETTINGS], faults),
        ("Turns per rollout, 64 rollouts per engine and step", [TURNS, *SETTINGS], turns),
    ]


def simulate(quick: bool) -> None:
    """Print the tables in virtual time."""
    listed = tables(quick)
    cases = [case for _, _, rows in listed for case in rows]
    with ProcessPoolExecutor(mp_context=get_context("spawn")) as pool:
        outcomes = pool.map(play, cases)
        for title, columns, rows in listed:
            shown = [*columns, *RESULTS]
            print(f"{title}\n" + " ".join(f"{name:>11}" for name, _ in shown))
            for case, outcome in zip(rows, outcomes, strict=False):
                cells = [f"{text(case, outcome):>11}" for _, text in shown]
                print(*cells, *outcome.wrong[:3], flush=True)
            print()


def full(in_flight: int) -> tuple[float, ...]:
    """Rollouts/s, us CPU per rollout, CPU / time, p99 of the loop's lag in ms, and memory in MB."""
    target = 1
    window, lag = orchestration.run(
        groups=in_flight // 8 // (target + 1), steps=40 if in_flight <= 1000 else 7, target=target,
        latency=in_flight / 40_000,
    )  # fmt: skip
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    rate, each = window.rollouts / window.wall, 1e6 * window.cpu / window.rollouts
    return rate, each, window.cpu / window.wall, lag.p99, memory


def ceiling(quick: bool) -> None:
    """Print the limit of one process, with engines that use no CPU."""
    print("One process, in real time")
    names = ("in flight", "rollouts/s", "us CPU each", "CPU / time", "lag p99 ms", "memory MB")
    print(" ".join(f"{name:>11}" for name in names))
    for in_flight in (1000,) if quick else (1000, 10_000):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:  # its own memory
            rate, each, share, lag, memory = pool.submit(full, in_flight).result()
        print(
            f"{in_flight:>11} {rate:>11.0f} {each:>11.0f} {share:>11.2f} {lag:>11.1f} "
            f"{memory:>11.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="two small tables")
    given = parser.parse_args()
    simulate(given.quick)
    ceiling(given.quick)


if __name__ == "__main__":
    main()
