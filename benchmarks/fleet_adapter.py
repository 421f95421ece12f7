"""The adapter of `benchmarks.fleet`: a fleet of simulated engines behind the pipe's interface.

It trains nothing: an update is a sleep. Pushes and failures go as with servers of vLLM: a request
in flight on an engine that dies is sent again to another one; the engine restarts with base
weights, and serves again only after the present weights were pushed to it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, Self

from benchmarks.fleet_engine import TOKENS, Curve, Engine, EngineLostError, InFlight
from benchmarks.mock_engine import LETTERS, MockAdapter, MockOptions
from retrain.config import RunConfig
from retrain.environment import Action, Environment, StepResult
from retrain.sampler import SamplingParams
from retrain.scoring import reward
from retrain.types import Batch, Completion, Metrics
from retrain.vllm.routing import Router

OPENING = 4
"""Ids of a prompt: 512 tokens."""
ANSWER = "ok\n\n"
"""An observation: 512 tokens."""


class FleetOptions(MockOptions):
    """`update` is the seconds of an update."""

    adapter: ClassVar[str] = "benchmarks.fleet_adapter:Fleet"
    engines: int = 8
    curve: Curve = Curve()
    in_flight: InFlight = "recompute"
    push: float = 0.5
    """Seconds of a push before the engines pause: gathering or writing the weights."""
    paused: float = 1.5
    """Seconds of a push in which the engines are paused; an adapter needs none."""
    mean_tokens: float = 2048.0
    """Of a turn; lognormal with `sigma`, cut off at sampling.max_tokens."""
    sigma: float = 1.0
    failures: float = 0.0
    """Mean seconds between two deaths of one engine; 0 is never."""
    restart: float = 60.0
    """Seconds until an engine that died is up again, with base weights."""

    @property
    def pause(self) -> float:
        return 0.0 if self.in_flight == "adapter" else self.paused


class Fleet(MockAdapter):
    """The adapter; it checks what a fleet must never do, and lists violations in `wrong`."""

    options: FleetOptions

    def __init__(self, options: FleetOptions, config: RunConfig | None = None) -> None:
        super().__init__(options, config)
        salted = options.in_flight == "adapter"
        self.engines = [Engine(options.curve, salted) for _ in range(options.engines)]
        self.router = Router(options.engines)
        self.wrong: list[str] = []
        self.trained: set[str] = set()
        """Rollouts that were trained."""
        self.trained_tokens = 0
        self.updating = 0.0
        """Seconds in updates."""
        self.longest = 0.0
        """Seconds of the longest request."""
        self.deaths = 0
        self._mu = math.log(options.mean_tokens / TOKENS) - options.sigma**2 / 2
        self._pushing = asyncio.Lock()
        self._restarted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        if self.options.failures:
            self._tasks = [
                asyncio.create_task(self._fail_and_restart(number, random.Random(number)))
                for number in range(len(self.engines))
            ]
        return self

    async def __aexit__(self, kind: Any, error: Any, trace: Any) -> None:  # any: as in the base
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        draw = random.Random(params.seed)
        lengths = [self.length(draw, params.max_tokens) for _ in range(n)]
        began = self._now()
        served = self.version
        versions = await self._sampled(prompt_ids, [length * TOKENS for length in lengths])
        self.longest = max(self.longest, self._now() - began)
        if min(versions) < served:
            self.wrong.append(f"version {min(versions)} sampled after {served} was published")
        return [
            self._completion(draw.choices(LETTERS, k=length), version)
            for length, version in zip(lengths, versions, strict=True)
        ]

    def length(self, draw: random.Random, limit: int) -> int:
        """The length of a completion in ids."""
        return min(limit, max(1, round(draw.lognormvariate(self._mu, self.options.sigma))))

    async def update(self, batch: Batch) -> Metrics:
        began = self._now()
        runs = {sample.run_id for sample in batch.samples}
        if again := runs & self.trained:
            self.wrong.append(f"trained twice: {sorted(again)[:3]}")
        self.trained |= runs
        self.trained_tokens += TOKENS * batch.denominators.tokens
        metrics = await super().update(batch)
        self.updating += self._now() - began
        return metrics

    async def publish(self) -> int:
        """Push the weights to all engines that are up."""
        options = self.options
        async with self._pushing:
            await asyncio.sleep(options.push)
            async with asyncio.TaskGroup() as pushes:
                for engine in self.engines:
                    if engine.up:
                        swap = engine.swap(self.version + 1, options.in_flight, options.pause)
                        pushes.create_task(swap)
            self.version += 1
        return self.version

    async def _sampled(self, prompt_ids: list[int], tokens: Sequence[int]) -> list[int]:
        """The oldest version per row. A request whose engine died is sent again."""
        while True:
            up = [number for number, engine in enumerate(self.engines) if engine.up]
            if not up:
                self._restarted.clear()
                await self._restarted.wait()
                continue
            spelled = [token for token in prompt_ids for _ in range(TOKENS)]
            number = self.router.choose(spelled, up)
            self.router.rows[number] += len(tokens)
            try:
                with suppress(EngineLostError):
                    return await self.engines[number].sample(prompt_ids, tokens)
            finally:
                self.router.rows[number] -= len(tokens)

    def _completion(self, letters: Sequence[str], version: int) -> Completion:
        text = "".join(letters)
        return Completion(text.encode(), [-1.0] * len(text), text, "length", version)

    async def _fail_and_restart(self, number: int, draw: random.Random) -> None:
        engine = self.engines[number]
        while True:
            await asyncio.sleep(draw.expovariate(1 / self.options.failures))
            engine.die()
            self.router.forget(number)
            self.deaths += 1
            await asyncio.sleep(self.options.restart)
            async with self._pushing:  # so that no newer version is published meanwhile
                await asyncio.sleep(self.options.push + self.options.pause)
                engine.start(self.version)
            self._restarted.set()

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


class Talk(Environment):
    """Answers each turn after a random time, until the last one."""

    def __init__(self, turns: int = 1, seconds: float = 2.0) -> None:
        self.turns, self.seconds = turns, seconds

    async def reset(self, prompt: Any) -> Any:  # any: as in the base
        self.played, self.draw = 0, random.Random(prompt.id)
        return await super().reset(prompt)

    async def step(self, action: Action) -> StepResult:
        self.played += 1
        if self.played == self.turns:
            return StepResult([], 0.0, True, False, {})
        await asyncio.sleep(self.draw.expovariate(1 / self.seconds))
        return StepResult([{"role": "user", "content": ANSWER}], 0.0, False, False, {})


@reward
async def luck(completion: str) -> float:
    """A coin flip, so that nearly every group has a signal."""
    return float(completion[-1] in LETTERS[:4])
