"""Losses that a service does not compute, from its log-probs: value and dL/dlogp, without torch.

A forward pass gives the learner's log-probs lp, this module computes g = dL/dlp, and a backward
pass of the loss sum(g lp), with g held constant, has exactly the gradient of L with respect to
the weights. This costs one additional forward pass. `retrain.losses` has the formulas.
"""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle
from statistics import fmean
from typing import Any

from retrain.adapters.losses import custom_loss
from retrain.adapters.remote.datums import Shifted
from retrain.algorithms.functional import kl_k3
from retrain.config import MismatchConfig, RunConfig
from retrain.errors import AdapterError, ConfigError, NonFiniteError
from retrain.losses import FLOATS, Formula, mismatch_weight, pair_rows, row_of, settings
from retrain.types import Batch, Metrics

Judgement = tuple[Any, Any]  # of `mismatch_weight`: a weight, and whether it is out of bounds


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A loss at the learner's present log-probs."""

    loss: float
    gradients: list[list[float]]
    """dL/dlogp of each target of each datum; 0.0 where the mask is 0."""
    metrics: Metrics
    """`kl/sampler_trainer`, `ratio/mean`, `entropy` and `tokens/trained`; for a loss that clips
    `clip_fraction`; for a loss of pairs `dpo/margin` and `dpo/accuracy`, means over pairs; for
    other losses `kl/reference`, if the datums have the stream `reference_logprobs`; with
    `algorithm.mismatch`, `mismatch/clipped`."""


async def valued(
    batch: Batch,
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Shifted],
    config: RunConfig,
) -> Surrogate:
    """The batch's loss at the learner's log-probs, computed in a thread because Python is slow.

    Raises AdapterError on log-probs that do not fit the datums, NonFiniteError when the loss is NaN
    or infinite, UserCodeError when a user's own loss fails.
    """
    _check_lengths(logprobs, datums)
    compute = partial(surrogate, batch.loss, batch.loss_config)
    if ":" in batch.loss:
        compute = partial(_custom, custom_loss(config))
    rule = config.algorithm.mismatch
    if rule is None:
        return await asyncio.to_thread(compute, logprobs, datums)
    weighted, clipped = corrected(rule, logprobs, datums)
    made = await asyncio.to_thread(compute, logprobs, weighted)
    metrics = {**made.metrics, **_drift(logprobs, datums), "mismatch/clipped": clipped}
    return replace(made, metrics=metrics)


def corrected(
    rule: MismatchConfig, logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]
) -> tuple[list[Shifted], float]:
    """The datums with advantages weighted by `rule`, and the learner's log-probs as the old ones.

    Also the share of tokens, or of sequences, whose ratio is outside the bounds. The ratio of a
    sequence is the exponential of the mean of its log-ratios (GSPO, arXiv:2507.18071). Every datum
    has a trained token.
    """
    gaps: defaultdict[str | int, list[float]] = defaultdict(list)
    runs = [datum.run_id or row for row, datum in enumerate(datums)]
    for run, learner, datum in zip(runs, logprobs, datums, strict=True):
        gaps[run] += [gap for _, gap in _trained(learner, datum)]
    found = {run: _judgements(rule, own) for run, own in gaps.items()}
    left = {run: cycle([weight for weight, _ in own]) for run, own in found.items()}
    weighted = [
        replace(datum, logprobs=learner, advantages=_weighted(datum, left[run]))
        for run, learner, datum in zip(runs, logprobs, datums, strict=True)
    ]
    return weighted, fmean(outside for _, outside in chain(*found.values()))


def _judgements(rule: MismatchConfig, gaps: Sequence[float]) -> list[Judgement]:
    """Those of a rollout's trained tokens, or the one of their sequence."""
    wanted = gaps if rule.level == "token" else [fmean(gaps)]
    weigh = partial(mismatch_weight, FLOATS, rule.type, *rule.bounds)
    return [weigh(FLOATS.exp(gap)) for gap in wanted]


def _weighted(datum: Shifted, weights: Iterator[float]) -> list[float]:
    tokens = zip(datum.advantages, datum.mask, strict=True)
    return [advantage * next(weights) if kept else 0.0 for advantage, kept in tokens]


def _trained(learner: Sequence[float], datum: Shifted) -> list[tuple[float, float]]:
    """The log-prob and log(p_learner / p_sampler) of each trained token."""
    rows = zip(learner, datum.logprobs, datum.mask, strict=True)
    return [(lp, lp - old) for lp, old, kept in rows if kept]


def _custom(
    loss: Any,  # an engine.losses.CustomLoss, which names torch types
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Shifted],
) -> Surrogate:
    from retrain.engine.losses import custom_surrogate  # imports torch, for a user's own loss only

    value, gradients = custom_surrogate(
        loss,
        logprobs,
        [datum.logprobs for datum in datums],
        [datum.advantages for datum in datums],
        [datum.mask for datum in datums],
    )
    metrics = {**_drift(logprobs, datums), **_reference_kl(logprobs, datums)}
    return Surrogate(value, gradients, metrics)


def surrogate(
    loss: str,
    config: Mapping[str, Any],  # the loss's own keys
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Shifted],
) -> Surrogate:
    """The loss `loss` of `datums`, where the learner gives the targets `logprobs`.

    A loss of pairs reads the stream `reference_logprobs`, and pairs datums by the stream
    `pair_ids`, or 0-1, 2-3, ... without it. The sign of the advantages marks the chosen row (+) and
    the rejected row (-); their size is the pair's weight.

    Raises ConfigError on an unknown loss or key, AdapterError on log-probs that do not fit the
    datums, ValueError on rows that do not form pairs, NonFiniteError when the loss is NaN or
    infinite.
    """
    keys, row = settings(loss, config), row_of(loss)
    if row.formula is None:
        raise ConfigError(f"the loss {loss!r} is TRL's own; no service computes it")
    _check_lengths(logprobs, datums)
    formula = partial(row.formula, FLOATS, keys)
    compute = _pairwise if row.reads == "pairs" else _tokenwise
    value, gradients, metrics = compute(formula, logprobs, datums)
    if not all(map(math.isfinite, chain([value], *gradients))):
        raise NonFiniteError(
            f"the loss {loss} is {value}, or its gradient is not finite; the log-probs or the "
            "advantages diverged"
        )
    return Surrogate(value, gradients, {**_drift(logprobs, datums), **metrics})


def _tokenwise(
    formula: Formula, logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]
) -> tuple[float, list[list[float]], Metrics]:
    """The loss, dL/dlogp of each token, and the share of clipped tokens if the loss clips."""
    total: list[float] = []
    gradients, clips = [], []
    for learner, datum in zip(logprobs, datums, strict=True):
        slopes = []
        for lp, old, advantage, kept in zip(
            learner, datum.logprobs, datum.advantages, datum.mask, strict=True
        ):
            if not kept:
                slopes.append(0.0)
                continue
            value, slope, clipped = formula(lp, old, FLOATS.exp(lp - old), advantage)
            total.append(value)
            slopes.append(slope)
            if clipped is not None:
                clips.append(clipped)
        gradients.append(slopes)
    metrics = _reference_kl(logprobs, datums)
    if clips:
        metrics["clip_fraction"] = fmean(clips)
    return math.fsum(total), gradients, metrics


def _pairwise(
    formula: Formula, logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]
) -> tuple[float, list[list[float]], Metrics]:
    """The loss, dL/dlogp of each token, the mean margin and the share of positive margins."""
    gains = [_gain(*row) for row in zip(logprobs, datums, strict=True)]
    weights = [max(abs(a) for a in datum.advantages) for datum in datums]
    total, slopes, margins = 0.0, [0.0] * len(datums), []
    ids = [_pair_id(row, datum) for row, datum in enumerate(datums)]
    for chosen, rejected in pair_rows(ids, [math.fsum(datum.advantages) for datum in datums]):
        value, slope, margin = formula(gains[chosen] - gains[rejected])
        weight = (weights[chosen] + weights[rejected]) / 2
        total += weight * value
        slopes[chosen], slopes[rejected] = weight * slope, -weight * slope
        margins.append(margin)
    rows = zip(slopes, datums, strict=True)
    gradients = [[slope * bool(kept) for kept in datum.mask] for slope, datum in rows]
    accuracy = fmean(margin > 0 for margin in margins)
    return total, gradients, {"dpo/margin": fmean(margins), "dpo/accuracy": accuracy}


def _gain(learner: Sequence[float], datum: Shifted) -> float:
    rows = zip(learner, datum.streams["reference_logprobs"], datum.mask, strict=True)
    return math.fsum(lp - ref for lp, ref, kept in rows if kept)


def _pair_id(row: int, datum: Shifted) -> float:
    ids = datum.streams.get("pair_ids")
    if ids is None:
        return row // 2
    return max((i for i, kept in zip(ids, datum.mask, strict=True) if kept), default=0.0)


def _drift(logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]) -> Metrics:
    """How far the learner is from the sampler, over the targets with mask 1.

    `kl/sampler_trainer` is the mean of r - 1 - log r (estimator k3 of
    http://joschu.net/blog/kl-approx.html), which is never negative. `entropy` is the mean of -lp:
    an estimate of the learner's entropy where the learner sampled the tokens.
    """
    found = list(chain(*map(_trained, logprobs, datums)))
    ratios = [FLOATS.exp(gap) for _, gap in found]
    distances = (r - 1.0 - gap for r, (_, gap) in zip(ratios, found, strict=True))
    return {
        "tokens/trained": float(len(found)),
        "ratio/mean": fmean(ratios),
        "entropy": -fmean(lp for lp, _ in found),
        "kl/sampler_trainer": fmean(distances),
    }


def _reference_kl(logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]) -> Metrics:
    """The mean over trained tokens of the estimate k3 of KL(learner || reference), if known."""
    if not all("reference_logprobs" in datum.streams for datum in datums):
        return {}
    distances: list[float] = []
    for learner, datum in zip(logprobs, datums, strict=True):
        rows = zip(learner, datum.streams["reference_logprobs"], datum.mask, strict=True)
        kept = [(lp, ref) for lp, ref, on in rows if on]
        distances += kl_k3([lp for lp, _ in kept], [ref for _, ref in kept])
    return {"kl/reference": fmean(distances)}


def _check_lengths(logprobs: Sequence[Sequence[float]], datums: Sequence[Shifted]) -> None:
    got, wanted = [len(row) for row in logprobs], [len(datum.targets) for datum in datums]
    if got != wanted:
        raise AdapterError(
            f"the service returned log-probs of lengths {got[:8]}, expected {wanted[:8]}: "
            "one per target"
        )
