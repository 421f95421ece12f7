"""Play an agent with scripted replies: it must end without an error, whatever the model says."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from retrain.check.bench import Bench, Finding, fail, ok, warn
from retrain.check.scripted import FixedSampler, doorway, scripted
from retrain.errors import alike, shown
from retrain.rollout import Slot
from retrain.scoring import Scorer
from retrain.types import Trajectory

SECONDS = 20.0
"""After this time no further reply is tried."""
ALWAYS = (
    "in every scored rollout: fix the agent, unless it is right to reject all the replies of this "
    "check, which are short texts and malformed tool calls"
)
Play = tuple[int, str]
"""The index of a prompt, and what the model says to it."""


class Attempt(NamedTuple):
    """A rollout of an agent."""

    row: int
    said: str
    rollout: Trajectory

    def __str__(self) -> str:
        return f"the model says {self.said} in row {self.row}"


async def tried_agent(bench: Bench, replies: Sequence[str]) -> list[Finding]:
    """Let an agent play the first prompt with each reply, and the others with the first reply.

    It ends with the first rollout that exceeds its deadline or blocks the event loop too long, and
    plays no second reply after SECONDS.
    """
    faults = list[str]()
    plays = [(row, replies[0]) for row in range(len(bench.prompts))]
    plays += [(0, reply) for reply in replies[1:]]
    attempts, ended = await _played(bench, plays, faults)
    lines = list(_failures(attempts))
    if left := len(plays) - len(attempts):
        lines.append(f"{left} further rollouts were not tried {ended}")
    scored = [attempt.rollout for attempt in attempts if attempt.rollout.outcome == "ok"]
    return [*_completed(attempts, len(bench.prompts), lines, faults), *_notes(scored)]


async def _played(
    bench: Bench, plays: Sequence[Play], faults: list[str]
) -> tuple[list[Attempt], str]:
    """The rollouts, and why it ended before the last play, if it did."""
    attempts, ended = list[Attempt](), ""
    until, sampler = time.monotonic() + SECONDS, FixedSampler()
    async with doorway(bench.config) as door:
        rollouts = scripted(bench.config, sampler, door)
        slot = Slot(1, bench.make, rollouts, Scorer([]), fault=faults.append)
        try:
            for row, sampler.reply in plays:
                said = shown(sampler.reply, 24)
                with bench.waiting(f"the agent, where the model says {said} in row {row}", "agent"):
                    group = await slot.play(bench.prompts[row])
                attempts.append(Attempt(row, said, group.trajectories[0]))  # all fail alike
                if attempts[-1].rollout.outcome == "timeout":
                    ended = "after the timeout"
                elif bench.blocks.too_long:
                    ended = "because the event loop is blocked"
                elif time.monotonic() > until and len(attempts) >= len(bench.prompts):
                    ended = f"after {SECONDS:g} s"
                if ended:
                    break
        finally:
            await slot.close()
    return attempts, ended


def _completed(
    attempts: Sequence[Attempt], rows: int, lines: Sequence[str], faults: Sequence[str]
) -> Iterator[Finding]:
    """How many rows and rollouts the agent completes. `lines` are about the others."""
    scored = [attempt for attempt in attempts if attempt.rollout.outcome == "ok"]
    good = [attempt for attempt in scored if not attempt.rollout.agent_error]
    completed = len({attempt.row for attempt in good})
    some = f"the agent completes {completed} of {rows} rows"
    if len({attempt.row for attempt in scored}) < rows:
        yield fail(some, *lines, fatal=not completed)
        lines = ()
    else:
        yield warn(some) if completed < rows else ok(some)
    ends = f"the agent ends without an error in {len(good)} of {len(attempts)} rollouts"
    if faults or len(scored) < len(attempts):
        yield fail(ends, *lines, *faults)
    else:
        yield ok(ends, *lines) if good else warn(ends, *lines)


def _notes(scored: Sequence[Trajectory]) -> Iterator[Finding]:
    """About rollouts that count, although they reached a limit or the agent raised an error."""
    if limits := [str(t.info["truncated"]) for t in scored if "truncated" in t.info]:
        names = ", ".join(sorted(set(limits)))
        yield ok(f"{len(limits)} rollouts reached the limit {names}, and are scored as they are")
    if errors := [t.agent_error for t in scored if t.agent_error]:
        what = f"{len(errors)} rollouts are scored, although the agent raised an error"
        lines = dict.fromkeys(map(alike, errors))
        yield warn(what, *lines, ALWAYS) if len(errors) == len(scored) else ok(what, *lines)


def _failures(attempts: Sequence[Attempt]) -> Iterator[str]:
    """Lines about each error, with its attempts and what to do.

    Errors that differ only by the rollout are one.
    """
    kinds: dict[str, list[Attempt]] = {}
    for attempt in attempts:
        if attempt.rollout.outcome != "ok":
            kinds.setdefault(alike(attempt.rollout.info["error"]), []).append(attempt)
    for failed in kinds.values():
        first, always = failed[0].rollout, len(failed) == len(attempts)
        yield first.info["error"]
        yield "  in every rollout" if always else f"  if {', '.join(map(str, failed))}"
        yield f"  {_advice(first, always)}"


def _advice(failed: Trajectory, always: bool) -> str:
    if failed.outcome == "timeout":
        return "end earlier, or raise deadlines.agent"
    if "never called the model" in failed.info["error"]:
        return (
            "call the model at `base_url` with `api_key`; a command finds them in OPENAI_BASE_URL "
            "and OPENAI_API_KEY"
        )
    if always:
        return "the error does not depend on the model's reply: fix the agent"
    return (
        "rollouts with errors are not trained. Catch the error and return the partial result. To "
        "score such a rollout with the model's last reply, set environment.on_error: score"
    )
