"""How much may be under way at once: counts, bytes, and the pause that the service asked for.

Who asks first is served first, so that one user of a client can't starve another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

SUBMISSIONS = 400
"""Samples whose submission may be on its way at once."""
BYTES_A_TOKEN = 10
"""What a token of a prompt is taken to weigh in JSON."""
LARGE_PROMPT = 128 * 1024
"""Bytes; a prompt above it that was turned away pauses everybody for longer."""


class Budget:
    """Units that are lent up to a limit; a request larger than the limit is served alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, units: int = 1) -> Loan:
        """Hold `units` within an `async with`; entering waits until they are free."""
        return Loan(self, min(units, self._limit))

    async def acquire(self, units: int) -> None:
        """Wait for at most the limit's units."""
        if not self._waiting and units <= self._free:
            self._free -= units
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(units)  # it was served at the very moment of the cancellation
            else:
                with contextlib.suppress(ValueError):  # a release may have passed over it
                    self._waiting.remove((units, turn))
                self.release(0)
            raise

    def release(self, units: int) -> None:
        """Give back what was acquired, and serve those who wait."""
        self._free += units
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)


class Loan:
    """Units of a budget for as long as the block runs.

    Classes rather than generators: thousands of live ones cost the garbage collector a good part
    of the client's time.
    """

    __slots__ = ("_budget", "_units")

    def __init__(self, budget: Budget, units: int) -> None:
        self._budget = budget
        self._units = units

    async def __aenter__(self) -> None:
        await self._budget.acquire(self._units)

    async def __aexit__(self, *exception: object) -> None:
        self._budget.release(self._units)


class Backpressure:
    """What every sampling session of one client shares."""

    def __init__(self, in_flight: int, dispatch_bytes: int) -> None:
        self.in_flight = Budget(in_flight)
        """Samples that were asked for and have not come back."""
        self.submissions = Budget(SUBMISSIONS)
        self.bytes = Budget(dispatch_bytes)
        self._resume = 0.0

    def weight(self, tokens: int) -> Loan:
        """The bytes of a prompt of `tokens`, held while it is being sent."""
        return self.bytes.take(BYTES_A_TOKEN * tokens)

    async def pause_over(self) -> None:
        """Wait out what the service asked for."""
        wait = self._resume - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
            await self.pause_over()  # it may have been made longer meanwhile

    def pause(self, tokens: int, asked: float | None) -> None:
        """The service is full: nobody submits for a while (1 s, 5 s after a large prompt)."""
        default = 5.0 if BYTES_A_TOKEN * tokens > LARGE_PROMPT else 1.0
        self._resume = max(self._resume, time.monotonic() + (default if asked is None else asked))
