"""The `setup` and `close` of a reward that has its own, both in one task (P11)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrain.config import DeadlinesConfig
from retrain.errors import UserCodeError
from retrain.scoring.base import RewardCalculator
from retrain.scoring.processes import ProcessReward
from retrain.supervision.boundary import STUCK_SECONDS, Actor


class Tenure:
    """From `setup` to `close` of one calculator."""

    def __init__(
        self,
        name: str,
        calculator: RewardCalculator,
        deadlines: DeadlinesConfig,
        fault: Callable[[str], None],
    ) -> None:
        """`fault` is called with an error that affects no rollout."""
        self._owner, self._calculator = f"reward '{name}'", calculator
        self._deadlines, self._fault = deadlines, fault
        self._actor = Actor(self._owner, self._lost)
        self._closing: asyncio.Task[None] | None = None

    async def begin(self) -> UserCodeError | None:
        """Set it up; returns what went wrong."""
        return await self._called("setup")

    async def end(self) -> None:
        """Close it. Code that never ends is abandoned."""
        await (self._closing or self._close())

    def _lost(self) -> None:
        self._fault(f"{self._owner}: user code cancelled its task, so it is closed")
        self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        problem = str(await self._called("close") or "")
        if not await self._actor.end():
            problem = f"{problem or self._owner}; it is abandoned, since it does not end"
        if problem:
            self._fault(problem)

    async def _called(self, hook: str) -> UserCodeError | None:
        """Await `setup` or `close`; returns its error. That of a worker names its owner already."""
        seconds, call = getattr(self._deadlines, hook), getattr(self._calculator, hook)
        in_worker = isinstance(self._calculator, ProcessReward)
        if in_worker:  # a late worker says where it was
            seconds += STUCK_SECONDS
        try:
            await self._actor.call(f"{self._owner}: {hook}", call, seconds, hook)
        except UserCodeError as error:
            cause = error.__cause__
            return cause if in_worker and isinstance(cause, UserCodeError) else error
        return None
