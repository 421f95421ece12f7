"""The `setup` and `close` of a reward, both in one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrain.concurrency.deadlines import STUCK_SECONDS, absorb, own_task, user_call
from retrain.config import DeadlinesConfig
from retrain.errors import UserCodeError
from retrain.rewarding.base import RewardCalculator
from retrain.rewarding.processes import ProcessReward


class Tenure:
    """From `setup` to `close` of one calculator.

    Both run in one task, since an `async with` must be left in the task that entered it: anyio's
    cancel scopes and the clients built on them require that.
    """

    def __init__(
        self,
        name: str,
        calculator: RewardCalculator,
        deadlines: DeadlinesConfig,
        fault: Callable[[str], None],
    ) -> None:
        """Begin with `setup`. `fault` is called with an error that affects no rollout."""
        self._owner, self._calculator = f"reward '{name}'", calculator
        self._deadlines, self._fault = deadlines, fault
        self._ready: asyncio.Future[UserCodeError | None] = asyncio.Future()
        self._over = asyncio.Event()
        self._task = own_task(self._serve(), name=self._owner)

    async def ready(self) -> UserCodeError | None:
        """Wait for `setup`; returns its error."""
        return await asyncio.shield(self._ready)

    async def end(self) -> None:
        """Close the calculator; a `setup` under way is cancelled first. Code that never ends is
        abandoned."""
        self._over.set()
        if not self._ready.done():
            self._task.end()
        seconds = self._deadlines.close + STUCK_SECONDS
        _, stuck = await asyncio.wait([self._task], timeout=seconds)
        if stuck:
            self._fault(f"{self._owner} still runs {seconds:g} s after the run ended")

    async def _serve(self) -> None:
        try:
            await self._call("setup")
            self._ready.set_result(None)
            await self._over.wait()
        except UserCodeError as error:
            self._ready.set_result(self._named(error))
        except asyncio.CancelledError:  # by `end`, or by what `setup` left running: close it
            if not self._ready.done():
                self._ready.set_result(UserCodeError(f"{self._owner}: setup was cancelled"))
            elif not self._over.is_set():
                self._fault(f"{self._owner}: user code cancelled its task, so it is closed")
        await absorb()
        try:
            await self._call("close")
        except UserCodeError as error:
            self._fault(str(self._named(error)))

    async def _call(self, hook: str) -> None:
        """Await `setup` or `close`; raises UserCodeError or LateError."""
        seconds, call = getattr(self._deadlines, hook), getattr(self._calculator, hook)
        if isinstance(self._calculator, ProcessReward):  # a late worker says where it was
            seconds += STUCK_SECONDS
        await user_call(f"{self._owner}: {hook}", call, seconds, hook)

    def _named(self, error: UserCodeError) -> UserCodeError:
        """The error; that of a worker process names its owner already."""
        cause, in_worker = error.__cause__, isinstance(self._calculator, ProcessReward)
        return cause if in_worker and isinstance(cause, UserCodeError) else error
