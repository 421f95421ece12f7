"""GRPO's advantage over trajectories, grouped by `group_id` (the prompt).

A trajectory without `group_id` is grouped by its `run_id`, as on NexRL's pages. One that has
neither is a group of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from retrain.algorithms.functional import check_finite, group_relative
from retrain.errors import shown
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories

EPS = 1e-8


def group_key(fields: Mapping[str, Any], index: int) -> tuple[str, Hashable]:
    """The key of the group that the trajectory at `index` belongs to."""
    for name in ("group_id", "run_id"):
        if fields.get(name) is not None:
            return name, fields[name]
    return "index", index


def grouped(trajectories: Sequence[Mapping[str, Any]]) -> dict[tuple[str, Hashable], list[int]]:
    """The positions of each group's members, in the order of their first member."""
    members: dict[tuple[str, Hashable], list[int]] = {}
    for index, fields in enumerate(trajectories):
        members.setdefault(group_key(fields, index), []).append(index)
    return members


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory],
    logger: logging.Logger | None = None,
    use_run_ids: bool = True,
    *,
    eps: float = EPS,
) -> list[Trajectory]:
    """Set `advantage` of each trajectory to (r - mean) / (std + eps) within its group.

    Shao et al. 2024 (arXiv:2402.03300), eq. 3, with ddof 1. A group of one and a group of equal
    rewards get 0. With `use_run_ids`, trajectories that share group and run are segments of one
    rollout. The rollout counts once, with the mean of its segments.

    Raises ValueError for a missing or non-finite reward.
    """
    made = as_trajectories(trajectories)
    rewards = [reward_of(trajectory, index) for index, trajectory in enumerate(made)]
    groups = grouped(made)
    for (kind, name), members in groups.items():
        own = [rewards[index] for index in members]
        check_finite(own, str(name))
        segmented = use_run_ids and kind == "group_id"
        runs = _run_ids([made[index] for index in members]) if segmented else None
        credit = group_relative(own, eps=eps, run_ids=runs)
        for index, advantage in zip(members, credit, strict=True):
            made[index]["advantage"] = advantage
    if logger is not None:
        logger.debug("advantages of %d trajectories in %d groups", len(made), len(groups))
    return made


def _run_ids(members: Sequence[Trajectory]) -> list[tuple[str, Hashable]]:
    """The rollout of each trajectory; one without a `run_id` is a rollout of its own."""
    ids = [one.get("run_id") for one in members]
    return [("own", index) if run is None else ("run", run) for index, run in enumerate(ids)]


def reward_of(trajectory: Mapping[str, Any], index: int) -> float:
    """The reward as a float. Raises ValueError when there is none."""
    reward = trajectory.get("reward")
    try:
        if reward is None or isinstance(reward, str):
            raise TypeError
        return float(reward)
    except (TypeError, ValueError):
        raise ValueError(
            f"trajectory {index}: got {shown(reward)} as reward, expected a number; set `reward` "
            "on every trajectory"
        ) from None
