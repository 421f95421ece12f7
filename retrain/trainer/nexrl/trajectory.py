"""NexRL's Trajectory: one rollout, or one segment of it, as a dict with attribute access.

    trajectory.advantage = 0.5        # trajectory["advantage"] and .get("advantage") are 0.5 too

Field names are free. These have a meaning:

    prompt, response      strings (`prompt` may be a list of messages), encoded when trained
    tokens, loss_mask     (T,) token ids, and 1 where the model sampled the token
    logprobs, versions    (T,) the sampler's log-probs (0.0 where the mask is 0), and the versions
                          of the weights (-1 where the mask is 0)
    reward                the reward of the rollout
    group_id, run_id      the prompt, and the rollout of that prompt; without `group_id`, `run_id`
                          names the group
    advantage             one advantage for the whole trajectory
    token_advantages      one advantage per sampled token, in order; replaces `advantage`
    score                 further numbers, averaged in the metrics
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from retrain.algorithms.batching import segments
from retrain.trainer.data import response_of
from retrain.types import Group

STREAMS = ("loss_mask", "logprobs", "versions")
"""Fields that have one value per token."""


class Fields(dict[str, Any]):
    """A dict whose keys are attributes too."""

    _title: ClassVar[str]
    """What messages call it."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("_"):  # what copy and pickle ask for
            raise AttributeError(name)
        raise AttributeError(
            f"the {self._title} has no {name!r}. Its keys: {', '.join(self) or 'none'}. Use "
            f".get({name!r}, default) for a key that may be missing"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value


class Trajectory(Fields):
    """`Trajectory(prompt=..., reward=...)`, `Trajectory({...})`, or both together.

    Raises ValueError when a per-token field and `tokens` differ in length.
    """

    _title = "trajectory"

    def __init__(self, fields: Mapping[str, Any] | None = None, /, **more: Any) -> None:
        super().__init__({**(fields or {}), **more})
        lengths = {n: len(self[n]) for n in ("tokens", *STREAMS) if self.get(n) is not None}
        for name, length in lengths.items():
            if length != lengths.get("tokens", length):
                raise ValueError(
                    f"{name} has {length} values for {lengths['tokens']} tokens: expected one "
                    "value per token"
                )


def as_trajectories(trajectories: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
    """Convert mappings to Trajectories. A Trajectory is returned itself, so it's changed in place.

    Raises TypeError for anything that is not a mapping.
    """
    for index, trajectory in enumerate(trajectories):
        if not isinstance(trajectory, Mapping):
            raise TypeError(
                f"trajectory {index} is a {type(trajectory).__name__}, expected a Trajectory or a "
                "mapping such as {'prompt': ..., 'response': ..., 'reward': ...}"
            )
    return [one if isinstance(one, Trajectory) else Trajectory(one) for one in trajectories]


def from_group(group: Group) -> list[Trajectory]:
    """The pipe's scored rollouts of one prompt: a Trajectory for each of their segments.

    `ground_truth` is the prompt's answer, `metadata` its further columns and `score` the components
    of the reward. `is_truncated` marks a reply that reached the length limit.
    """
    made = []
    for index, rollout in enumerate(group.trajectories):
        shared = {
            "prompt": group.prompt.text,
            "response": response_of(rollout),
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
                # Otherwise the tokens come from the dataset, and have no log-probs or reward.
                fields |= {"logprobs": list(sample.logprobs), "reward": rollout.reward}
            made.append(Trajectory(shared, **fields))
    return made
