"""The `setup` and `close` of a reward, both in one task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrain.concurrency.deadlines import STUCK_SECONDS, absorb, own_task, user_call
from retrain.config import DeadlinesConfig
from retrain.errors import UserCodeError
from retrain.rewarding.base import RewardCalculator


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
        """Begin with `setup`. `fault` is called with the error of `close`."""
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
        await asyncio.wait([self._task], timeout=self._deadlines.close + STUCK_SECONDS)

    async def _serve(self) -> None:
        seconds, what = self._deadlines.setup, f"{self._owner}: setup"
        try:
            await user_call(what, self._calculator.setup, seconds, "setup")
            self._ready.set_result(None)
            await self._over.wait()
        except UserCodeError as error:  # that of a worker process names its owner already
            cause = error.__cause__
            self._ready.set_result(cause if isinstance(cause, UserCodeError) else error)
        except asyncio.CancelledError:  # by `end`, or by what `setup` left running: close it
            if not self._ready.done():
                self._ready.set_result(UserCodeError(f"{what} was cancelled"))
        await absorb()
        seconds, what = self._deadlines.close, f"{self._owner}: close"
        try:
            await user_call(what, self._calculator.close, seconds, "close")
        except UserCodeError as error:
            cause = error.__cause__
            self._fault(str(cause if isinstance(cause, UserCodeError) else error))
