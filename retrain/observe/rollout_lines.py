"""The lines of rollouts.jsonl.

A line ends with the fate of its rollout, which is known when the group is trained or dropped. The
rest is encoded when the group has been played, so that the work is spread over the step.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from retrain.observe.journal import encode_each
from retrain.types import Completion, Group, Trajectory

HASH_BYTES = 4


def encoded(group: Group) -> list[str]:
    """The rollouts of a group as lines, for `with_fate`."""
    lines: list[str] = []
    for _, alike in groupby(enumerate(group.trajectories), _opening):
        rollouts = list(alike)
        shared = _shared(rollouts[0][1])
        lines += encode_each(shared, [_line(trajectory, index) for index, trajectory in rollouts])
    return lines


def with_fate(lines: Iterable[str], step: int | None, dropped: str = "") -> list[str]:
    """Complete lines: `step` trained or evaluated these rollouts; or the cause of their drop."""
    fate = f',"step":{json.dumps(step)}'
    if dropped:
        fate += f',"dropped":{json.dumps(dropped)}'
    fate += "}"
    return [line[:-1] + fate for line in lines]


def hash_of(token_ids: Sequence[int]) -> str:
    """A short BLAKE2b hash of token ids: equal for equal prompts."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=HASH_BYTES).hexdigest()


def names_of(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of tools in the structure of chat templates."""
    return tuple([tool["function"]["name"] for tool in tools])


def _opening(rollout: tuple[int, Trajectory]) -> tuple[int, int]:
    """Equal for rollouts with the same prompt and tools: those share one list."""
    trajectory = rollout[1]
    turns = trajectory.turns
    return id(turns[0].prompt_ids) if turns else 0, id(trajectory.tools)


def _shared(trajectory: Trajectory) -> dict[str, Any]:
    """The keys that are the same for rollouts with an equal `_opening`."""
    prompt, turns = trajectory.prompt, trajectory.turns
    ids = turns[0].prompt_ids if turns else ()
    shared: dict[str, Any] = {
        "ticket": prompt.id,
        "prompt": {"tokens": len(ids), "hash": hash_of(ids)} if turns else None,
        "tools": names_of(trajectory.tools),
    }
    if prompt.answer is not None:
        shared["answer"] = prompt.answer
    if prompt.metadata:
        shared["metadata"] = prompt.metadata
    return shared


def _line(trajectory: Trajectory, index: int) -> dict[str, Any]:
    completions = [turn.completion for turn in trajectory.turns]
    ok = trajectory.outcome == "ok"
    line: dict[str, Any] = {
        "index": index,
        "messages": trajectory.messages,
        "rewards": trajectory.rewards,
        "reward": trajectory.reward if ok else None,
        "outcome": trajectory.outcome,
        "error": None if ok else trajectory.info.get("error"),
        "versions": [completion.version for completion in completions],
        "tokens": trajectory.sampled_tokens,
        "stop_reasons": [completion.stop_reason for completion in completions],
        "seconds": trajectory.seconds,
    }
    if any(completion.versions for completion in completions):
        line["spans"] = [_spans(completion) for completion in completions]
    if trajectory.info:
        line["info"] = trajectory.info
    return line


def _spans(completion: Completion) -> list[list[int]]:
    """The versions that sampled a turn, each with its number of tokens: [[3, 120], [4, 17]]."""
    versions = completion.versions or [completion.version] * len(completion.token_ids)
    return [[version, len(list(tokens))] for version, tokens in groupby(versions)]
