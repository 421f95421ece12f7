"""The lines of rollouts.jsonl.

A line ends with the fate of its rollout, which is known when the group is trained or dropped. The
rest is encoded when the group has been played, so that the work is spread over the step.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from json.encoder import encode_basestring as quoted
from typing import Any

from retrain.observe.journal import encode
from retrain.sampler import hash_of
from retrain.types import Completion, Group, Message, Trajectory, Turn


def encoded(group: Group) -> list[str]:
    """The rollouts of a group as lines without their last brace, for `with_fate`."""
    lines: list[str] = []
    for _, alike in groupby(group.trajectories, _opening):
        rollouts = list(alike)
        shared = _shared(rollouts[0])
        try:
            lines += _quick(rollouts, encode(shared)[:-1])
        except (TypeError, ValueError):  # a failure, or a value of the user's
            lines += [encode(shared | _line(t))[:-1] for t in rollouts]
    return lines


def with_fate(lines: Iterable[str], step: int | None, dropped: str = "") -> list[str]:
    """Complete lines: `step` trained or evaluated these rollouts; or the cause of their drop."""
    fate = f',"step":{json.dumps(step)}'
    if dropped:
        fate += f',"dropped":{json.dumps(dropped)}'
    fate += "}"
    return [line + fate for line in lines]


def names_of(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of tools in the structure of chat templates."""
    return tuple([tool["function"]["name"] for tool in tools])


def _opening(trajectory: Trajectory) -> tuple[int, int]:
    """Equal for rollouts with the same prompt and tools: those share one list."""
    turns = trajectory.turns
    return id(turns[0].prompt_ids) if turns else 0, id(trajectory.tools)


def _shared(trajectory: Trajectory) -> dict[str, Any]:
    """The keys that are the same for rollouts with an equal `_opening`."""
    prompt, turns = trajectory.prompt, trajectory.turns
    ids = turns[0].prompt_ids if turns else ()
    opening = {"tokens": len(ids), "hash": hash_of(ids)} if turns else {}
    if not turns or turns[0].messages:  # nothing else in the line has the text of an agent's prompt
        opening["text"] = prompt.text
    shared: dict[str, Any] = {
        "ticket": prompt.id,
        "prompt": opening,
        "tools": names_of(trajectory.tools),
    }
    if prompt.answer is not None:
        shared["answer"] = prompt.answer
    if prompt.metadata:
        shared["metadata"] = prompt.metadata
    return shared


def _line(trajectory: Trajectory) -> dict[str, Any]:
    completions = [turn.completion for turn in trajectory.turns]
    ok = trajectory.outcome == "ok"
    line: dict[str, Any] = {
        "index": trajectory.index,
        "messages": trajectory.messages or trajectory.prompt.messages,
        "rewards": trajectory.rewards,
        "reward": trajectory.reward if ok else None,
        "outcome": trajectory.outcome,
        "error": None if ok else trajectory.info.get("error"),
        "versions": [completion.version for completion in completions],
        "tokens": trajectory.sampled_tokens,
        "stop_reasons": [completion.stop_reason for completion in completions],
        "seconds": trajectory.seconds,
    }
    if trajectory.turn_rewards:
        line["turn_rewards"] = trajectory.turn_rewards
    if any(completion.versions for completion in completions):
        line["spans"] = [_spans(completion) for completion in completions]
    if trajectory.turns and trajectory.turns[0].messages:
        line["calls"] = [_call(trajectory.turns, turn) for turn in trajectory.turns]
    if trajectory.info:
        line["info"] = trajectory.info
    if trajectory.seat:
        line["seat"] = trajectory.seat
    if trajectory.result is not None:
        line["result"] = trajectory.result
    return line


def _quick(rollouts: Sequence[Trajectory], head: str) -> list[str]:
    """`head` with each `_line`, without the last brace, in less time; for usual rollouts.

    Raises TypeError or ValueError for those that `_line` must encode.
    """
    known: dict[int, str] = {}  # the JSON of messages by `id`: rollouts share the first ones
    seconds: Mapping[str, float] = {}
    timed = "{}"
    lines: list[str] = []
    for trajectory in rollouts:
        if trajectory.info or trajectory.seat or trajectory.outcome != "ok":
            raise ValueError
        if not trajectory.messages or trajectory.result is not None:
            raise ValueError
        messages = versions = stops = ""  # concatenation is faster than a join of a few
        tokens = 0
        for message in trajectory.messages:
            messages += f",{known.get(id(message)) or _message(message, known)}"
        for turn in trajectory.turns:
            completion = turn.completion
            if completion.versions or turn.messages:
                raise ValueError
            versions += f",{completion.version:d}"
            stops += f",{quoted(completion.stop_reason)}"
            tokens += len(completion.token_ids)
        earned = ""
        if trajectory.turn_rewards:
            earned = f',"turn_rewards":[{",".join(map(_number, trajectory.turn_rewards))}]'
        if trajectory.seconds != seconds:  # those of a group are often equal
            seconds = trajectory.seconds
            timed = _numbers(seconds)
        lines.append(
            f'{head},"index":{trajectory.index},"messages":[{messages[1:]}],'
            f'"rewards":{_numbers(trajectory.rewards)},"reward":{_number(trajectory.reward)},'
            f'"outcome":"ok","error":null,"versions":[{versions[1:]}],'
            f'"tokens":{tokens},"stop_reasons":[{stops[1:]}],'
            f'"seconds":{timed}{earned}'
        )
    return lines


def _message(message: Message, known: dict[int, str]) -> str:
    pairs = ""
    for key, value in message.items():
        pairs += f",{quoted(key)}:{quoted(value)}"  # type: ignore[arg-type]  # or it raises
    text = known[id(message)] = f"{{{pairs[1:]}}}"
    return text


def _numbers(named: Mapping[str, float]) -> str:
    pairs = ""
    for key, value in named.items():
        pairs += f",{quoted(key)}:{_number(value)}"
    return f"{{{pairs[1:]}}}"


def _number(value: float) -> str:
    if type(value) is not float or value - value:  # NaN and infinities are not JSON
        raise ValueError
    return repr(value)


def _call(turns: Sequence[Turn], turn: Turn) -> dict[str, Any]:
    """A call of an agent; `continues` says whether its prompt holds its parent's tokens."""
    parent = None if turn.parent is None else turns[turn.parent]
    call = {
        "parent": turn.parent,
        "continues": parent is not None and parent.is_start_of(turn.prompt_ids),
        "messages": turn.messages,
        "tokens": len(turn.completion.token_ids),
        "version": turn.completion.version,
        "reward": turn.reward,
    }
    return {**call, "seat": turn.seat} if turn.seat else call


def _spans(completion: Completion) -> list[list[int]]:
    """The versions that sampled a turn, each with its number of tokens: [[3, 120], [4, 17]]."""
    versions = completion.versions or [completion.version] * len(completion.token_ids)
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]
