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
        known = type(shared.get("answer", "")) is str and "metadata" not in shared
        start = (encode if known else encode_any)(shared)[:-1] + b","
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
    ok = trajectory.outcome == "ok"
    turns, versions, stop_reasons, changed = trajectory.turns, [], [], False
    for turn in turns:
        completion = turn.completion
        versions.append(completion.version)
        stop_reasons.append(completion.stop_reason)
        changed = changed or bool(completion.versions)
    line: dict[str, Any] = {
        "index": trajectory.index,
        "messages": trajectory.messages or trajectory.prompt.messages,
        "rewards": trajectory.rewards,
        "reward": trajectory.reward if ok else None,
        "outcome": trajectory.outcome,
        "error": None if ok else trajectory.info.get("error"),
        "versions": versions,
        "tokens": trajectory.sampled_tokens,
        "stop_reasons": stop_reasons,
        "seconds": trajectory.seconds,
    }
    if trajectory.turn_rewards:
        line["turn_rewards"] = trajectory.turn_rewards
    if changed:
        line["spans"] = [_spans(turn.completion) for turn in turns]
    if turns and turns[0].messages:
        line["calls"] = [_call(turns, turn) for turn in turns]
    if trajectory.info:
        line["info"] = trajectory.info
    if trajectory.seat:
        line["seat"] = trajectory.seat
    if trajectory.result is not None:
        line["result"] = trajectory.result
    if tokens:
        line["sequences"] = _sequences(trajectory)
    return line


def _sequences(trajectory: Trajectory) -> list[dict[str, Any]]:
    """The training sequences of a rollout; a failed rollout has those of its finished turns."""
    from retrain.algorithms.batching import segments

    streams = ("token_ids", "loss_mask", "logprobs", "versions")
    samples = segments(trajectory, 0.0, trajectory.prompt.id)
    return [{name: getattr(sample, name) for name in streams} for sample in samples]


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
