"""Judge a run by its event log: which guarantees did it violate?

`Book` follows the log as a second ledger: it knows which ticket must be issued next, which are
open, and which have ended. A resume continues from what the book held at the snapshot.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.config import RunConfig
from retrain.observe.journal import read_lines
from retrain.observe.run_dir import read_events, surviving
from retrain.pipeline.intake import AGAIN

Event = dict[str, Any]


class Book:
    """The tickets of a run by its events; what is wrong goes to `wrong`."""

    def __init__(self, config: RunConfig, rows: int) -> None:
        self.wrong: list[str] = []
        self.trained: dict[str, int] = {}
        """The step that trained a ticket."""
        self.step = 0
        self._config, self._rows = config, rows
        self._open: dict[str, None] = {}
        self._due: deque[str] = deque()
        """Tickets that must be issued before any further row."""
        self._played: dict[str, Sequence[int]] = {}
        """The versions of a finished group."""
        self._dropped: set[str] = set()
        self._suspected = False
        """A group failed and none was scored since: other prompts may be played first."""
        self._epoch, self._left = 0, set(range(rows))
        self._version = 0

    def read(self, events: Iterable[Event]) -> None:
        for event in events:
            follow = getattr(self, f"_on_{event['event']}", None)
            if follow is not None:
                follow(event)

    def blame(self, promise: str, text: str) -> None:
        self.wrong.append(f"{promise}: {text}")

    def unfinished(self) -> list[str]:
        """Tickets that were issued or are due, and were neither trained nor dropped."""
        return [*self._open, *self._due]

    def _on_issued(self, event: Event) -> None:
        ticket = event["ticket"]
        while self._due and self._due[0] != ticket and self._due[0] in self._played:
            self._open[self._due.popleft()] = None  # finished before the checkpoint: not logged
        if self._due and (ticket in self._due or not self._suspected):
            due = self._due.popleft()
            if due != ticket:
                self.blame("P1", f"{ticket} was issued, {due} was due")
        else:
            self._row(ticket)
        if ticket in self._open or ticket in self.trained or ticket in self._dropped:
            self.blame("P1", f"{ticket} was issued twice")
        self._open[ticket] = None
        ahead = (self._config.staleness.target + 1) * self._config.train.groups_per_step
        if len(self._open) > ahead:
            self.blame("P3", f"{len(self._open)} groups are open, at most {ahead} are admitted")

    def _row(self, ticket: str) -> None:
        """A fresh ticket must be of a row that this epoch has not issued."""
        epoch, row, attempt = map(int, ticket.split("."))
        if not self._left:
            self._epoch, self._left = self._epoch + 1, set(range(self._rows))
        if attempt or epoch != self._epoch or row not in self._left:
            self.blame("P1", f"{ticket} was issued in epoch {self._epoch} with {self._left} left")
        self._left.discard(row)

    def _on_rollout(self, event: Event) -> None:
        ticket = event["ticket"]
        if ticket in self._played:
            self.blame("P1", f"{ticket} was played twice")
        self._played[ticket] = event["versions"]
        self._suspected = "ok" not in event["outcomes"]

    _on_example = _on_rollout  # of a row of the data set

    def _on_dropped(self, event: Event) -> None:
        ticket = event["ticket"]
        self._close(ticket)
        self._dropped.add(ticket)
        if (event["cause"] in AGAIN) != ("again" in event):
            self.blame("P1", f"{ticket} was dropped as {event['cause']}: {event}")
        if "again" in event:
            self._due.append(event["again"])

    def _on_update(self, event: Event) -> None:
        tickets, self.step = event["tickets"], self.step + 1
        if event["step"] != self.step:
            self.blame("P1", f"step {event['step']} was trained, expected {self.step}")
        if len(tickets) != self._config.train.groups_per_step:
            self.blame("P1", f"step {self.step} trained {len(tickets)} groups")
        for ticket in tickets:
            if ticket in self.trained:
                self.blame("P1", f"{ticket} was trained twice")
            self._fresh(ticket)
        if self._config.train.order == "in_order":
            first = [t for t in (*self._open, *self._due) if t in self._played][: len(tickets)]
            if list(tickets) != first:
                self.blame("P1", f"in order: {tickets} were trained, {first} came first")
        for ticket in tickets:
            self._close(ticket)
            self.trained[ticket] = self.step

    def _fresh(self, ticket: str) -> None:
        versions = self._played.get(ticket)
        if versions is None:
            self.blame("P1", f"{ticket} was trained, and never played")
        elif versions and self._version - min(versions) > self._config.staleness.bound:
            self.blame("P3", f"{ticket} of {min(versions)} was trained at {self._version}")

    def _close(self, ticket: str) -> None:
        if ticket in self._due and ticket in self._played:  # finished before the checkpoint
            self._due.remove(ticket)
        elif ticket in self._open:
            del self._open[ticket]
        else:
            self.blame("P1", f"{ticket} ended, and was not open")

    def _on_publish(self, event: Event) -> None:
        self._version = event["version"]

    def _on_resumed(self, event: Event) -> None:
        self._due = deque([*self._open, *self._due])
        self._open = {}
        if event["from_step"] != self.step:
            self.blame("P1", f"resumed from step {event['from_step']}, the log is at {self.step}")


def judge_log(folder: Path, config: RunConfig, rows: int) -> tuple[Book, list[Event]]:
    """The book of a run's surviving events."""
    events = surviving(read_events(folder))
    book = Book(config, rows)
    book.read(events)
    return book, events


def judge_faults(folder: Path, events: Iterable[Event], planted: Mapping[str, int]) -> list[str]:
    """P5 and P6: a fault fails its rollout and no other, and never becomes a reward.

    `planted` counts the faulty rollouts by ticket. An `ok` rollout has `info` from its last turn,
    `{played: 2, planted: false}`.
    """
    wrong: list[str] = []
    for event in events:
        if event["event"] == "rollout":
            failed, most = sum(o != "ok" for o in event["outcomes"]), planted[event["ticket"]]
            if failed > most:
                wrong.append(
                    f"P5: {failed} rollouts of {event['ticket']} failed, {most} had a fault"
                )
    for line in read_lines(folder / "rollouts.jsonl"):
        info, ok = line.get("info", {}), line["outcome"] == "ok"
        if ok and (info.get("played") != 2 or info.get("planted")):
            wrong.append(f"P6: a rollout of {line['ticket']} is ok, after {info}")
        if not ok and line["reward"] is not None:
            wrong.append(f"P6: a failed rollout of {line['ticket']} has a reward: {line['reward']}")
    return wrong


def judge_credit(
    events: Iterable[Event], batches: Iterable[Mapping[str, Mapping[str, Sequence[float]]]]
) -> list[str]:
    """P6: the advantages of each trained group have the signs of its `ok` rewards alone.

    `batches` map tickets to the advantages of each rollout.
    """
    rewards: dict[str, list[float]] = {}
    for event in events:
        if event["event"] == "rollout":
            ticket = event["ticket"]
            pairs = zip(event["rewards"], event["outcomes"], strict=True)
            rewards[ticket] = [reward for reward, outcome in pairs if outcome == "ok"]
    wrong = []
    for ticket, rollouts in ((t, r) for batch in batches for t, r in batch.items()):
        mean = statistics.fmean(rewards[ticket] or [0.0])
        wanted = Counter(_sign(reward - mean) for reward in rewards[ticket])
        if wanted != Counter(_sign(credits[0]) for credits in rollouts.values()):
            wrong.append(f"P6: {ticket} has the rewards {rewards[ticket]}, advantages {rollouts}")
    return wrong


def _sign(value: float) -> int:
    return (value > 1e-9) - (value < -1e-9)
