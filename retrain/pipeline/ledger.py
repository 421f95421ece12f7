"""Which prompt is where: to be issued, open (issued, not yet trained), or done.

Promise P1 rests here: a ticket leaves `open` once, by `retire` (trained, or dropped for good) or by
`reissue` (a new attempt takes its place). What is open at a checkpoint is issued again on resume,
in the same order; those whose finished groups were saved with it are not played again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from retrain.types import Ticket


class Ledger:
    """Issues tickets, epoch after epoch; `order` gives an epoch's rows in the order of issue."""

    def __init__(self, order: Callable[[int], Sequence[int]]) -> None:
        self._order_of = order
        self.epoch = 0
        self._position = 0
        self._order = order(0)
        self._again: deque[Ticket] = deque()
        self.open: dict[Ticket, None] = {}
        """Issued and not yet trained, in the order of issue."""

    def issue(self) -> Ticket:
        """The next ticket: one to be issued again, else the epoch's next row."""
        ticket = self._again.popleft() if self._again else self._next_row()
        self.open[ticket] = None
        return ticket

    def retire(self, tickets: Iterable[Ticket]) -> None:
        """These are done: trained, or dropped for good. Raises KeyError for one that isn't open."""
        for ticket in tickets:
            del self.open[ticket]

    def reissue(self, ticket: Ticket) -> Ticket:
        """Put the prompt back in line as its next attempt, which is returned."""
        self.retire([ticket])
        again = ticket._replace(attempt=ticket.attempt + 1)
        self._again.append(again)
        return again

    def state(self) -> dict[str, Any]:
        """Everything needed to go on from here, as JSON values."""
        return {
            "epoch": self.epoch,
            "position": self._position,
            "again": [str(ticket) for ticket in self._again],
            "open": [str(ticket) for ticket in self.open],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state()`: what was open is issued again first."""
        self.epoch, self._position = state["epoch"], state["position"]
        self._order = self._order_of(self.epoch)
        self.open = {}
        self._again = deque(Ticket.parse(text) for text in (*state["open"], *state["again"]))

    def _next_row(self) -> Ticket:
        if self._position == len(self._order):
            self.epoch += 1
            self._position = 0
            self._order = self._order_of(self.epoch)
        row = self._order[self._position]
        self._position += 1
        return Ticket(self.epoch, row)
