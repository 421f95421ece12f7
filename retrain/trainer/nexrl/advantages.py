"""GRPO's advantage over trajectories, grouped by `group_id` (the prompt).

A trajectory without `group_id` is grouped by its `run_id`, as on NexRL's pages. One that has
neither is a group of its own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

from retrain.algorithms.functional import check_finite, group_relative, std
from retrain.errors import shown
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories

Rule = Literal["page", "nexrl"]


def group_key(fields: Mapping[str, Any], index: int) -> tuple[str, Hashable]:
    """The key of the group that the trajectory at `index` belongs to."""
    for name in ("group_id", "run_id"):
        if fields.get(name) is not None:
            return name, fields[name]
    return "index", index


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys; groups are in the order of their first member."""
    members: dict[Hashable, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    return list(members.values())


def compute_grpo_advantage_for_trajectories(
    trajectories: Sequence[Trajectory],
    logger: logging.Logger | None = None,
    use_run_ids: bool = True,
    *,
    eps: float | None = None,
    rule: Rule = "page",
) -> list[Trajectory]:
    """Set `advantage` of each trajectory to (r - mean) / (std + eps) within its group.

    Shao et al. 2024 (arXiv:2402.03300), eq. 3. With `use_run_ids`, trajectories that share group
    and run are segments of one rollout. The rollout counts once, with the mean of its segments.

    `rule="page"`: std with ddof 1, eps 1e-8. A group of one and a group of equal rewards get
    advantage 0.
    `rule="nexrl"`: the values of NexRL's code: eps 1e-6, ddof 0 without run ids, and r / (1 + eps)
    for a group of one. A group whose trajectories are all segments of one run, where that code
    returns NaN, is treated as a group of one.

    Raises ValueError for a missing or non-finite reward.
    """
    made = as_trajectories(trajectories)
    rewards = [reward_of(trajectory, index) for index, trajectory in enumerate(made)]
    keys = [group_key(trajectory, index) for index, trajectory in enumerate(made)]
    groups = grouped(keys)
    for members in groups:
        kind, name = keys[members[0]]
        own = [rewards[index] for index in members]
        check_finite(own, str(name))
        runs = None
        if use_run_ids and kind == "group_id":
            ids = [made[index].get("run_id") for index in members]
            runs = [("own", i) if run is None else ("run", run) for i, run in enumerate(ids)]
        if rule == "page":
            credit = group_relative(own, eps=1e-8 if eps is None else eps, run_ids=runs)
        else:
            credit = _nexrl_rule(own, runs, 1e-6 if eps is None else eps)
        for index, advantage in zip(members, credit, strict=True):
            made[index]["advantage"] = advantage
    if logger is not None:
        logger.debug("advantages of %d trajectories in %d groups", len(made), len(groups))
    return made


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


def _nexrl_rule(
    rewards: Sequence[float], runs: Sequence[Hashable] | None, eps: float
) -> list[float]:
    units = grouped(range(len(rewards)) if runs is None else runs)
    means = [math.fsum(rewards[index] for index in unit) / len(unit) for unit in units]
    if len(means) == 1:
        return [reward / (1.0 + eps) for reward in rewards]
    mean = math.fsum(means) / len(means)
    divisor = std(means, ddof=0 if runs is None else 1) + eps
    return [(reward - mean) / divisor for reward in rewards]
