"""Wait for a reward or an environment that has worked before and can't be reached now.

Without this, `train.max_failed_groups` would end the run within a second, since a refused
connection takes no time. During an outage one group at a time is tried, with growing pauses, until
a rollout is scored again or `deadlines.outage` is over. Prompts of groups that failed meanwhile are
issued again. Before the first scored rollout there is no outage: a wrong address ends the run.

One prompt that always fails is no outage. So an outage needs two prompts that fail with no scored
rollout in between, and a prompt that fails alone is tried only once more.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress

from retrain.types import Group, Ticket

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
"""Seconds between two tries; each pause is twice as long as the one before."""
logger = logging.getLogger(__name__)


class Outage:
    """The outage under way, if any; `report(state, ...)` writes its event.

    Made with the first group that fails so after a rollout of this run was scored.
    """

    def __init__(self, limit: float, report: Callable[..., None]) -> None:
        self.limit, self._report = limit, report
        self._clock = asyncio.get_running_loop().time
        self._since: float | None = None
        self._pause = self._next = 0.0
        self._probe: Ticket | None = None
        self._moved = asyncio.Event()
        self._failing: set[tuple[int, int]] = set()
        """Epoch and row of the prompts that failed since the last scored rollout."""
        self._tries: Counter[tuple[int, int]] = Counter()
        self._excused: set[Ticket] = set()

    @property
    def expired(self) -> bool:
        """Whether the outage has lasted for `deadlines.outage` seconds."""
        return self._since is not None and self._clock() - self._since >= self.limit

    @property
    def suspected(self) -> bool:
        """Whether other prompts should be played before those that failed: they show the cause."""
        return self._since is not None or bool(self._failing)

    def excuses(self, group: Group) -> bool:
        """Whether the prompt of this group should be played again."""
        return group.ticket in self._excused

    def see(self, group: Group) -> None:
        """Look at a group that was just played."""
        ticket = group.ticket
        prompt = ticket.epoch, ticket.row
        if group.scored:
            self._failing.clear()
            del self._tries[prompt]
            self._end()
        elif not is_unreachable(group):
            if ticket == self._probe:
                self._end()
        else:
            self._tries[prompt] += 1
            alone = self._tries[prompt] > 1
            if not alone:
                self._failing.add(prompt)
            if self._since is None and len(self._failing) > 1:
                self._begin(error_of(group))
            elif ticket == self._probe:
                self._wait(min(2 * self._pause, LONGEST_PAUSE))
            if self._since is not None or not alone:
                self._excused.add(ticket)

    async def turn(
        self, ticket: Ticket, waiting: Callable[[], AbstractContextManager[None]]
    ) -> None:
        """Return when this ticket may be played: at once, unless there is an outage.

        `waiting` is entered during a pause, which is no stall.
        """
        while self._since is not None:
            self._moved.clear()
            pause = self._next - self._clock()
            if self._probe is not None:
                await self._moved.wait()
            elif pause > 0:
                with waiting(), suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await self._moved.wait()
            else:
                self._probe = ticket
                return

    def _begin(self, error: str) -> None:
        self._since = self._clock()
        self._wait(FIRST_PAUSE)
        logger.warning(
            "outage: %s. It has worked before, so the run waits: next try in %.3g s, gives up "
            "after deadlines.outage = %.3g s.",
            error,
            self._next - self._since,
            self.limit,
        )
        self._report("began", error=error, limit=self.limit)

    def _wait(self, pause: float) -> None:
        """Try again after a pause, and at the end of the limit."""
        assert self._since is not None
        self._pause, self._probe = pause, None
        self._next = min(self._clock() + pause, self._since + self.limit)
        self._moved.set()

    def _end(self) -> None:
        if self._since is None:
            return
        seconds = self._clock() - self._since
        self._since = self._probe = None
        self._moved.set()
        logger.warning("the outage is over after %.0f s", seconds)
        self._report("over", seconds=seconds)


def is_unreachable(group: Group) -> bool:
    """Whether the group failed only since something can't be reached."""
    return all(trajectory.outage for trajectory in group.trajectories)


def error_of(group: Group) -> str:
    """Why the first rollout of a group failed."""
    return str(group.trajectories[0].info.get("error", "unknown cause"))
