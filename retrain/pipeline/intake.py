"""Choose the groups of a step: order, staleness, failures, groups without signal.

The bound on staleness (P3) is kept here. The version doesn't change while the groups of a step are
chosen, so a group that is fresh enough when it is taken is fresh enough when it is trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrain.config import RunConfig
from retrain.errors import NoSignalError, OutageError
from retrain.pipeline.ledger import Ledger
from retrain.pipeline.outage import Outage, error_of
from retrain.pipeline.signal import without_signal
from retrain.types import Group, Ticket

Drop = Callable[[Group, str], None]


class Intake:
    """Takes finished groups from the queue `done`, in which `None` only wakes the reader.

    It calls `drop(group, cause)` for every group that is not trained; the cause is `failed`,
    `outage`, `stale` or `no_signal`.
    """

    def __init__(
        self,
        config: RunConfig,
        ledger: Ledger,
        done: asyncio.Queue[Group | None],
        drop: Drop,
        outage: Outage,
    ) -> None:
        self._train = config.train
        self._outage = outage
        self._bound = config.staleness.bound
        self._ledger = ledger
        self._done = done
        self._drop = drop
        self.held: dict[Ticket, Group] = {}
        """Finished groups that no step has taken yet."""
        self.failed_in_a_row = 0
        self._first_error = ""
        self._stopped = False

    def stop(self) -> None:
        """Make `take` return None, at once if it is waiting."""
        if not self._stopped:  # the queue has room for one None
            self._stopped = True
            self._done.put_nowait(None)

    async def take(self, version: int) -> list[Group] | None:
        """The groups of a step in the order of issue; None after `stop`.

        Raises NoSignalError when too many groups in a row had no scored rollout, OutageError at the
        limit of an outage.
        """
        chosen: dict[Ticket, Group] = {}
        try:
            return await self._choose(chosen, version)
        except BaseException:
            self.held |= chosen  # the run fails: a checkpoint saves them
            raise

    async def _choose(self, chosen: dict[Ticket, Group], version: int) -> list[Group] | None:
        refills = self._train.max_refill * self._train.groups_per_step
        while len(chosen) < self._train.groups_per_step:
            group = await self._next(chosen)
            if group is None:
                self.held |= chosen
                return None
            cause = self._unfit(group, version, refills)
            if cause is None:
                chosen[group.ticket] = group
                continue
            refills -= cause == "no_signal"
            self._drop(group, cause)
            if cause == "failed":
                self._count_failure(group)
            elif cause == "outage" and self._outage.expired:
                raise OutageError(
                    f"{error_of(group)}. It worked before in this run; gave up after "
                    f"deadlines.outage = {self._outage.limit:g} s."
                )
        rank = {ticket: index for index, ticket in enumerate(self._ledger.open)}
        return [chosen[ticket] for ticket in sorted(chosen, key=rank.__getitem__)]

    def restore(self, failed_in_a_row: int) -> None:
        """Continue with the failures of a checkpoint, unless the run ended because of them."""
        if failed_in_a_row < self._train.max_failed_groups:
            self.failed_in_a_row = failed_in_a_row

    def drain(self) -> None:
        """Move everything from the queue to `held`, so that a checkpoint saves it.

        Groups of an outage are dropped: a checkpoint doesn't hold what to do with them.
        """
        while not self._done.empty():
            group = self._done.get_nowait()
            if group is not None:
                self.held[group.ticket] = group
        self.drop_held(self._outage.excuses, "outage")

    def drop_held(self, unwanted: Callable[[Group], bool], cause: str) -> None:
        """Drop the groups of `held` that are `unwanted`."""
        for group in filter(unwanted, list(self.held.values())):
            del self.held[group.ticket]
            self._drop(group, cause)

    async def _next(self, chosen: dict[Ticket, Group]) -> Group | None:
        """The next finished group: any, or the one that was issued first with `in_order`."""
        while True:
            wanted = self._wanted(chosen)
            if wanted is not None:
                return self.held.pop(wanted)
            group = await self._done.get()
            if group is not None:
                self.held[group.ticket] = group
            if self._stopped:
                return None

    def _wanted(self, chosen: dict[Ticket, Group]) -> Ticket | None:
        if self._train.order == "ready":
            return next(iter(self.held), None)
        first = next((ticket for ticket in self._ledger.open if ticket not in chosen), None)
        return first if first in self.held else None

    def _unfit(self, group: Group, version: int, refills: int) -> str | None:
        """The cause why a group can't be trained; None when it can."""
        scored = group.scored
        if not scored:
            return "outage" if self._outage.excuses(group) else "failed"
        self.failed_in_a_row = 0
        oldest = group.oldest_version
        if oldest is not None and version - oldest > self._bound:
            return "stale"
        if self._train.no_signal == "refill" and refills > 0 and without_signal(group):
            return "no_signal"
        return None

    def _count_failure(self, group: Group) -> None:
        if self.failed_in_a_row == 0:
            self._first_error = error_of(group)
        self.failed_in_a_row += 1
        if self.failed_in_a_row >= self._train.max_failed_groups:
            raise NoSignalError(
                f"{self.failed_in_a_row} groups in a row had no scored rollout "
                f"(train.max_failed_groups). First error: {self._first_error}"
            )
