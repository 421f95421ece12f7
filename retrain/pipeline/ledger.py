"""The state of each prompt: to be issued, open (issued and not trained yet), or done.

This upholds guarantee P1: a ticket leaves `open` once, through `retire` (trained, or dropped for
good) or `reissue` (a new attempt replaces it). A resume issues again what was open at the
checkpoint, in the same order; groups that were finished by then are in the checkpoint and are not
sampled again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from retrain.supervision.threads import in_thread
from retrain.types import Ticket

AT_ONCE = 10_000
"""Rows of an epoch that are put in order on the event loop, which takes milliseconds."""

TWICE = range(2)
"""A checkpoint may be at the end of its epoch, which only the length of the order shows."""


class Ledger:
    """Issues tickets, epoch after epoch; `order(epoch)` lists the rows in the order of issue."""

    def __init__(self, order: Callable[[int], Sequence[int]], rows: int) -> None:
        """`rows` is the number of rows in an epoch, which decides what `ready` does."""
        self._order_of, self._rows = order, rows
        self.epoch = 0
        self._position = 0
        self._order: Sequence[int] | None = None
        """That of the epoch, once it was needed."""
        self._again: deque[Ticket] = deque()
        self.open: dict[Ticket, None] = {}
        """Issued and not trained yet, in the order of issue."""

    async def ready(self) -> None:
        """Put the rows of the next ticket's epoch in order, if they are many (5 million take 5 to
        20 seconds), in a thread. Otherwise `issue` does it."""
        for _ in TWICE if self._rows > AT_ONCE else ():
            if self._turned():
                self._order = await in_thread(partial(self._order_of, self.epoch))

    def issue(self, *, fresh: bool = False) -> Ticket:
        """The next ticket: one that was reissued, else (or if `fresh`) the epoch's next row."""
        ticket = self._next_row() if fresh or not self._again else self._again.popleft()
        self.open[ticket] = None
        return ticket

    def retire(self, tickets: Iterable[Ticket]) -> None:
        """Mark tickets as done: trained, or dropped. Raises KeyError for one that isn't open."""
        for ticket in tickets:
            del self.open[ticket]

    def reissue(self, ticket: Ticket) -> Ticket:
        """Replace an open ticket by the next attempt at its prompt, which is returned."""
        self.retire([ticket])
        again = ticket._replace(attempt=ticket.attempt + 1)
        self._again.append(again)
        return again

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self.epoch,
            "position": self._position,
            "again": [str(ticket) for ticket in self._again],
            "open": [str(ticket) for ticket in self.open],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state()`: what was open then is issued again first."""
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = None
        self.open = {}
        self._again = deque(Ticket.parse(text) for text in (*state["open"], *state["again"]))

    def _next_row(self) -> Ticket:
        for _ in TWICE:
            if self._turned():
                self._order = self._order_of(self.epoch)
        assert self._order is not None
        row = self._order[self._position]
        self._position += 1
        return Ticket(self.epoch, row)

    def _turned(self) -> bool:
        """Begin the next epoch if all rows of this one are issued; whether its order is needed."""
        if self._order is not None and self._position == len(self._order):
            self.epoch += 1
            self._position = 0
            self._order = None
        return self._order is None
