"""GRPO's advantage over trajectories, and who is compared with whom.

`group_id` names the prompt and `run_id` the rollout of it. Trajectories that have a `run_id` alone
are grouped by it, as NexRL's pages do; one that has neither is a group of its own.
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


def group_key(fields: Mapping[str, Any], index: int) -> Hashable:
    """What names the group of the trajectory at `index`."""
    for name in ("group_id", "run_id"):
        if fields.get(name) is not None:
            return (name, fields[name])
    return ("index", index)


def grouped(keys: Iterable[Hashable]) -> list[list[int]]:
    """The positions of equal keys, groups in the order of their first member."""
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
    """Writes `advantage` into each trajectory: (r - mean) / (std + eps) within its group.

    Shao et al. 2024 (arXiv:2402.03300), eq. 3. With `use_run_ids`, trajectories of one group and
    one run are segments of one rollout, which counts once, by the mean of its segments.

    `rule="page"`: std with ddof 1, eps 1e-8; a group of one and a flat group have advantage 0.
    `rule="nexrl"`: NexRL's code, with eps 1e-6, ddof 0 without run ids, and a group of one at
    r / (1 + eps); a group of several segments of one run, where that code gives NaN, is its rule
    for one.

    Raises ValueError on a missing or non-finite reward, naming the trajectory.
    """
    made = as_trajectories(trajectories)
    rewards = [reward_of(trajectory, index) for index, trajectory in enumerate(made)]
    groups = grouped(group_key(trajectory, index) for index, trajectory in enumerate(made))
    for members in groups:
        own = [rewards[index] for index in members]
        check_finite(own, str(group_key(made[members[0]], members[0])[1]))  # type: ignore[index]  # a key is a pair
        runs = _runs([made[index] for index in members]) if use_run_ids else None
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
    """The reward as a float; raises ValueError when there is none."""
    reward = trajectory.get("reward")
    try:
        if reward is None or isinstance(reward, str):
            raise TypeError
        return float(reward)
    except (TypeError, ValueError):
        raise ValueError(
            f"trajectory {index} has the reward {shown(reward)}: a number is expected; set "
            "`reward` on every trajectory"
        ) from None


def _runs(members: Sequence[Trajectory]) -> list[Hashable] | None:
    """The run of each member of one group; None where a run id is the group's own name."""
    if any(member.get("group_id") is None for member in members):
        return None
    return [
        ("own", index) if member.get("run_id") is None else ("run", member["run_id"])
        for index, member in enumerate(members)
    ]


def _nexrl_rule(
    rewards: Sequence[float], runs: Sequence[Hashable] | None, eps: float
) -> list[float]:
    units = [[index] for index in range(len(rewards))] if runs is None else grouped(runs)
    means = [math.fsum(rewards[index] for index in unit) / len(unit) for unit in units]
    mean, divisor = 0.0, 1.0
    if len(units) > 1:
        mean = math.fsum(means) / len(means)
        divisor = std(means)
        if runs is None:
            divisor *= math.sqrt((len(means) - 1) / len(means))
    return [(reward - mean) / (divisor + eps) for reward in rewards]
