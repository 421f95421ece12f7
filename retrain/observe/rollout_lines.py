"""The lines of rollouts.jsonl.

A line ends with the fate of its rollout, which is known when the group is trained or dropped. The
rest is encoded when the group has been played, so that the work is spread over the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from retrain.observe.journal import encode, encode_any
from retrain.sampler import hash_of
from retrain.types import Completion, Group, Trajectory, Turn


def encoded(group: Group, *, tokens: bool = False) -> list[bytes]:
    """The rollouts of a group as lines without their last brace, for `with_fate`.

    `tokens` adds the sequences that are trained (`records.tokens`).
    """
    lines: list[bytes] = []
    for _, alike in groupby(group.trajectories, _opening):
        rollouts = list(alike)
        shared = _shared(rollouts[0])
        start = encode_any(shared)[:-1] + b","
        if b'"nonfinite":' in start:  # each line has one list of those
            lines += [encode_any(shared | _line(t, tokens))[:-1] for t in rollouts]
        else:
            lines += [start + encode(_line(t, tokens))[1:-1] for t in rollouts]
    return lines


def with_fate(lines: Iterable[bytes], step: int | None, dropped: str = "") -> list[bytes]:
    """Complete lines: `step` trained or evaluated these rollouts; or the cause of their drop."""
    fate = {"step": step, "dropped": dropped} if dropped else {"step": step}
    end = b"," + encode(fate)[1:]
    return [line + end for line in lines]


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


def _line(trajectory: Trajectory, tokens: bool = False) -> dict[str, Any]:
    completions = [turn.completion for turn in trajectory.turns]
    line: dict[str, Any] = {
        "index": trajectory.index,
        "messages": trajectory.messages or trajectory.prompt.messages,
        "rewards": trajectory.rewards,
        **_outcome(trajectory),
        "versions": [completion.version for completion in completions],
        "tokens": trajectory.sampled_tokens,
        "stop_reasons": [completion.stop_reason for completion in completions],
        "seconds": trajectory.seconds,
    }
    if trajectory.result is not None:
        line["result"] = trajectory.result
    further = {
        "turn_rewards": trajectory.turn_rewards,
        "spans": _spans(completions),
        "calls": _calls(trajectory.turns),
        "info": trajectory.info,
        "seat": trajectory.seat,
        "sequences": tokens and _sequences(trajectory),
    }
    return line | {name: value for name, value in further.items() if value}


def _outcome(trajectory: Trajectory) -> dict[str, Any]:
    if (outcome := trajectory.outcome) == "ok":
        return {"reward": trajectory.reward, "outcome": outcome, "error": None}
    return {"reward": None, "outcome": outcome, "error": trajectory.info.get("error")}


def _sequences(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The training sequences of a rollout; a failed rollout has those of its finished turns."""
    from retrain.batching import segments

    streams = ("token_ids", "loss_mask", "logprobs", "versions")
    samples = segments(trajectory, 0.0, trajectory.prompt.id)
    return [{name: getattr(sample, name) for name in streams} for sample in samples]


def _calls(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """The calls of an agent; none for other rollouts, whose turns have no messages."""
    return [_call(turns, turn) for turn in turns] if turns and turns[0].messages else []


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


def _spans(completions: Sequence[Completion]) -> list[list[list[int]]]:
    """The versions that sampled each turn, with their numbers of tokens: [[3, 120], [4, 17]].

    Empty if no turn has several.
    """
    if not any(completion.versions for completion in completions):
        return []
    versions = [c.versions or [c.version] * len(c.token_ids) for c in completions]
    return [[[version, len(list(same))] for version, same in groupby(turn)] for turn in versions]
