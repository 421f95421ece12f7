"""Whether a failed call is sent again, and after which pause."""

from __future__ import annotations

import math
import random
import time
from dataclasses import dataclass

from retrain.wire.refusals import RemoteError

SHORT = 20.0
"""Seconds of retries while the service has never given a good reply, or once a run is ending."""
MAX_RETRY_AFTER = 60.0
"""Seconds; the longest pause that a service can ask for."""
QUIET = 10.0
"""Seconds between two warnings of one client that calls fail."""
MALFORMED_ATTEMPTS = 3
"""A truncated reply is complete the next time; a reply in another format never is."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and after which pauses, a call is sent again."""

    attempts: int | None = None
    """None: as many as `total` leaves time for."""
    first: float = 0.5
    """Seconds before the second attempt; doubled each time, with 25 % of jitter."""
    cap: float = 10.0
    """Seconds; the longest pause that doubling leads to."""
    total: float = 300.0
    """Seconds that all attempts of one call may take together."""
    patient: frozenset[int | str | None] = frozenset()
    """Statuses and codes of errors that use up no attempts and no time: only the caller's own
    deadline ends the call."""

    def pause(self, attempt: int, asked: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt` (from 0); `asked` is the service's."""
        if asked is not None:
            return min(max(asked, 0.0), MAX_RETRY_AFTER)
        doubled: float = self.first * 2.0 ** min(attempt, 30)
        return min(doubled, self.cap) * random.uniform(0.75, 1.25)


NO_RETRY = RetryPolicy(attempts=1)


@dataclass(slots=True)
class Outlook:
    """What decides how long retries are worthwhile; all calls of a client share it."""

    reached: bool = False
    """Whether the service has given a good reply. One that never has is given up soon: the address
    is likely wrong."""
    stopping_since: float = math.inf
    """When the run began to end, by `time.monotonic`."""
    warned: float = -math.inf
    """When a warning of a failure was logged last, by `time.monotonic`."""

    def may_warn(self) -> bool:
        """Whether to log a warning now: one in `QUIET` seconds is enough for all calls."""
        now = time.monotonic()
        if now - self.warned < QUIET:
            return False
        self.warned = now
        return True


class RetryBudget:
    """The failures of one call, and the time that is left for further attempts."""

    def __init__(self, policy: RetryPolicy, outlook: Outlook) -> None:
        self.failures = 0
        self._policy = policy
        self._outlook = outlook
        self._begin()

    def _begin(self) -> None:
        self._began, total = time.monotonic(), self._policy.total
        self._ends = self._began + (total if self._outlook.reached else min(total, SHORT))

    @property
    def left(self) -> float:
        """Seconds."""
        if_stopping = max(self._began, self._outlook.stopping_since) + SHORT
        return min(self._ends, if_stopping) - time.monotonic()

    def pause(self, error: RemoteError, *, safe: bool = True) -> float:
        """Seconds until the next attempt.

        Raises `error` when the attempts or the time are used up, when the call can't succeed, or
        when it isn't `safe` to send it again.
        """
        if self._policy.patient & {error.status, error.code}:
            self._begin()
            return 0.0 if error.code == "timeout" else self._policy.pause(3, error.retry_after)
        pause = self._policy.pause(self.failures, error.retry_after)
        self.failures += 1
        most = self._policy.attempts or math.inf
        if error.code == "malformed":
            most = min(most, MALFORMED_ATTEMPTS)
        if error.retryable and safe and self.failures < most and pause < self.left:
            return pause
        if self.failures > 1:
            error.add_note(f"gave up after {self.failures} attempts")
        raise error
