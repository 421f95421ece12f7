"""Back-pressure: limits on requests in flight, and pauses that the service asks for.

All limits are first come, first served, so no user of a client can starve another.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractAsyncContextManager, nullcontext

SUBMISSIONS = 400
"""Samples that may be submitted at the same time."""
BYTES_A_TOKEN = 10
"""The assumed size of a prompt's token in JSON."""
LARGE_PROMPT = 128 * 1024
"""Bytes of a large prompt: few are sent at once, and after a rejected one the pause is longer."""


class Backpressure:
    """The limits that all sampling sessions of one client share."""

    def __init__(self, in_flight: int, dispatch_bytes: int) -> None:
        self.in_flight = asyncio.Semaphore(in_flight)
        """Samples that are submitted or running."""
        self.submissions = asyncio.Semaphore(SUBMISSIONS)
        self._large = asyncio.Semaphore(max(1, dispatch_bytes // LARGE_PROMPT))
        self._resume = 0.0

    def turn(self, tokens: int) -> AbstractAsyncContextManager[None]:
        """Held while a prompt of `tokens` is being sent; limits the large ones."""
        return self._large if _is_large(tokens) else nullcontext()

    async def pause_over(self) -> None:
        """Wait until the pause is over."""
        wait = self._resume - time.monotonic()
        if wait > 0:
            await asyncio.sleep(wait)
            await self.pause_over()  # it may have been extended meanwhile

    def pause(self, tokens: int, asked: float | None) -> None:
        """Stop submitting for `asked` seconds; by default 1 s, or 5 s after a large prompt."""
        default = 5.0 if _is_large(tokens) else 1.0
        self._resume = max(self._resume, time.monotonic() + (default if asked is None else asked))


def _is_large(tokens: int) -> bool:
    return BYTES_A_TOKEN * tokens > LARGE_PROMPT
