"""Play fixed replies in instances of an environment, and compare what they respond.

The result of a tool may differ for a good reason, such as a clock or a live search: such a
difference is a warning that names the tool. All else must repeat itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from retrain.check.scripted import (
    SLOW_SECONDS,
    TEXTS,
    Blocks,
    Call,
    Finding,
    Say,
    Script,
    examples,
    scripted,
    waiting,
    wrong_calls,
)
from retrain.config import DeadlinesConfig, RolloutConfig, RunConfig
from retrain.environment import ToolSpec
from retrain.errors import UserCodeError, shown
from retrain.rollout.instance import Instance
from retrain.types import Message, Prompt, Trajectory

TURNS = 8
SECONDS = 10.0
"""After this time no further reply is played."""


@dataclass(frozen=True)
class Play:
    """A prompt and what the model says to it: a text, or a call that fits its tool."""

    prompt: Prompt
    reply: str
    call: Call | None = None

    def __str__(self) -> str:
        return str(self.call) if self.call else f"the reply {shown(self.reply, 40)}"


@dataclass(frozen=True)
class Played:
    """What an environment responded."""

    fixed: Any
    """What must repeat itself: all but the results of tools."""
    results: tuple[str, ...]
    """The results of tools."""
    seconds: float


def texts_for(prompts: Sequence[Prompt]) -> list[Play]:
    """Replies without a call: the first one to each prompt, then the second, and so on."""
    return [Play(prompt, text) for text in TEXTS for prompt in prompts]


def calls_for(prompt: Prompt, tools: Sequence[ToolSpec]) -> list[Play]:
    """Wrong calls, and one of each tool."""
    wrong = [Play(prompt, reply) for reply in wrong_calls(tools)] if tools else []
    return [*wrong, *(Play(prompt, call.reply, call) for call in examples(tools))]


async def played(
    instances: Sequence[Instance],
    plays: Sequence[Play],
    limits: DeadlinesConfig,
    say: Say,
    blocks: Blocks,
) -> list[list[Played]]:
    """What each environment responds to the plays in turn, all environments at once.

    It ends before the last play if `blocks` says so, or after SECONDS, but no tool is left out for
    being slow. Raises UserCodeError for a rollout that fails.
    """
    script = Script()
    config = RunConfig(rollout=RolloutConfig(max_turns=TURNS), deadlines=limits)
    rollouts = scripted(config, script)
    found: list[list[Played]] = [[] for _ in instances]
    until = time.monotonic() + SECONDS
    for play in plays:
        late = time.monotonic() > until and not play.call
        if found[0] and (late or blocks.too_long):
            break
        script.reply = play.reply
        began = time.monotonic()
        limit = f"at most {limits.step:g} s per step (deadlines.step)"
        with waiting(say, f"{instances[0].name} after {play}: {limit}"):
            # each as the first rollout of a group: the others may differ by `prompt.index`
            groups = await asyncio.gather(*(rollouts.play(play.prompt, [i]) for i in instances))
        seconds = time.monotonic() - began
        for own, group in zip(found, groups, strict=True):
            own.append(_played(play, group.trajectories, seconds))
    return found


def _played(play: Play, trajectories: Sequence[Trajectory], seconds: float) -> Played:
    results: list[str] = []
    fixed: list[Any] = []
    for trajectory in trajectories:
        if trajectory.outcome != "ok":
            at = f"{play}: " if play.call else ""
            raise UserCodeError(f"{at}{trajectory.info['error']}")
        said = [*trajectory.messages]
        said += [message for turn in trajectory.turns[-1:] for message in turn.observation]
        results += [m["content"] for m in said if m["role"] == "tool"]
        blank = [Message(**{**m, "content": ""}) if m["role"] == "tool" else m for m in said]
        fixed.append((blank, trajectory.rewards, len(trajectory.turns)))
    return Played(fixed, tuple(results), seconds)


def repeatable(plays: Sequence[Play], first: Sequence[Played]) -> list[tuple[Play, Played]]:
    """All plays but slow calls of tools, which have shown what they do."""
    pairs = zip(plays, first, strict=True)
    return [(play, own) for play, own in pairs if not play.call or own.seconds <= SLOW_SECONDS]


def compare(
    pairs: Sequence[tuple[Play, Played]], others: Sequence[Sequence[Played]], advice: str
) -> dict[str, str]:
    """The results of tools that differ, a line per call.

    Raises UserCodeError, with `advice`, if anything else differs.
    """
    lines: dict[str, str] = {}
    for other in others:
        for (play, one), two in zip(pairs, other, strict=False):  # it may end early
            if one.fixed != two.fixed:
                raise UserCodeError(f"{advice}\nto {play}, got {_both(one.fixed, two.fixed)}")
            if one.results != two.results:
                lines.setdefault(str(play), f"{play}: got {_both(one.results, two.results)}")
    return lines


def _both(one: Any, two: Any) -> str:
    """The first part that differs of two values, as errors show it."""
    while isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        one, two = next((a, b) for a, b in zip(one, two, strict=True) if a != b)
    return f"{shown(one)}, then {shown(two)}"


def tools_finding(plays: Sequence[Play], first: Sequence[Played]) -> Finding:
    """What each tool returned."""
    lines, fails = [], False
    for play, own in zip(plays, first, strict=True):
        if play.call:
            result = own.results[0] if own.results else None
            slow = f" in {own.seconds:.1f} s, not repeated" if own.seconds > SLOW_SECONDS else ""
            shows = "no message with the role 'tool'" if result is None else shown(result, 200)
            lines.append(f"{play} -> {shows}{slow}")
            fails = fails or (result or "").startswith("error")
    names = ", ".join(play.call.name for play in plays if play.call)
    if fails:
        lines.append("the arguments are made up: ignore an error only if the tool rejects them")
    return Finding(True, f"tools: {names}", "\n".join(lines), warning=fails)
