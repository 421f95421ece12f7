"""What a simulated run plays with: an engine, an environment and a reward that fail by chance."""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mock_engine import MockAdapter, MockOptions
from retrain.environment import Environment, StepResult
from retrain.scoring import RewardCalculator

RESET = ("raise", "refused", "silent", "exit", "hang", "cancel", "late")
"""Faults of a call."""
STEP = (*RESET, "observation", "reward", "info")
GARBAGE: tuple[Any, ...] = (5, {"role": "user"}, [7], "text", iter("ab"))


class SilentError(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


@dataclass
class World:
    """What the parts of a history share, and what they saw."""

    draw: random.Random
    fault_rate: float
    bound: int
    """The bound on staleness."""
    outage: tuple[float, float] = (0.0, 0.0)
    """When all calls fail, in seconds of the loop's clock since the start of a process."""
    planted: Counter[str] = field(default_factory=Counter)
    """Rollouts with a fault, by ticket."""
    batches: list[dict[str, dict[str, list[float]]]] = field(default_factory=list)
    """For each update, the advantages by ticket and rollout."""
    wrong: list[str] = field(default_factory=list)
    opened: int = 0
    """Environment instances that are set up and not closed."""
    sampling: int = 0
    """Requests in flight at the engine."""

    def latency(self, mean: float) -> float:
        return self.draw.expovariate(1 / mean)

    def fault(self, kinds: tuple[str, ...]) -> str | None:
        """What fails now, if anything; during the outage, everything does."""
        if self.outage[0] < asyncio.get_running_loop().time() < self.outage[1]:
            return "refused"
        return self.draw.choice(kinds) if self.draw.random() < self.fault_rate else None

    def leftovers(self, tasks: int) -> None:
        """P7: nothing is left of a run that ended."""
        left = {"tasks": tasks, "instances": self.opened, "requests": self.sampling}
        if any(left.values()):
            self.wrong.append(f"P7: left behind: {left}")
        self.opened = self.sampling = 0


class Engine(MockAdapter):
    """The mock engine, with latencies; it checks the age of every token that it trains (P3)."""

    def __init__(self, world: World, config: Any) -> None:
        super().__init__(MockOptions(learning_rate=0.02), config)
        self._world = world

    async def sample(self, prompt_ids: list[int], params: Any, n: int = 1) -> list[Any]:
        self._world.sampling += 1
        try:
            slow = self._world.draw.random() < 0.2  # stragglers make groups stale
            await asyncio.sleep(self._world.latency(10.0 if slow else 0.5))
            return await super().sample(prompt_ids, params, n)
        finally:
            self._world.sampling -= 1

    async def update(self, batch: Any) -> Any:
        groups: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
        for sample in batch.samples:
            rows = zip(sample.versions, sample.advantages, sample.loss_mask, strict=True)
            kept = [(version, advantage) for version, advantage, mask in rows if mask]
            age = self.version - min(version for version, _ in kept)
            if age > self._world.bound:
                self._world.wrong.append(f"P3: a token of {sample.group_id} is {age} versions old")
            groups[sample.group_id][sample.run_id] += [advantage for _, advantage in kept]
        self._world.batches.append(groups)
        await asyncio.sleep(self._world.latency(2.0))
        return await super().update(batch)

    async def publish(self) -> int:
        await asyncio.sleep(self._world.latency(0.5))
        return await super().publish()

    async def save(self, folder: Path) -> Any:
        await asyncio.sleep(self._world.latency(1.0))
        return await super().save(folder)


class Faulty(Environment):
    """Two turns, each of which may fail."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def setup(self) -> None:
        self.world.opened += 1
        self.owner = asyncio.current_task()
        await asyncio.sleep(self.world.latency(0.2))

    async def close(self) -> None:
        self.world.opened -= 1
        if asyncio.current_task() is not self.owner:
            self.world.wrong.append("P11: setup and close ran in different tasks")

    async def reset(self, prompt: Any) -> Any:
        self.turns, self.planted = 0, False
        await asyncio.sleep(self.world.latency(0.2))
        await self._fail(self.world.fault(RESET))
        return prompt.messages

    async def step(self, action: Any) -> Any:
        await asyncio.sleep(self.world.latency(0.5))
        kind = self.world.fault(STEP)
        await self._fail(kind)
        self.turns += 1
        observation: Any = [{"role": "user", "content": "go on"}]
        if kind == "observation":
            observation = self.world.draw.choice(GARBAGE)
        info: Any = {"played": self.turns, "planted": self.planted}
        reward = float("nan") if kind == "reward" else 0.0
        return StepResult(
            observation, reward, self.turns == 2, False, 5 if kind == "info" else info
        )

    async def _fail(self, kind: str | None) -> None:
        if kind is None:
            return
        self.world.planted[self.prompt.id] += not self.planted
        self.planted = True
        await fail(kind)


class Share(RewardCalculator):
    """The share of right letters; it fails for some rollouts."""

    def __init__(self, world: World) -> None:
        self.world = world

    async def calculate(self, trajectory: Any) -> float:
        await asyncio.sleep(self.world.latency(0.3))
        kind = self.world.fault((*RESET, "nan"))
        if kind is not None:
            self.world.planted[trajectory.prompt.id] += 1
            await fail(kind)
        if kind == "nan":
            return float("nan")
        letters, right = trajectory.completion, trajectory.prompt.answer
        return sum(a == b for a, b in zip(letters, right, strict=False)) / len(right)


async def fail(kind: str) -> None:
    """Do what `kind` says; the kinds that are wrong values are the caller's."""
    if kind == "raise":
        raise ValueError("planted")
    if kind == "refused":  # an outage, if it hits a whole group
        raise ConnectionRefusedError
    if kind == "silent":
        raise SilentError
    if kind == "exit":
        raise SystemExit(3)
    if kind == "hang":
        await asyncio.sleep(1e6)
    if kind == "cancel":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0.1)
    if kind == "late":  # it swallows the cancellation of its deadline
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(1e6)
