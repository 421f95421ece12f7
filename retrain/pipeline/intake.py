"""The groups of a run: `Desk` has those under way, `Intake` chooses those of a step.

- `Desk.drop` and `Desk.trained` are the only ways in which a group leaves the run.
- The bound on staleness (P3) is kept by `Intake`. The version doesn't change while the groups of a
  step are chosen, so a group that is fresh enough when it is taken is fresh enough when trained.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from retrain.config import RunConfig
from retrain.errors import NoSignalError, OutageError
from retrain.pipeline.ledger import Ledger
from retrain.pipeline.outage import Outage, error_of, is_unreachable
from retrain.pipeline.recorder import Recorder
from retrain.pipeline.signal import without_signal
from retrain.prompts import PromptSource
from retrain.types import Group, Prompt, Ticket

AGAIN = ("stale", "outage", "unfinished")
"""Causes of a drop after which the prompt is issued again. `unfinished`: the run failed first."""


class Desk:
    """The groups under way, from the issue of a prompt to the step that trains it."""

    def __init__(self, config: RunConfig, prompts: PromptSource, record: Recorder) -> None:
        self._config, self._prompts, self._record = config, prompts, record
        train = config.train
        # now: user code is not to run in a step or a save
        self.rows, self.rows_hash = len(prompts), prompts.rows_hash()
        self.epoch_length = prompts.epoch_length
        self.ledger = Ledger(
            lambda epoch: prompts.order(epoch, train.seed, train.shuffle), self.epoch_length
        )
        most_open = (config.staleness.target + 1) * train.groups_per_step
        self.in_flight = most_open * config.algorithm.group_size
        """The most rollouts that are open at once."""
        self.slots = config.rollout.slots or most_open
        self.todo: asyncio.Queue[Prompt] = asyncio.Queue(self.slots)
        # room for all groups and the None of `stop`, so that `put_nowait` never fails
        self.done: asyncio.Queue[Group | None] = asyncio.Queue(most_open + 1)
        self.admit = asyncio.Event()
        """Set when a group has left the run."""
        self.intake = Intake(config, self.ledger, self.done, self.drop, record.outage)
        self.kept: dict[Ticket, Group] = {}
        """Finished groups of the checkpoint, until their tickets are issued again."""
        self.taken: list[Group] = []
        """Groups of the step under way, until they are trained."""

    def prompt(self, ticket: Ticket) -> Prompt:
        """The prompt of a ticket. Raises PromptError if its row is invalid."""
        return self._prompts.prompt(ticket, self._config.train.seed)

    def drop(self, group: Group, cause: str) -> None:
        """Drop a finished group; for the causes in `AGAIN` its prompt is issued again."""
        again = self.ledger.reissue(group.ticket) if cause in AGAIN else None
        if again is None:
            self.ledger.retire([group.ticket])
        self._record.dropped(group, cause, again)
        self.admit.set()

    def trained(self, groups: Sequence[Group]) -> None:
        self.ledger.retire(group.ticket for group in groups)
        self.admit.set()


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
        drop: Callable[[Group, str], None],
        report: Callable[..., None],
    ) -> None:
        """`report(state, ...)` writes the event of an outage."""
        self._train = config.train
        self.outage: Outage | None = None
        self._patience, self._report = config.deadlines.outage, report
        self._proven = False
        """Whether a rollout of this run was scored."""
        self._bound = config.staleness.bound
        self._ledger = ledger
        self._done = done
        self._drop = drop
        self.held: dict[Ticket, Group] = {}
        """Finished groups that no step has taken yet."""
        self.failed_in_a_row = 0
        self._first_error = ""
        self._stopped = False

    def see(self, group: Group) -> None:
        """Look at a group that was just played: it may begin or end an outage."""
        scored = bool(group.scored)
        self._proven = self._proven or scored
        if self.outage is None:
            if scored or not (self._proven and self._patience and is_unreachable(group)):
                return
            self.outage = Outage(self._patience, self._report)
        self.outage.see(group)

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
            elif cause == "outage" and self.outage is not None and self.outage.expired:
                raise OutageError(
                    f"{error_of(group)}. It worked before in this run; gave up after "
                    f"deadlines.outage = {self._patience:g} s."
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
        if self.outage is not None:
            self.drop_held(self.outage.excuses, "outage")

    def drop_held(self, unwanted: Callable[[Group], bool], cause: str) -> None:
        for group in filter(unwanted, list(self.held.values())):
            del self.held[group.ticket]
            self._drop(group, cause)

    async def _next(self, chosen: dict[Ticket, Group]) -> Group | None:
        """The next finished group: any, or the one that was issued first with `in_order`."""
        while True:
            if (wanted := self._wanted(chosen)) in self.held:
                return self.held.pop(wanted)
            group = await self._done.get()
            if group is not None:
                self.held[group.ticket] = group
            if self._stopped:
                return None

    def _wanted(self, chosen: dict[Ticket, Group]) -> Ticket | None:
        if self._train.order == "ready":
            return next(iter(self.held), None)
        return next((ticket for ticket in self._ledger.open if ticket not in chosen), None)

    def _unfit(self, group: Group, version: int, refills: int) -> str | None:
        """The cause why a group can't be trained; None when it can."""
        if not group.scored:
            excused = self.outage is not None and self.outage.excuses(group)
            return "outage" if excused else "failed"
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
