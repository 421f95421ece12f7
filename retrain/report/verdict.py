"""The report's conclusions: the bottleneck of a run, and problems to look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from retrain.observe.journal import Row, known
from retrain.report.charts import points
from retrain.report.timeline import OUTAGES

WAITING = 0.2
"""Waiting or publishing is the bottleneck from this share of the trainer's time."""
IN_OUTAGES = "waiting in outages"
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
    away = min(1.0, _sum(rows, OUTAGES) / total)
    shares["everything else"] = max(0.0, 1.0 - sum(shares.values()) - away)
    shares |= {IN_OUTAGES: away} if away else {}
    sentence, advice = _sentence_and_advice(shares, stage_seconds, target)
    return {
        "sentence": sentence,
        "advice": advice,
        "shares": [{"name": name, "share": share} for name, share in shares.items()],
    }


def _sentence_and_advice(
    shares: Mapping[str, float], stage_seconds: Mapping[str, float], target: int | None
) -> tuple[str, str]:
    waited, published = shares["waiting for rollouts"], shares["publishing"]
    updating, rest = shares["updating"], shares["everything else"]
    away = shares.get(IN_OUTAGES, 0.0)
    if away >= WAITING and away >= max(waited, published):
        return (
            f"The trainer waited {away:.0%} of the time in outages, and for rollouts {waited:.0%}.",
            "The history below says what could not be reached, and for how long.",
        )
    if waited >= WAITING and waited >= published:
        besides = f", and {away:.0%} in outages" if away >= 0.005 else ""
        sentence = (
            f"The trainer waited for rollouts {waited:.0%} of the time{besides}: generation-bound."
        )
        return sentence, _faster_rollouts(stage_seconds, target)
    if published >= WAITING:
        return (
            f"The trainer spent {published:.0%} of the time publishing weights: publish-bound.",
            "Publish LoRA weights instead of full weights, or make steps larger.",
        )
    sentence = f"The trainer was updating {updating:.0%} of the time: training-bound."
    if rest > updating:
        sentence = (
            f"{rest:.0%} of a step is neither waiting, updating nor publishing: look at "
            "callbacks, checkpoints and evaluation."
        )
    shorter = "a faster backend or fewer tokens per step would shorten the run."
    if not stage_seconds:  # a dataset: nothing is generated
        return sentence, shorter.capitalize()
    return sentence, (
        "Generation keeps up. A smaller staleness.target would cost little time and train on "
        f"more recent rollouts; {shorter}"
    )


def _faster_rollouts(stage_seconds: Mapping[str, float], target: int | None) -> str:
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
    no_signal = [value for _, value in points(rows[-50:], "groups/zero_signal")]
    flat = _share(sum(no_signal), len(no_signal) * (groups_per_step or 0))
    failed = _share(outcomes.total() - outcomes["ok"], outcomes.total())
    cut = _share(stop_reasons["length"] + stop_reasons["context"], stop_reasons.total())
    tokens = {row["fate"]: row["tokens"] for row in wasted}
    stale = _share(tokens.get("stale", 0), sum(tokens.values()))
    gaps = [(abs(gap), step) for step, gap in points(rows, "kl/sampler_trainer")]
    gap, step = max(gaps, default=(0.0, 0.0))
    left = _entropy_left(rows)
    checks = (
        _nonfinite(rows),
        flat >= 0.5
        and f"{flat:.0%} of the latest groups had equal rewards, so no learning signal: the task "
        "is solved, its prompts are too easy or too hard, or the groups are too small. "
        "train.no_signal: refill replaces such groups.",
        failed >= 0.05
        and f"{failed:.0%} of the rollouts failed and were not trained: see the causes below.",
        cut >= 0.2
        and f"{cut:.0%} of the turns reached the maximum length: raise sampling.max_tokens, unless "
        "the task is to reach it.",
        stale >= 0.1
        and f"{stale:.0%} of the sampled tokens were too stale to train on: raise staleness.max, "
        "or lower staleness.target.",
        gap >= 0.1
        and f"The KL between sampler and trainer reached {gap:.2g} in step {step:.0f}: lower "
        "staleness.max or the learning rate, check the sampler's precision, or set "
        "algorithm.mismatch.",
        left < 0.05
        and f"Entropy fell to {left:.1%} of its first value: the model hardly explores any more, "
        "which is fine if the task is solved.",
    )
    return [text for text in checks if isinstance(text, str)]


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _nonfinite(rows: Sequence[Row]) -> str | None:
    # the backend doesn't report a key that never has a value
    reported = {key for row in rows for key in row if known(row[key])}
    # nor does a skipped update have all keys
    trained = [row for row in rows if row.get("tokens/trained") != 0]
    bad = [(r["step"], key) for r in trained for key in r.get("nonfinite") or () if key in reported]
    if not bad:
        return None
    return (
        f"{bad[0][1]} was NaN or infinite, first in step {bad[0][0]}: lower backend.learning_rate, "
        "or check the rewards of that step."
    )


def _entropy_left(rows: Sequence[Row]) -> float:
    """The last tenth's mean entropy as a share of the first tenth's; 1.0 when it isn't known."""
    entropy = [value for _, value in points(rows, "entropy")]
    span = max(1, len(entropy) // 10)
    if len(entropy) < 20 or fmean(entropy[:span]) <= TINY:
        return 1.0
    return fmean(entropy[-span:]) / fmean(entropy[:span])


def _sum(rows: Sequence[Row], key: str) -> float:
    return sum(float(row[key]) for row in rows if known(row.get(key)))
