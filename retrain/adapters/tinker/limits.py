"""Back-pressure: limits on requests and bytes in flight, and pauses that the service asks for.

All limits are first come, first served, so no user of a client can starve another.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque

SUBMISSIONS = 400
"""Samples that may be submitted at the same time."""
BYTES_A_TOKEN = 10
"""The assumed size of a prompt's token in JSON."""
LARGE_PROMPT = 128 * 1024
"""Bytes; when a larger prompt is rejected, the pause is longer."""


class Budget:
    """Units lent up to a limit; a request above the limit gets the whole budget."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free = limit
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, units: int = 1) -> Loan:
        """Hold `units` within an `async with`; entering waits until they are free."""
        return Loan(self, min(units, self._limit))

    async def acquire(self, units: int) -> None:
        """Wait until `units` (at most the limit) are free, and take them."""
        if not self._waiting and units <= self._free:
            self._free -= units
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((units, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(units)  # it got its units as it was cancelled
            else:
                with contextlib.suppress(ValueError):  # a release may have removed it
                    self._waiting.remove((units, turn))
                self.release(0)
            raise

    def release(self, units: int) -> None:
        """Return units, and give them to the waiters in order."""
        self._free += units
        while self._waiting and self._waiting[0][0] <= self._free:
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)


class Loan:
    """Holds units of a budget within an `async with`.

    A class and not a generator: thousands of live generators would cost the garbage collector a
    large part of the client's time.
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
    """The limits that all sampling sessions of one client share."""

    def __init__(self, in_flight: int, dispatch_bytes: int) -> None:
        self.in_flight = Budget(in_flight)
        """Samples that are submitted or running."""
        self.submissions = Budget(SUBMISSIONS)
        self.bytes = Budget(dispatch_bytes)
        self._resume = 0.0

    def weight(self, tokens: int) -> Loan:
        """The bytes of a prompt of `tokens`, held while it is being sent."""
        return self.bytes.take(BYTES_A_TOKEN * tokens)

    async def pause_over(self) -> None:
        """Wait until the pause is over."""
        wait = self._resume - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
            await self.pause_over()  # it may have been extended meanwhile

    def pause(self, tokens: int, asked: float | None) -> None:
        """Stop submitting for `asked` seconds; by default 1 s, or 5 s after a large prompt."""
        default = 5.0 if BYTES_A_TOKEN * tokens > LARGE_PROMPT else 1.0
        self._resume = max(self._resume, time.monotonic() + (default if asked is None else asked))
