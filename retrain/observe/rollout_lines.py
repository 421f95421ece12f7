"""The lines of rollouts.jsonl.

A line ends with the fate of its rollout, which is known when the group is trained or dropped. The
rest is encoded when the group has been played, so that the work is spread over the step.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from retrain.observe.journal import encode
from retrain.types import Group, Trajectory

HASH_BYTES = 4


def encoded(group: Group) -> list[str]:
    """The rollouts of a group as lines, for `with_fate`."""
    prompts: dict[int, dict[str, Any]] = {}
    for trajectory in group.trajectories:
        if trajectory.turns:
            ids = trajectory.turns[0].prompt_ids  # equal prompts share one list
            if id(ids) not in prompts:
                prompts[id(ids)] = {"tokens": len(ids), "hash": hash_of(ids)}
    return [encode(_line(t, i, prompts)) for i, t in enumerate(group.trajectories)]


def with_fate(lines: Iterable[str], step: int | None, dropped: str = "") -> list[str]:
    """Complete lines: `step` trained or evaluated these rollouts; or the cause of their drop."""
    fate = f',"step":{json.dumps(step)}'
    if dropped:
        fate += f',"dropped":{json.dumps(dropped)}'
    return [f"{line[:-1]}{fate}}}" for line in lines]


def hash_of(token_ids: Sequence[int]) -> str:
    """A short BLAKE2b hash of token ids: equal for equal prompts."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=HASH_BYTES).hexdigest()


def names_of(tools: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """The names of tools in the structure of chat templates."""
    return tuple([tool["function"]["name"] for tool in tools])


def _line(
    trajectory: Trajectory, index: int, prompts: Mapping[int, Mapping[str, Any]]
) -> dict[str, Any]:
    ok, turns, prompt = trajectory.outcome == "ok", trajectory.turns, trajectory.prompt
    line: dict[str, Any] = {
        "ticket": prompt.id,
        "index": index,
        "prompt": prompts[id(turns[0].prompt_ids)] if turns else None,
        "tools": names_of(trajectory.tools),
        "messages": trajectory.messages,
        "rewards": trajectory.rewards,
        "reward": trajectory.reward if ok else None,
        "outcome": trajectory.outcome,
        "error": None if ok else trajectory.info.get("error"),
        "versions": [turn.completion.version for turn in turns],
        "tokens": trajectory.sampled_tokens,
        "stop_reasons": [turn.completion.stop_reason for turn in turns],
        "seconds": trajectory.seconds,
    }
    if prompt.answer is not None:
        line["answer"] = prompt.answer
    if prompt.metadata:
        line["metadata"] = prompt.metadata
    if trajectory.info:
        line["info"] = trajectory.info
    return line
