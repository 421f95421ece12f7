"""Measure the cost of the pipe: CPU per rollout, loop lag, and the fraction of the async limit.

    python -m benchmarks.orchestration [--quick] [--latency 0.3]

A mock engine answers after a seeded lognormal latency; rewards are async; the full run directory is
written. Bars: <= 60 us CPU per rollout at 1,000 and 10,000 in flight (90 with a plain function as
reward), loop lag p99 <= 10 ms at 1,000; fraction of the limit >= 0.97 at S=4, D=8.

The limit of a step of B groups of G rollouts on C engine slots, with a mean latency l, an update of
T and a publication of W: max(B G l / C, T + W), here with T = l and W = l / 20.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from pathlib import Path
from statistics import fmean, quantiles
from typing import Any

from benchmarks.mock_engine import LETTERS, mock_config
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.rewarding import reward
from retrain.types import Metrics


@reward
async def share_async(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)


@reward
def share(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)


class Lag(Callback):
    """Samples the lag of the event loop every 10 ms."""

    def __init__(self) -> None:
        self.late: list[float] = []

    async def on_train_begin(self, trainer: Any) -> None:  # any: the run, which is not used
        self._task = asyncio.create_task(self._sample())

    async def on_train_end(self, trainer: Any, result: Any) -> None:  # any: as above
        self._task.cancel()

    @property
    def p99(self) -> float:
        """In milliseconds."""
        return 1e3 * quantiles(self.late, n=100)[-1]

    async def _sample(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.01)
            self.late.append(time.perf_counter() - began - 0.01)


class Window(Callback):
    """CPU and wall time between two steps, without start-up and the drain at the end."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last = first, last
        self.cpu = self.wall = 0.0
        self.staleness: list[float] = []
        self.dropped = self.rollouts = 0.0

    def on_step_end(self, trainer: Any, step: int, metrics: Metrics) -> None:  # any: not used
        if step == self.first:
            self.cpu, self.wall = -time.process_time(), -time.perf_counter()
        elif self.first < step <= self.last:
            self.rollouts += metrics["rollouts/ok"]
            self.dropped += metrics["groups/dropped_stale"]
            self.staleness.append(metrics["staleness/mean"])
            if step == self.last:
                self.cpu += time.process_time()
                self.wall += time.perf_counter()


def run(
    *,
    groups: int,
    steps: int,
    target: int,
    bound: int | None = None,
    group_size: int = 8,
    plain_reward: bool = False,
    **engine: Any,  # any: MockOptions' keys
) -> tuple[Window, Lag]:
    """One run on the mock engine. The window excludes its first and last steps."""
    folder = Path(tempfile.mkdtemp())
    lag, window = Lag(), Window(min(steps - 1, 2 * (target + 1)), steps - 1)
    name = "share" if plain_reward else "share_async"
    config = mock_config(
        folder / "run",
        prompts={
            "type": "list",
            "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in LETTERS] * 64,
        },
        rewards=[{"type": f"benchmarks.orchestration:{name}"}],
        algorithm={"group_size": group_size},
        backend={"type": "benchmarks.mock_engine:MockOptions", **engine},
        train={
            "total_train_steps": steps,
            "groups_per_step": groups,
            "stop_after_flat_steps": 10_000,
        },
        staleness={"target": target, "max": target * 2 if bound is None else bound},
        checkpoint={"every": 0},
    )
    try:
        asyncio.run(train(config, callbacks=[lag, window]))
    finally:
        shutil.rmtree(folder)
    return window, lag


def cost(quick: bool, latency: float) -> None:
    """Print CPU per rollout and loop lag, by rollouts in flight."""
    print(f"{'in flight':>10} {'S':>2} {'reward':>6} {'us CPU/rollout':>15} {'lag p99 ms':>11}")
    for in_flight, target, plain in (
        (1000, 1, False), (1000, 1, True), (1000, 4, False), (10_000, 1, False), (10_000, 1, True),
        (10_000, 4, False),
    ):  # fmt: skip
        groups = in_flight // 8 // (target + 1)
        steps = (6 if quick else 12) * (target + 1) + 2 * (target + 1)
        window, lag = run(
            groups=groups, steps=steps, target=target, plain_reward=plain, latency=latency
        )
        per_rollout = 1e6 * window.cpu / window.rollouts
        kind = "plain" if plain else "async"
        print(f"{in_flight:>10} {target:>2} {kind:>6} {per_rollout:>15.1f} {lag.p99:>11.2f}")


def limit(quick: bool) -> None:
    """Print the fraction of the limit at B=64 G=8 C=512, lognormal sigma 1."""
    mean, steps = 0.5, 40 if quick else 100
    publish = mean / 20
    print(f"\n{'S':>2} {'D':>2} {'fraction':>9} {'dropped':>8} {'staleness':>10}")
    for target, bound in ((0, 0), (1, 2), (4, 8)):
        window, _ = run(
            groups=64, steps=max(12, steps if target else steps // 8), target=target, bound=bound,
            latency=mean, sigma=1.0, capacity=512, update=mean, publish=publish,
        )  # fmt: skip
        count = len(window.staleness)
        best = max(64 * 8 * mean / 512, mean + publish)
        dropped = window.dropped / (64 * count)
        print(
            f"{target:>2} {bound:>2} {best * count / window.wall:>9.3f} {dropped:>8.1%} "
            f"{fmean(window.staleness):>10.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    parser.add_argument(
        "--latency", type=float, default=0.3, help="mean seconds of a completion, for the cost"
    )
    given = parser.parse_args()
    cost(given.quick, given.latency)
    limit(given.quick)


if __name__ == "__main__":
    main()
