"""Losses that are functions of log-probs, in closed form: their value and dL/dlogp, per token.

A service that lacks a loss can still train it: a forward pass gives the learner's log-probs lp,
this module gives g = dL/dlp, and a backward pass of the loss sum(g lp), with g held fixed, has the
very gradient of L with respect to the weights. It costs one forward pass more.

With r = exp(lp - old), old the sampler's log-prob and A the advantage, summed over the tokens whose
mask is 1 (formulas as in retrain.engine.losses, which computes them in torch):

    loss                 value                               dL/dlp
    importance_sampling  -r A                                -r A
    ppo                  -min(r A, clip(r, lo, hi) A)        -r A; 0 where the clipped arm is less
    cispo                -sg(clip(r, lo, hi)) A lp           -clip(r, lo, hi) A
    cross_entropy        -A lp                               -A
    dro                  -(A lp - beta/2 (lp - old)^2)       -(A - beta (lp - old))
    dpo                  -w logsigmoid(m)                    -+ w beta sigmoid(-m), for chosen and
                         m = beta (gain_chosen - gain_rejected)   rejected; gain = sum(lp - ref)

lo = 1 - epsilon, hi = 1 + epsilon_high. Pure Python: a process whose model lives elsewhere needs
no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from retrain.adapters.remote.datums import Datum
from retrain.errors import ConfigError, NonFiniteError
from retrain.types import Metrics

LOSS_KEYS: Mapping[str, Mapping[str, float | None]] = MappingProxyType(
    {
        "importance_sampling": {},
        "ppo": {"epsilon": 0.2, "epsilon_high": None},
        "cispo": {"epsilon": 1.0, "epsilon_high": 4.0},
        "cross_entropy": {},
        "dro": {"beta": 0.05},
        "dpo": {"beta": 0.1},
    }
)
"""Each loss's keys and defaults, those of engine.losses (a test holds them equal);
`epsilon_high: None` means `epsilon`."""


@dataclass(frozen=True, slots=True)
class Surrogate:
    """A loss at the learner's present log-probs."""

    loss: float
    gradients: list[list[float]]
    """dL/dlogp of each target of each datum; 0.0 where the mask is 0."""
    metrics: Metrics
    """`kl/sampler_trainer`, `ratio/mean`, `entropy`, `clip_fraction` and `tokens/trained`; of dpo
    `dpo/margin` (of the implicit rewards) and `dpo/accuracy`, over pairs."""


def surrogate(
    loss: str,
    config: Mapping[str, Any],  # the loss's own keys
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Datum],
) -> Surrogate:
    """The loss `loss` of `datums`, where the learner gives the targets `logprobs`.

    `dpo` pairs datums by the stream `pair_ids`, or 0-1, 2-3, ... without it; the sign of the
    advantages tells the chosen (+) from the rejected (-), their size is the pair's weight. It reads
    the stream `reference_logprobs`.

    Raises ConfigError on an unknown loss or key, ValueError on log-probs that don't fit the datums
    or on rows that don't form pairs, NonFiniteError when the loss is NaN or infinite.
    """
    settings = loss_settings(loss, config)
    _check_lengths(logprobs, datums)
    told: Metrics = {}
    if loss == "dpo":
        value, gradients, told = _dpo(settings["beta"], logprobs, datums)
    else:
        value, gradients = _token_level(loss, settings, logprobs, datums)
    if not math.isfinite(value):
        raise NonFiniteError(f"the {loss} loss is {value}: the log-probs or advantages diverged")
    return Surrogate(value, gradients, {**drift(logprobs, datums, loss, config), **told})


def loss_settings(loss: str, config: Mapping[str, Any]) -> dict[str, float]:
    """The loss's keys with the defaults filled in; raises ConfigError on what it doesn't have."""
    if loss not in LOSS_KEYS:
        raise ConfigError(f"no loss is called {loss!r}: expected one of {', '.join(LOSS_KEYS)}")
    defaults = LOSS_KEYS[loss]
    unknown = sorted(set(config) - set(defaults))
    if unknown:
        expected = ", ".join(defaults) or "no keys at all"
        raise ConfigError(f"the loss {loss!r} has no key {unknown[0]!r}: it takes {expected}")
    merged = {**defaults, **{key: v for key, v in config.items() if v is not None}}
    if "epsilon_high" in merged and merged["epsilon_high"] is None:
        merged["epsilon_high"] = merged["epsilon"]
    return {key: float(value) for key, value in merged.items() if value is not None}


def clip_bounds(loss: str, settings: Mapping[str, float]) -> tuple[float, float] | None:
    """The ratio's lowest and highest value under a clipped loss; None for the others."""
    if loss not in ("ppo", "cispo"):
        return None
    return 1.0 - settings["epsilon"], 1.0 + settings["epsilon_high"]


def drift(
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Datum],
    loss: str,
    config: Mapping[str, Any],  # the loss's own keys
) -> Metrics:
    """How far the learner is from the sampler, over the targets with mask 1.

    `kl/sampler_trainer` is the mean of r - 1 - log r (estimator k3 of
    http://joschu.net/blog/kl-approx.html), never negative. `entropy` is the mean of -lp: an
    estimate of the learner's entropy where the tokens are samples of its own. `clip_fraction`, of
    the clipped losses alone, is the share of tokens whose clipped ratio took effect.
    """
    bounds = clip_bounds(loss, loss_settings(loss, config))
    tokens, kl, ratios, surprise, clipped = 0, 0.0, 0.0, 0.0, 0
    for learner, datum in zip(logprobs, datums, strict=True):
        rows = zip(learner, datum.logprobs, datum.advantages, datum.mask, strict=True)
        for lp, old, advantage, kept in rows:
            if not kept:
                continue
            ratio = _exp(lp - old)
            tokens += 1
            ratios += ratio
            surprise -= lp
            kl += ratio - 1.0 - (lp - old)
            if bounds:
                used = min(max(ratio, bounds[0]), bounds[1])
                less = used * advantage < ratio * advantage
                clipped += less if loss == "ppo" else used != ratio
    many = max(tokens, 1)
    metrics = {
        "tokens/trained": float(tokens),
        "ratio/mean": ratios / many,
        "entropy": surprise / many,
    }
    if bounds:
        metrics["clip_fraction"] = clipped / many
    return {**metrics, "kl/sampler_trainer": kl / many}


def _token_level(
    loss: str,
    settings: Mapping[str, float],
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Datum],
) -> tuple[float, list[list[float]]]:
    total, gradients = [], []
    for learner, datum in zip(logprobs, datums, strict=True):
        rows = zip(learner, datum.logprobs, datum.advantages, datum.mask, strict=True)
        pairs = [_token(loss, settings, *row[:3]) if row[3] else (0.0, 0.0) for row in rows]
        total += [value for value, _ in pairs]
        gradients.append([slope for _, slope in pairs])
    return math.fsum(total), gradients


def _token(
    loss: str, settings: Mapping[str, float], lp: float, old: float, advantage: float
) -> tuple[float, float]:
    """Value and derivative of one token's loss."""
    if loss == "cross_entropy":
        return -advantage * lp, -advantage
    if loss == "dro":
        gap, beta = lp - old, settings["beta"]
        return -(advantage * lp - beta / 2 * gap * gap), -(advantage - beta * gap)
    ratio = _exp(lp - old)
    bounds = clip_bounds(loss, settings)
    if bounds is None:
        return -ratio * advantage, -ratio * advantage
    clipped = min(max(ratio, bounds[0]), bounds[1])
    if loss == "cispo":
        return -clipped * advantage * lp, -clipped * advantage
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def _dpo(
    beta: float, logprobs: Sequence[Sequence[float]], datums: Sequence[Datum]
) -> tuple[float, list[list[float]], Metrics]:
    """Value, slopes, and the mean margin and the share of margins above 0, over pairs."""
    gains = [_gain(*row) for row in zip(logprobs, datums, strict=True)]
    weights = [max((abs(a) for a in datum.advantages), default=0.0) for datum in datums]
    total = 0.0
    slopes, margins = [0.0] * len(datums), []
    for chosen, rejected in _pairs(datums):
        margin = beta * (gains[chosen] - gains[rejected])
        margins.append(margin)
        weight = (weights[chosen] + weights[rejected]) / 2
        total += weight * _softplus(-margin)
        slopes[rejected] = weight * beta * _exp(-_softplus(margin))  # sigmoid(-margin)
        slopes[chosen] = -slopes[rejected]
    gradients = [
        [slope if kept else 0.0 for kept in datum.mask]
        for slope, datum in zip(slopes, datums, strict=True)
    ]
    many = max(1, len(margins))
    right = sum(margin > 0 for margin in margins)
    return total, gradients, {"dpo/margin": math.fsum(margins) / many, "dpo/accuracy": right / many}


def _gain(learner: Sequence[float], datum: Datum) -> float:
    if "reference_logprobs" not in datum.streams:
        raise ValueError("dpo needs the stream 'reference_logprobs', and the batch has none")
    reference = datum.streams["reference_logprobs"]
    rows = zip(learner, reference, datum.mask, strict=True)
    return math.fsum(lp - ref for lp, ref, kept in rows if kept)


def _pairs(datums: Sequence[Datum]) -> list[tuple[int, int]]:
    """Row numbers of the chosen and the rejected, pair by pair."""
    members: dict[float, dict[bool, int]] = {}
    for row, datum in enumerate(datums):
        ids = datum.streams.get("pair_ids")
        named = max((i for i, kept in zip(ids or (), datum.mask, strict=False) if kept), default=0)
        key = row // 2 if ids is None else named
        credit = math.fsum(datum.advantages)
        if credit == 0 or (credit > 0) in members.setdefault(key, {}):
            got = "no advantage" if credit == 0 else "the same sign as its pair's other row"
            raise ValueError(
                f"row {row} of a dpo batch has {got}: a pair is one row with positive advantages "
                "(chosen) and one with negative ones (rejected)"
            )
        members[key][credit > 0] = row
    single = [key for key, signed in members.items() if len(signed) != 2]
    if single:
        raise ValueError(f"dpo pairs {single} have one row: both must be in the batch")
    return [(signed[True], signed[False]) for signed in members.values()]


def _check_lengths(logprobs: Sequence[Sequence[float]], datums: Sequence[Datum]) -> None:
    got, wanted = [len(row) for row in logprobs], [len(datum.targets) for datum in datums]
    if got != wanted:
        raise ValueError(
            f"the service returned log-probs of lengths {got[:8]}, expected {wanted[:8]}: "
            "one per target"
        )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700.0 else math.inf


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
