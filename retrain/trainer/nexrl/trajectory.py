"""NexRL's Trajectory: one rollout (or one segment of it) whose fields are attributes and items.

    trajectory.advantage = 0.5        # trajectory["advantage"] and .get("advantage") are 0.5 too

All three spellings reach one store, so whatever a custom trainer writes in one of them is what
training reads. Field names are free; these have a meaning:

    prompt, response      texts (`prompt` may be a list of messages), encoded once when trained
    tokens, loss_mask     (T,) ids, and 1 where the model sampled the token
    logprobs, versions    (T,) the sampler's log-probs (0.0 where the mask is 0), and the weights'
                          versions (-1 there)
    reward                the rollout's score
    group_id, run_id      the prompt, and the rollout of it; with `run_id` alone it is the group
    advantage             credit of the whole trajectory
    token_advantages      credit of each sampled token, in order, in its place
    score                 further numbers, averaged in the metrics
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any

from retrain.batching import segments
from retrain.types import Group

STREAMS = ("loss_mask", "logprobs", "versions")
"""Fields that have one value per token."""


class Trajectory(MutableMapping[str, Any]):
    """A mapping of the fields that are given, whose keys are attributes too.

    `Trajectory(prompt=..., reward=...)`, `Trajectory({...})` and both together; `extra_fields` is
    merged in. Raises ValueError when a per-token field has not the length of `tokens`.
    """

    __slots__ = ("_fields",)
    _fields: dict[str, Any]

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        merged = {**(fields or {}), **more}
        extra = merged.pop("extra_fields", None) or {}
        if twice := sorted(merged.keys() & extra.keys()):
            raise ValueError(
                f"extra_fields holds {', '.join(twice)}, which the trajectory has itself: "
                "one of the two would be lost, so rename it"
            )
        object.__setattr__(self, "_fields", {**merged, **extra})
        self._check_lengths()

    def __getitem__(self, name: str) -> Any:
        return self._fields[name]

    def __setitem__(self, name: str, value: Any) -> None:
        self._fields[name] = value

    def __delitem__(self, name: str) -> None:
        del self._fields[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._fields:
            has = "" if name.startswith("_") else f"; it has {', '.join(self._fields)}"
            raise AttributeError(f"this trajectory has no {name!r}{has}")
        return self._fields[name]

    def __setattr__(self, name: str, value: Any) -> None:
        self._fields[name] = value

    def __delattr__(self, name: str) -> None:
        if name not in self._fields:
            raise AttributeError(f"this trajectory has no {name!r}")
        del self._fields[name]

    def __repr__(self) -> str:
        return f"Trajectory({', '.join(f'{key}={value!r}' for key, value in self.items())})"

    def __reduce__(self) -> tuple[type[Trajectory], tuple[dict[str, Any]]]:
        return Trajectory, (self._fields,)

    def _check_lengths(self) -> None:
        tokens = self.get("tokens")
        if tokens is None:
            return
        for name in STREAMS:
            values = self.get(name)
            if values is not None and len(values) != len(tokens):
                raise ValueError(
                    f"a trajectory has {len(tokens)} tokens, but {len(values)} of {name}: "
                    "one for each token is expected"
                )


def as_trajectories(trajectories: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """Each as a Trajectory; one that is one already is kept, so that it is changed in place.

    Raises TypeError on what is no mapping.
    """
    made = []
    for index, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Mapping):
            raise TypeError(
                f"trajectory {index} is a {type(trajectory).__name__}: a Trajectory, or a mapping "
                "such as {'prompt': ..., 'response': ..., 'reward': ...}, is expected"
            )
        made.append(trajectory if isinstance(trajectory, Trajectory) else Trajectory(trajectory))
    return made


def from_group(group: Group) -> list[Trajectory]:
    """The pipe's scored rollouts of one prompt: a Trajectory for each of their segments.

    `ground_truth` is the prompt's answer, `metadata` its further columns, `score` the reward's
    components, `is_truncated` tells a reply that was cut off.
    """
    made = []
    for index, rollout in enumerate(group.trajectories):
        shared = {
            "prompt": group.prompt.text,
            "response": rollout.completion,
            "group_id": group.prompt.id,
            "run_id": index,
            "ground_truth": group.prompt.answer,
            "metadata": dict(group.prompt.metadata),
            "score": dict(rollout.rewards),
            "is_truncated": rollout.turns[-1].completion.stop_reason != "stop",
        }
        for sample in segments(rollout, rollout.reward, f"{group.prompt.id}#{index}"):
            fields: dict[str, Any] = {
                "tokens": list(sample.token_ids),
                "loss_mask": list(sample.loss_mask),
                "versions": list(sample.versions),
            }
            if all(v >= 0 for v, on in zip(sample.versions, sample.loss_mask, strict=True) if on):
                # else nobody sampled these tokens: they are the data set's, and have no reward
                fields |= {"logprobs": list(sample.logprobs), "reward": rollout.reward}
            made.append(Trajectory(shared, **fields))
    return made
