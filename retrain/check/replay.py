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

from retrain.check.bench import SLOW_SECONDS, Bench, Finding, ok, warn
from retrain.check.scripted import TEXTS, Example, FixedSampler, examples, scripted, wrong_calls
from retrain.config import RolloutConfig, RunConfig
from retrain.environment import ToolSpec
from retrain.errors import UserCodeError, shown
from retrain.rollout.instance import Instance
from retrain.supervision.boundary import boundary
from retrain.types import Message, Prompt, Trajectory

TURNS = 8
SECONDS = 10.0
"""After this time no further reply is played."""


@dataclass(frozen=True)
class Play:
    """A prompt and what the model says to it: a text, or a call that fits its tool."""

    prompt: Prompt
    reply: str
    call: Example | None = None

    def __str__(self) -> str:
        return str(self.call) if self.call else f"the reply {shown(self.reply, 40)}"


@dataclass(frozen=True)
class Played:
    """What an environment responded to a play."""

    play: Play
    fixed: Any
    """What must repeat itself: all but the results of tools."""
    results: tuple[str, ...]
    """The results of tools."""
    seconds: float

    @property
    def slow(self) -> bool:
        """Whether it is a slow call of a tool, which has shown what it does."""
        return self.play.call is not None and self.seconds > SLOW_SECONDS


def texts_for(prompts: Sequence[Prompt]) -> list[Play]:
    """Replies without a call: the first one to each prompt, then the second, and so on."""
    return [Play(prompt, text) for text in TEXTS for prompt in prompts]


def calls_for(prompt: Prompt, tools: Sequence[ToolSpec]) -> list[Play]:
    """Wrong calls, and one of each tool."""
    wrong = [Play(prompt, reply) for reply in wrong_calls(tools)] if tools else []
    return [*wrong, *(Play(prompt, call.reply, call) for call in examples(tools))]


async def played(
    bench: Bench, instances: Sequence[Instance], plays: Sequence[Play]
) -> list[list[Played]]:
    """What each instance responds to the plays in turn, all instances at once.

    It ends before the last play if the loop is blocked, or after SECONDS, but no tool is left out
    for being slow. Raises UserCodeError for a rollout that fails.
    """
    sampler = FixedSampler()
    rollout = RolloutConfig(max_turns=TURNS)
    rollouts = scripted(RunConfig(rollout=rollout, deadlines=bench.config.deadlines), sampler)
    found: list[list[Played]] = [[] for _ in instances]
    until = time.monotonic() + SECONDS
    for play in plays:
        late = time.monotonic() > until and not play.call
        if found[0] and (late or bench.blocks.too_long):
            break
        sampler.reply = play.reply
        began = time.monotonic()
        with bench.waiting(f"each step of {instances[0].name} after {play}", "step"):
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
    return Played(play, fixed, tuple(results), seconds)


def compare(
    first: Sequence[Played], others: Sequence[Sequence[Played]], advice: str
) -> dict[str, str]:
    """The results of tools that differ, a line per call.

    Raises UserCodeError, with `advice`, if anything else differs.
    """
    lines: dict[str, str] = {}
    for other in others:
        for one, two in zip(first, other, strict=False):  # it may end early
            with boundary("a comparison"):
                same = one.fixed == two.fixed
            if not same:
                both = _both(one.fixed, two.fixed)
                raise UserCodeError(f"{advice}\nto {one.play}, got {both}")
            if one.results != two.results:
                both = _both(one.results, two.results)
                lines.setdefault(str(one.play), f"{one.play}: got {both}")
    return lines


def _both(one: Any, two: Any) -> str:
    """The first part that differs of two values, as errors show it."""
    while isinstance(one, list | tuple) and isinstance(two, list | tuple) and len(one) == len(two):
        one, two = next((a, b) for a, b in zip(one, two, strict=True) if a != b)
    return f"{shown(one)}, then {shown(two)}"


def tools_finding(calls: Sequence[Played]) -> Finding:
    """What each tool returned."""
    names = [own.play.call.name for own in calls if own.play.call]
    what = f"tools: {', '.join(names)}"
    lines = [_result_line(own) for own in calls]
    if any(result.startswith("error") for own in calls for result in own.results[:1]):
        advice = "the arguments are made up: ignore an error only if the tool rejects them"
        return warn(what, *lines, advice)
    return ok(what, *lines)


def _result_line(own: Played) -> str:
    result = shown(own.results[0], 200) if own.results else "no message with the role 'tool'"
    slow = f" in {own.seconds:.1f} s, not repeated" if own.slow else ""
    return f"{own.play} -> {result}{slow}"
