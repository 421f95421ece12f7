"""Compare the pipeline with a bare asyncio loop, and with the limit of asynchronous training.

    python -m benchmarks.orchestration [--quick] [--latency 0.3]

A mock engine answers after a seeded lognormal latency; rewards are async; the full run directory is
written. `bare_loop.py` does the same work and nothing else, alternately in the same process. Bars:
at most 2.2 times its CPU per rollout at 1,000 and 10,000 in flight, with an async reward; fraction
of the limit >= 0.97 at S=4, D=8. Loop lag is the 99th percentile, in ms.

The limit of a step of B groups of G rollouts on C engine slots, with a mean latency l, an update of
T and a publication of W: max(B G l / C, T + W), here with T = l and W = l / 20.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any, Literal

from benchmarks.bare_loop import train_bare
from benchmarks.mock_engine import LETTERS, MockAdapter, MockOptions, mock_config
from retrain.environment import Action, Environment, StepResult
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.pipeline.stages import rare_collections
from retrain.scoring import reward
from retrain.types import Completion, Metrics, Prompt

BAR = 2.2
Kind = Literal["async", "plain", "step"]
"""Who gives the reward: an async function, a plain one, or the `step` of an environment."""
ROWS = [{"prompt": f"{c}=", "answer": c * 4} for c in LETTERS] * 64


@reward
async def share_async(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)


@reward
def share(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)


class Echo(Environment):
    """Gives the reward in `step`, so that each rollout has its own task."""

    async def step(self, action: Action) -> StepResult:
        value = share(completion=action.text, answer=self.prompt.answer)
        return StepResult([], value, True, False, {})


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
    kind: Kind = "async",
    **engine: Any,  # any: MockOptions' keys
) -> tuple[Window, Lag]:
    """One run on the mock engine. The window excludes its first and last steps."""
    folder = Path(tempfile.mkdtemp())
    lag, window = Lag(), Window(min(steps - 1, 2 * (target + 1)), steps - 1)
    name = {"plain": "share", "async": "share_async"}.get(kind)
    config = mock_config(
        folder / "run",
        prompts={
            "type": "list",
            "rows": ROWS,
        },
        environment={"type": "benchmarks.orchestration:Echo" if kind == "step" else "single_turn"},
        rewards=[{"type": f"benchmarks.orchestration:{name}"}] if name else [],
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
        asyncio.run(train(config, callbacks=[lag, window], console=False))
    finally:
        shutil.rmtree(folder)
    return window, lag


def run_bare(
    *, groups: int, steps: int, target: int, kind: Kind, latency: float, size: int = 8
) -> tuple[float, Lag]:
    """CPU seconds per rollout and the loop lag of the bare loop, in the window of `run`."""
    lag, first, last = Lag(), min(steps - 1, 2 * (target + 1)), steps - 1
    cpu: dict[int, float] = {}

    async def async_rewards(completions: Sequence[Completion], answer: str) -> Sequence[float]:
        calls = [share_async(completion=c.text, answer=answer) for c in completions]
        return await asyncio.gather(*calls)

    async def plain_rewards(completions: Sequence[Completion], answer: str) -> Sequence[float]:
        return await asyncio.to_thread(
            lambda: [share(completion=c.text, answer=answer) for c in completions]
        )

    async def steps_of(completions: Sequence[Completion], answer: str) -> Sequence[float]:
        environments = [Echo() for _ in completions]
        for environment in environments:
            environment.prompt = Prompt("", (), answer)
        pairs = zip(environments, completions, strict=True)
        results = await asyncio.gather(*[e.step(Action(c.text)) for e, c in pairs])
        return [result.reward for result in results]

    rewards = {"async": async_rewards, "plain": plain_rewards, "step": steps_of}[kind]

    async def go() -> None:
        await lag.on_train_begin(None)
        await train_bare(
            MockAdapter(MockOptions(latency=latency), mock_config(Path("unused"))), ROWS,
            rewards, slots=groups * (target + 1), groups=groups, steps=steps, group_size=size,
            on_step=lambda step: cpu.update({step: time.process_time()}),
        )  # fmt: skip
        await lag.on_train_end(None, None)

    with rare_collections(groups * (target + 1) * size):  # as the pipe
        asyncio.run(go())
    return (cpu[last] - cpu[first]) / ((last - first) * groups * size), lag


def cost(quick: bool, latency: float, repeats: int) -> None:
    """Print CPU per rollout and loop lag of both loops, medians of alternating runs."""
    print(f"{'in flight':>10} {'S':>2} {'reward':>6} {'us pipe':>8} {'us bare':>8} {'ratio':>6} "
          f"{'lag pipe':>9} {'lag bare':>9}")  # fmt: skip
    rows: list[tuple[int, int, Kind]] = [
        (1000, 1, "async"), (1000, 1, "plain"), (1000, 1, "step"), (1000, 4, "async"),
        (10_000, 1, "async"), (10_000, 1, "plain"), (10_000, 4, "async"),
    ]  # fmt: skip
    for in_flight, target, kind in rows:
        groups = in_flight // 8 // (target + 1)
        steps = (6 if quick else 12) * (target + 1) + 2 * (target + 1)
        sizes: Any = {"groups": groups, "steps": steps, "target": target, "latency": latency}
        found = []
        for _ in range(repeats):
            window, lag = run(kind=kind, **sizes)
            bare, bare_lag = run_bare(kind=kind, **sizes)
            pipe = window.cpu / window.rollouts
            found.append((1e6 * pipe, 1e6 * bare, pipe / bare, lag.p99, bare_lag.p99))
        ours, theirs, ratio, late, bare_late = map(median, zip(*found, strict=True))
        verdict = "" if kind != "async" else "met" if ratio <= BAR else f"missed, bar {BAR}"
        print(f"{in_flight:>10} {target:>2} {kind:>6} {ours:>8.1f} "
              f"{theirs:>8.1f} {ratio:>6.2f} {late:>9.2f} {bare_late:>9.2f} {verdict}")  # fmt: skip


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
    parser.add_argument("--repeats", type=int, default=3, help="alternating runs of each row")
    given = parser.parse_args()
    cost(given.quick, given.latency, given.repeats)
    limit(given.quick)


if __name__ == "__main__":
    main()
