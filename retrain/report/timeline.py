"""The timeline of a run, from its surviving events: when groups were generated and trained."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_INTERVALS = 800
"""Maximum number of groups in the swimlanes: the last ones."""
MAX_LANES = 64

Event = Mapping[str, Any]  # a JSON object of events.jsonl


@dataclass(slots=True)
class Fates:
    """What happened to every ticket."""

    trained: dict[str, int] = field(default_factory=dict)
    """Ticket -> step."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Ticket -> cause."""
    tokens: dict[str, int] = field(default_factory=dict)
    """Ticket -> sampled tokens, of every ticket that was issued."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rollouts by outcome."""

    def of(self, ticket: str) -> str:
        """`trained`, the cause of its drop, or `left` (not trained yet)."""
        return "trained" if ticket in self.trained else self.dropped.get(ticket, "left")


def fates(events: Sequence[Event]) -> Fates:
    """What happened to each ticket, from the surviving events."""
    found = Fates()
    for event in events:
        ticket = str(event.get("ticket"))
        match event["event"]:
            case "issued":
                found.tokens.setdefault(ticket, 0)
            case "rollout":
                found.tokens[ticket] = int(event.get("tokens") or 0)
                found.outcomes.update(event.get("outcomes") or ())
            case "dropped":
                found.dropped[ticket] = str(event.get("cause", "unknown"))
            case "update":
                trained = map(str, event.get("tickets") or ())
                found.trained.update(dict.fromkeys(trained, int(event.get("step") or 0)))
    return found


def waste(found: Fates) -> list[dict[str, Any]]:
    """Groups and sampled tokens by fate, trained ones first."""
    groups: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for ticket, count in found.tokens.items():
        groups[found.of(ticket)] += 1
        tokens[found.of(ticket)] += count
    order = sorted(groups, key=lambda fate: (fate != "trained", fate == "left", -groups[fate]))
    return [{"fate": fate, "groups": groups[fate], "tokens": tokens[fate]} for fate in order]


def timeline(events: Sequence[Event], found: Fates) -> dict[str, Any] | None:
    """Swimlanes of generation and training; None without a finished group.

    `lanes` are lists of [start, end, fate, label] in seconds after `start` (since 1970). A lane is
    not a slot: each group takes the first free lane.
    """
    spans = sorted(_spans(events, "rollout"), key=lambda span: span[1])
    if not spans:
        return None
    shown = sorted(spans[-MAX_INTERVALS:], key=lambda span: span[:2])
    start = shown[0][0]
    updates, publishes = _spans(events, "update"), _spans(events, "publish")
    if len(shown) < len(spans):  # only training during the groups shown
        updates = [span for span in updates if span[1] >= start]
        publishes = [span for span in publishes if span[1] >= start]
    end = max(stop for _, stop, _ in (*shown, *updates, *publishes))
    lanes = _lanes(
        [
            (began - start, stop - start, found.of(str(e.get("ticket"))), _label(e, found))
            for began, stop, e in shown
        ]
    )

    def bars(kind: str, items: Sequence[Span]) -> list[Interval]:
        return [
            (max(0.0, a - start), b - start, kind, f"{kind} {e.get('step', e.get('version'))}")
            for a, b, e in items
        ]

    return {
        "start": start,
        "seconds": end - start,
        "lanes": lanes[:MAX_LANES],
        "hidden_lanes": max(0, len(lanes) - MAX_LANES),
        "shown": len(shown),
        "groups": len(spans),
        "training": {"update": bars("update", updates), "publish": bars("publish", publishes)},
    }


OUTAGES = "time/outages"
"""Seconds of a step in which the trainer waited or published, and there was an outage."""


def without_outages(
    rows: Sequence[Mapping[str, Any]], events: Sequence[Event]
) -> list[Mapping[str, Any]]:
    """The metrics of each step, its time in outages taken from waiting and publishing."""
    outages = _outages(events)
    chosen = {e.get("step"): float(e["time"]) for e in events if e["event"] == "batch"}
    updated = {e.get("step"): end for _, end, e in _spans(events, "update")}
    found: list[Mapping[str, Any]] = []
    for row in rows:
        step, away = row.get("step"), dict[str, float]()
        if outages and step in chosen and step in updated:
            wait = float(row.get("time/wait_for_batch") or 0.0)
            publish = float(row.get("time/publish") or 0.0)
            lost = _overlap(outages, chosen[step] - wait, chosen[step])
            late = _overlap(outages, updated[step], updated[step] + publish)
            away = {
                "time/wait_for_batch": wait - lost,
                "time/publish": publish - late,
                OUTAGES: lost + late,
            }
        found.append({**row, **away})
    return found


def _outages(events: Sequence[Event]) -> list[tuple[float, float]]:
    """When a reward or an environment could not be reached, or no server was up; none overlap."""
    found: list[tuple[float, float]] = []
    away: set[str] = set()
    since = 0.0
    for event in events:
        kind, time, before = event["event"], float(event["time"]), bool(away)
        if kind in ("resumed", "end"):
            away.clear()
        elif kind in ("outage", "server"):
            (away.add if _begins(event) else away.discard)(kind)
        if away and not before:
            since = time - float(event.get("seconds") or 0.0)  # of a server that was found down
        elif before and not away:
            found.append((since, time))
    return found


def _begins(event: Event) -> bool:
    """Whether an event of an outage is its begin."""
    return event.get("state") == "began" if event["event"] == "outage" else not event.get("up")


def _overlap(outages: Sequence[tuple[float, float]], start: float, end: float) -> float:
    return sum(max(0.0, min(end, b) - max(start, a)) for a, b in outages)


Span = tuple[float, float, Event]
Interval = tuple[float, float, str, str]


def _spans(events: Sequence[Event], kind: str) -> list[Span]:
    """(started, ended, event) in seconds since 1970."""
    return [
        (float(event["started"]), float(event["ended"]), event)
        for event in events
        if event["event"] == kind and event.get("started") and event.get("ended")
    ]


def _lanes(intervals: Sequence[Interval]) -> list[list[Interval]]:
    """Sorted intervals on as few lanes as possible without overlap, lowest lane first."""
    lanes: list[list[Interval]] = []
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    for interval in intervals:
        while busy and busy[0][0] <= interval[0]:
            heapq.heappush(free, heapq.heappop(busy)[1])
        lane = heapq.heappop(free) if free else len(lanes)
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(interval)
        heapq.heappush(busy, (interval[1], lane))
    return lanes


def _label(event: Event, found: Fates) -> str:
    ticket = str(event.get("ticket"))
    versions = sorted({version for version in event.get("versions") or () if version is not None})
    step = found.trained.get(ticket)
    return ", ".join(
        [
            f"ticket {ticket}",
            f"{event.get('tokens') or 0:,} tokens",
            f"version {'-'.join(str(v) for v in versions[:: max(1, len(versions) - 1)])}",
            f"trained in step {step}" if step is not None else found.of(ticket),
        ]
    )
