"""Metrics of a step's rollouts, under NexRL's names. Every value is a float."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from retrain.algorithms.functional import std
from retrain.trainer.nexrl.advantages import grouped, reward_of
from retrain.types import Metrics


def log_rollout_metrics(
    trajectories: Sequence[Mapping[str, Any]],
    metrics: dict[str, Any],
    prefix: str = "rollout/",
) -> dict[str, Any]:
    """Add `reward_{mean,std,min,max}` and the mean of each number in `score`, under `prefix`.

    Trajectories with a `loss_mask` add `response_length/{mean,max,min}` and the same of
    `prompt_length`; those with `is_truncated` add `response_length/truncated`, the share of
    truncated replies. Returns `metrics`.
    """
    numbered = enumerate(trajectories)
    rewards = [reward_of(one, index) for index, one in numbered if one.get("reward") is not None]
    metrics |= {f"{prefix}reward_{name}": value for name, value in _spread(rewards).items()}
    scores: dict[str, list[float]] = {}
    for one in trajectories:
        for name, value in dict(one.get("score") or {}).items():
            if isinstance(value, int | float):
                scores.setdefault(name, []).append(float(value))
    metrics |= {f"{prefix}{name}": fmean(values) for name, values in scores.items()}
    metrics |= _lengths(trajectories)
    return metrics


def _lengths(trajectories: Sequence[Mapping[str, Any]]) -> Metrics:
    masks = [one["loss_mask"] for one in trajectories if one.get("loss_mask") is not None]
    trained = [float(sum(mask)) for mask in masks]
    rest = [len(mask) - count for mask, count in zip(masks, trained, strict=True)]
    metrics = _without_std("response_length", trained) | _without_std("prompt_length", rest)
    if cut := [float(one["is_truncated"]) for one in trajectories if "is_truncated" in one]:
        metrics["response_length/truncated"] = fmean(cut)
    return metrics


def log_grpo_metrics(
    trajectories: Sequence[Mapping[str, Any]], metrics: dict[str, Any]
) -> dict[str, Any]:
    """Add `critic/grpo_std/{mean,min,max}` over the groups, `critic/grpo_num_groups`,
    `critic/grpo_flat_groups` (groups of equal rewards) and `critic/advantage_{mean,std}`.
    Returns `metrics`.
    """
    rewards = [reward_of(one, index) for index, one in enumerate(trajectories)]
    groups = grouped(trajectories).values()
    stds = [std([rewards[index] for index in members]) for members in groups]
    spread = _spread([float(one["advantage"]) for one in trajectories if "advantage" in one])
    metrics["critic/grpo_num_groups"] = float(len(groups))
    metrics["critic/grpo_flat_groups"] = float(stds.count(0.0))
    metrics |= _without_std("critic/grpo_std", stds)
    metrics |= {f"critic/advantage_{k}": v for k, v in spread.items() if k in ("mean", "std")}
    return metrics


def _without_std(name: str, values: Sequence[float]) -> Metrics:
    return {f"{name}/{k}": value for k, value in _spread(values).items() if k != "std"}


def floats(metrics: Mapping[str, Any]) -> Metrics:
    """The metrics as plain floats: a tensor or NumPy number of one element is converted.

    Raises TypeError for a value that is not one number.
    """
    made: Metrics = {}
    for name, value in metrics.items():
        try:
            made[name] = float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            kind = type(value).__name__
            raise TypeError(f"metric {name!r}: got a {kind}, expected one number") from error
    return made


def _spread(values: Sequence[float]) -> Metrics:
    """Mean, std, min and max; empty when there are no values."""
    if not values:
        return {}
    return {"mean": fmean(values), "std": std(values), "min": min(values), "max": max(values)}
