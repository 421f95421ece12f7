"""Back-pressure: limits on requests and bytes in flight, and pauses that the service asks for."""

from __future__ import annotations

import asyncio
import time

from retrain.supervision.sharing import Capacity

SUBMISSIONS = 400
"""Samples that may be submitted at the same time."""
BYTES_A_TOKEN = 10
"""The assumed size of a prompt's token in JSON."""
LARGE_PROMPT = 128 * 1024
"""Bytes; when a larger prompt is rejected, the pause is longer."""


class Backpressure:
    """The limits that all sampling sessions of one client share."""

    def __init__(self, in_flight: int, dispatch_bytes: int) -> None:
        self.in_flight = Capacity(in_flight)
        """Samples that are submitted or running."""
        self.submissions = Capacity(SUBMISSIONS)
        self.bytes = Capacity(dispatch_bytes)
        """Of the prompts that are being sent, `BYTES_A_TOKEN` each token."""
        self._resume = 0.0

    async def pause_over(self) -> None:
        """Wait until the pause is over."""
        while (wait := self._resume - time.monotonic()) > 0:  # noqa: ASYNC110 - may be extended
            await asyncio.sleep(wait)

    def pause(self, tokens: int, asked: float | None) -> None:
        """Stop submitting for `asked` seconds; by default 1 s, or 5 s after a large prompt."""
        default = 5.0 if BYTES_A_TOKEN * tokens > LARGE_PROMPT else 1.0
        self._resume = max(self._resume, time.monotonic() + (default if asked is None else asked))
