"""The report's conclusions: the bottleneck of a run, and problems to look at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from retrain.observe.charts import Row, known, points

WAITING = 0.2
"""Waiting or publishing is the bottleneck from this share of the trainer's time."""
TINY = 1e-9


def bottleneck(
    rows: Sequence[Row], stage_seconds: Mapping[str, float], target: int | None
) -> dict[str, Any] | None:
    """Where the trainer's time went, with advice; None without a timed step.

    Ignores the first of several steps, which waits for the pipe to fill.
    """
    rows = rows[1:] if len(rows) > 1 else rows
    total = _sum(rows, "time/step")
    if total <= 0:
        return None
    shares = {
        name: min(1.0, _sum(rows, key) / total)
        for name, key in (
            ("waiting for rollouts", "time/wait_for_batch"),
            ("updating", "time/update"),
            ("publishing", "time/publish"),
        )
    }
    shares["everything else"] = max(0.0, 1.0 - sum(shares.values()))
    return {
        "sentence": _sentence(shares),
        "advice": _advice(shares, stage_seconds, target),
        "shares": [{"name": name, "share": share} for name, share in shares.items()],
    }


def _sentence(shares: Mapping[str, float]) -> str:
    waited, published = shares["waiting for rollouts"], shares["publishing"]
    if waited >= WAITING and waited >= published:
        return f"The trainer waited for rollouts {waited:.0%} of the time: generation-bound."
    if published >= WAITING:
        return f"The trainer spent {published:.0%} of the time publishing weights: publish-bound."
    if shares["everything else"] > shares["updating"]:
        return (
            f"{shares['everything else']:.0%} of a step is neither waiting, updating nor "
            "publishing: look at callbacks, checkpoints and evaluation."
        )
    return f"The trainer was updating {shares['updating']:.0%} of the time: training-bound."


def _advice(
    shares: Mapping[str, float], stage_seconds: Mapping[str, float], target: int | None
) -> str:
    waited, published = shares["waiting for rollouts"], shares["publishing"]
    if max(waited, published) < WAITING:
        shorter = "a faster backend or fewer tokens per step would shorten the run."
        if not stage_seconds:  # a data set: nothing is generated
            return shorter.capitalize()
        return (
            "Generation keeps up. A smaller staleness.target would cost little time and train on "
            f"more recent rollouts; {shorter}"
        )
    if published > waited:
        return "Publish LoRA weights instead of full weights, or make steps larger."
    spent = sum(stage_seconds.values())
    slowest = max(stage_seconds, key=lambda name: stage_seconds[name], default="sample")
    where = (
        f"A rollout spends {stage_seconds[slowest] / spent:.0%} of its time in {slowest!r}. "
        if spent > TINY
        else ""
    )
    if target == 0:
        return where + "staleness.target is 0, so nothing is generated during an update; try 1."
    remedy = {
        "environment": "Make the environment faster, or raise staleness.target and rollout.slots.",
        "reward": "Make the reward faster, or raise rollout.reward_concurrency.",
    }
    return where + remedy.get(
        slowest,
        f"Raise staleness.target (now {target}) or rollout.slots, or lower sampling.max_tokens.",
    )


def findings(
    rows: Sequence[Row],
    outcomes: Counter[str],
    stop_reasons: Counter[str],
    wasted: Sequence[Mapping[str, Any]],
    groups_per_step: int | None,
) -> list[str]:
    """Problems, each with what to do about it; empty if there are none."""
    checks = (
        _nonfinite(rows),
        _flat(rows, groups_per_step),
        _failing(outcomes),
        _truncated(stop_reasons),
        _stale(wasted),
        _mismatch(rows),
        _collapse(rows),
    )
    return [finding for finding in checks if finding]


def _nonfinite(rows: Sequence[Row]) -> str:
    # the backend doesn't report a key that never has a value
    reported = {key for row in rows for key in row if known(row[key])}
    bad = [(r["step"], key) for r in rows for key in r.get("nonfinite") or () if key in reported]
    if not bad:
        return ""
    step, key = bad[0]
    return (
        f"{key} was NaN or infinite, first in step {step}: lower backend.learning_rate, or check "
        "the rewards of that step."
    )


def _flat(rows: Sequence[Row], groups_per_step: int | None) -> str:
    flat = [value for _, value in points(rows[-50:], "groups/zero_signal")]
    share = fmean(flat) / groups_per_step if flat and groups_per_step else 0.0
    if share < 0.5:
        return ""
    return (
        f"{share:.0%} of the latest groups had equal rewards, so no learning signal: the task is "
        "solved, its prompts are too easy or too hard, or the groups are too small. "
        "train.no_signal: refill replaces such groups."
    )


def _failing(outcomes: Counter[str]) -> str:
    failed = outcomes.total() - outcomes["ok"]
    if not outcomes.total() or failed / outcomes.total() < 0.05:
        return ""
    return (
        f"{failed / outcomes.total():.0%} of the rollouts failed and were not trained: "
        "see the causes below."
    )


def _truncated(stop_reasons: Counter[str]) -> str:
    cut = stop_reasons["length"] + stop_reasons["context"]
    if not stop_reasons.total() or cut / stop_reasons.total() < 0.2:
        return ""
    return (
        f"{cut / stop_reasons.total():.0%} of the turns reached the maximum length: "
        "raise sampling.max_tokens, unless the task is to reach it."
    )


def _stale(wasted: Sequence[Mapping[str, Any]]) -> str:
    tokens = {row["fate"]: row["tokens"] for row in wasted}
    share = tokens.get("stale", 0) / max(1, sum(tokens.values()))
    if share < 0.1:
        return ""
    return (
        f"{share:.0%} of the sampled tokens were too stale to train on: raise staleness.max, or "
        "lower staleness.target."
    )


def _mismatch(rows: Sequence[Row]) -> str:
    worst = max(
        ((abs(value), step) for step, value in points(rows, "kl/sampler_trainer")),
        default=(0.0, 0.0),
    )
    if worst[0] < 0.1:
        return ""
    return (
        f"The KL between sampler and trainer reached {worst[0]:.2g} in step {worst[1]:.0f}: "
        "lower staleness.max or the learning rate, and check the sampler's precision."
    )


def _collapse(rows: Sequence[Row]) -> str:
    entropy = [value for _, value in points(rows, "entropy")]
    span = max(1, len(entropy) // 10)
    if len(entropy) < 20 or fmean(entropy[:span]) <= TINY:
        return ""
    left = fmean(entropy[-span:]) / fmean(entropy[:span])
    if left >= 0.05 or math.isnan(left):
        return ""
    return (
        f"Entropy fell to {left:.1%} of its first value: the model hardly explores any more, which "
        "is fine if the task is solved."
    )


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(float(row[key]) for row in rows if known(row.get(key)))
