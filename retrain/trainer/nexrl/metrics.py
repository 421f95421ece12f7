"""What a step says of its rollouts, under NexRL's metric names. Every value is a float."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from retrain.algorithms.functional import std
from retrain.trainer.nexrl.advantages import group_key, grouped, reward_of
from retrain.types import Metrics

log = logging.getLogger(__name__)
_told: set[str] = set()


def log_rollout_metrics(
    trajectories: Sequence[Mapping[str, Any]],
    metrics: dict[str, Any],
    prefix: str = "rollout/",
) -> dict[str, Any]:
    """Adds `reward_{mean,std,min,max}` and the mean of each number in `score` under `prefix`.

    With tokens: `response_length/{mean,max,min}` and `prompt_length/...`, and
    `response_length/truncated`, the share of replies that were cut off, where that is known.
    Trajectories without a reward (supervised ones) have none to tell. Returns `metrics`.
    """
    rewards = [
        reward_of(one, index)
        for index, one in enumerate(trajectories)
        if one.get("reward") is not None
    ]
    if rewards:
        metrics |= {f"{prefix}reward_{name}": value for name, value in _spread(rewards).items()}
    scores: dict[str, list[float]] = {}
    for trajectory in trajectories:
        for name, value in dict(trajectory.get("score") or {}).items():
            if isinstance(value, int | float):
                scores.setdefault(name, []).append(float(value))
    metrics |= {f"{prefix}{name}": fmean(values) for name, values in scores.items()}
    metrics |= _lengths(trajectories)
    return metrics


def log_grpo_metrics(
    trajectories: Sequence[Mapping[str, Any]], metrics: dict[str, Any]
) -> dict[str, Any]:
    """Adds `critic/grpo_std/{mean,min,max}` of the groups' rewards, `critic/grpo_num_groups`,
    `critic/grpo_flat_groups` (equal rewards: nothing to learn) and `critic/advantage_{mean,std}`.
    Returns `metrics`.
    """
    if not trajectories:
        metrics["critic/grpo_num_groups"] = 0.0
        return metrics
    rewards = [reward_of(one, index) for index, one in enumerate(trajectories)]
    groups = grouped(group_key(one, index) for index, one in enumerate(trajectories))
    spreads = [std([rewards[index] for index in members]) for members in groups]
    metrics["critic/grpo_num_groups"] = float(len(groups))
    metrics["critic/grpo_flat_groups"] = float(sum(spread == 0 for spread in spreads))
    for name, value in (("mean", fmean(spreads)), ("min", min(spreads)), ("max", max(spreads))):
        metrics[f"critic/grpo_std/{name}"] = value
    advantages = [float(one["advantage"]) for one in trajectories if "advantage" in one]
    if advantages:
        metrics["critic/advantage_mean"] = fmean(advantages)
        metrics["critic/advantage_std"] = std(advantages)
    return metrics


def floats(metrics: Mapping[str, Any]) -> Metrics:
    """The metrics as plain floats: a tensor or NumPy number of one element is converted.

    Each key that had to be converted is told once. Raises TypeError, naming the key, on what is no
    number.
    """
    made: Metrics = {}
    for name, value in metrics.items():
        if not isinstance(value, int | float):
            _tell_once(name, value)
        try:
            made[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"the metric {name!r} is a {type(value).__name__}: one number is expected"
            ) from error
    return made


def _tell_once(name: str, value: object) -> None:
    if name not in _told:
        _told.add(name)
        log.warning("the metric %s is a %s: write float(...)", name, type(value).__name__)


def _spread(values: Sequence[float]) -> Metrics:
    return {"mean": fmean(values), "std": std(values), "min": min(values), "max": max(values)}


def _lengths(trajectories: Sequence[Mapping[str, Any]]) -> Metrics:
    masks = [one["loss_mask"] for one in trajectories if one.get("loss_mask") is not None]
    if not masks:
        return {}
    trained = [float(sum(mask)) for mask in masks]
    shown = [float(len(mask) - math.fsum(mask)) for mask in masks]
    found: Metrics = {}
    for name, lengths in (("response_length", trained), ("prompt_length", shown)):
        found |= {f"{name}/{key}": _spread(lengths)[key] for key in ("mean", "max", "min")}
    cut = [float(one["is_truncated"]) for one in trajectories if "is_truncated" in one]
    return {**found, "response_length/truncated": fmean(cut)} if cut else found
