"""The plug-ins of the runs in test_knobs.py; `COUNTS` is what they saw, for the run's trace."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from retrain import Environment, RewardCalculator, StepResult
from retrain.observe.callbacks import Callback

COUNTS: Counter[str] = Counter()
SLOW = 0.05


@contextmanager
def counted(what: str) -> Iterator[None]:
    """Remember how many were inside at once."""
    COUNTS[f"{what} now"] += 1
    COUNTS[f"{what} at once"] = max(COUNTS[f"{what} at once"], COUNTS[f"{what} now"])
    try:
        yield
    finally:
        COUNTS[f"{what} now"] -= 1


class Scene(Environment):
    """Some turns; what is named `slow` takes `SLOW` seconds, what is named `broken` raises.

    The first rollouts of the prompt "a=" wait until so many steps are `trained`, or so many turns
    of others are `played`.
    """

    def __init__(
        self, turns: int = 1, slow: str = "", broken: str = "", trained: int = 0, played: int = 0
    ) -> None:
        self.turns, self.slow, self.broken = turns, slow, broken
        self.until = {"trained": trained, "played": played}

    async def setup(self) -> None:
        COUNTS["instances"] += 1
        with counted("setup"):
            await asyncio.sleep(0.005)
            await self._pass("setup")

    async def reset(self, prompt: Any) -> Any:
        self.turn = 0
        await self._pass("reset")
        return prompt.messages

    async def step(self, action: Any) -> StepResult:
        self.turn += 1
        await self._pass("step")
        if self.prompt.messages[-1]["content"] == "a=" and not COUNTS["let go"]:
            while any(COUNTS[k] < n for k, n in self.until.items()):  # noqa: ASYNC110 - see COUNTS
                await asyncio.sleep(0.01)
            COUNTS["let go"] = 1
        COUNTS["played"] += 1
        again = [{"role": "user", "content": "+"}]
        return StepResult(again, 0.0, self.turn >= self.turns, False, {})

    async def close(self) -> None:
        await self._pass("close")

    async def _pass(self, stage: str) -> None:
        if stage == self.broken:
            raise ValueError(f"{stage} is broken")
        if stage == self.slow:
            await asyncio.sleep(SLOW)


class Letters(RewardCalculator):
    """Some number between 0 and 1 that depends on the completion; slow or flat when told so."""

    def __init__(self, slow: bool = False, flat: bool = False) -> None:
        self.slow, self.flat = slow, flat

    async def calculate(self, trajectory: Any) -> float:
        with counted("rewards"):
            await asyncio.sleep(SLOW if self.slow else 0)
        return 0.0 if self.flat else sum(map(ord, trajectory.completion)) % 97 / 97


class Notes(Callback):
    """Counts steps; `to` names a file of the run directory that they are written to."""

    def __init__(self, to: str = "") -> None:
        self.to = to

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        COUNTS["trained"] += 1
        if self.to:
            (trainer.run_dir.path / self.to).write_text(str(step))
