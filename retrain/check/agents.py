"""Play an agent with scripted replies: it must end without an error, whatever the model says."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from retrain.check.scripted import Blocks, Finding, Say, Script, doorway, found, scripted, waiting
from retrain.config import RunConfig
from retrain.environment import Environment
from retrain.errors import alike, shown
from retrain.rollout import Slot
from retrain.scoring import Scorer
from retrain.types import Prompt, Trajectory

SECONDS = 20.0
"""After this time no further reply is tried."""
NO_ROLLOUT = "the agent completes 0 "
"""The beginning of the finding if the agent completes no rollout."""
ALWAYS = (
    "in every scored rollout: fix the agent, unless it is right to reject all the replies of this "
    "check, which are short texts and malformed tool calls"
)
Case = tuple[str, Trajectory]


async def tried_agent(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt],
    replies: Sequence[str],
    config: RunConfig,
    say: Say,
    blocks: Blocks,
) -> list[Finding]:
    """Let an agent play the first prompt with each reply, and the others with the first reply.

    It ends with the first rollout that exceeds its deadline or blocks the event loop too long, and
    plays no second reply after SECONDS.
    """
    script, faults = Script(), list[str]()
    plays = [(n, replies[0]) for n in range(len(prompts))] + [(0, reply) for reply in replies[1:]]
    played: list[tuple[int, Case]] = []
    until, ended = time.monotonic() + SECONDS, ""
    async with doorway(config) as door:
        slot = Slot(1, make, scripted(config, script, door), Scorer([]), fault=faults.append)
        try:
            for row, script.reply in plays:
                case = f"the model says {shown(script.reply, 24)} in row {row}"
                limit = f"at most {config.deadlines.agent:g} s (deadlines.agent)"
                with waiting(say, f"the agent, where {case}: {limit}"):
                    trajectory = (await slot.play(prompts[row])).trajectories[0]  # all fail alike
                played.append((row, (case, trajectory)))
                if trajectory.outcome == "timeout":
                    ended = "after the timeout"
                elif blocks.too_long:
                    ended = "because the event loop is blocked"
                elif time.monotonic() > until and len(played) >= len(prompts):
                    ended = f"after {SECONDS:g} s"
                if ended:
                    break
        finally:
            await slot.close()
    lines = list(_failures([case for _, case in played]))
    if left := len(plays) - len(played):
        lines.append(f"{left} further rollouts were not tried {ended}")
    scored = [(row, t) for row, (_, t) in played if t.outcome == "ok"]
    good = [(row, t) for row, t in scored if not t.agent_error]
    rows, count = len({row for row, _ in good}), len(prompts)
    some, all_rows = (
        f"the agent completes {rows} of {count} rows",
        len({row for row, _ in scored}) == count,
    )
    ends = f"the agent ends without an error in {len(good)} of {len(played)} rollouts"
    never = bool(scored) and not good
    trials = [
        found(all_rows, some, () if all_rows else lines, warning=rows < count),
        found(
            len(scored) == len(played) and not faults,
            ends,
            (lines if all_rows else []) + faults,
            warning=never,
        ),
    ]
    limits = [str(t.info["truncated"]) for _, t in scored if "truncated" in t.info]
    if limits:
        names = ", ".join(sorted(set(limits)))
        met = f"{len(limits)} rollouts reached the limit {names}, and are scored as they are"
        trials.append(found(True, met))
    if errors := [t.agent_error for _, t in scored if t.agent_error]:
        what = f"{len(errors)} rollouts are scored, although the agent raised an error"
        lines = list(dict.fromkeys(map(alike, errors)))
        trials.append(found(True, what, [*lines, ALWAYS] if never else lines, warning=never))
    return trials


def _failures(played: Sequence[Case]) -> Iterator[str]:
    """Lines about each error with its cases, and what to do; those that differ only by the rollout
    are one error."""
    kinds: dict[str, list[Case]] = {}
    for case, trajectory in played:
        if trajectory.outcome != "ok":
            kinds.setdefault(alike(trajectory.info["error"]), []).append((case, trajectory))
    for failed in kinds.values():
        first, always = failed[0][1], len(failed) == len(played)
        yield first.info["error"]
        yield "  " + ("in every rollout" if always else f"if {', '.join(c for c, _ in failed)}")
        yield f"  {_advice(first.info['error'], first.outcome, always=always)}"


def _advice(error: str, outcome: str, *, always: bool) -> str:
    if outcome == "timeout":
        return "end earlier, or raise deadlines.agent"
    if "never called the model" in error:
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
