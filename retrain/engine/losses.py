"""The losses with one meaning on every backend, in torch.

Each is a **sum** over the tokens whose mask is 1: whatever it is to be averaged over is folded into
the advantages beforehand, so that micro-batches add up to the batch. With r = exp(lp - old), lp the
learner's and old the sampler's log-prob of a token, A its advantage:

    importance_sampling   -r A
    ppo                   -min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A)       arXiv:1707.06347
    cispo                 -stop_gradient(clip(r, 1 - epsilon, 1 + epsilon_high)) A lp
                                                                          arXiv:2506.13585, eq. 4
    cross_entropy         -A lp, the advantages being the weights
    dro                   -(A lp - beta/2 (lp - old)^2)                             arXiv:2405.19107
    dpo                   -w logsigmoid(beta [(lp - ref)(chosen) - (lp - ref)(rejected)]), lp and
                          ref summed over each row                         arXiv:2305.18290, eq. 7

Where the mask is 0 a token contributes exactly nothing, to the loss and to the gradient, whatever
stands there (padding may hold infinities).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.checkpoint import checkpoint

from retrain.errors import ConfigError, UserCodeError, blame, shown

CustomLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs, old_logprobs, advantages, mask), each (B, T), to the sum over tokens, a scalar."""

LOSS_DEFAULTS: Mapping[str, Mapping[str, float | None]] = MappingProxyType(
    {
        "importance_sampling": {},
        "ppo": {"epsilon": 0.2, "epsilon_high": None},
        "cispo": {"epsilon": 1.0, "epsilon_high": 4.0},
        "cross_entropy": {},
        "dro": {"beta": 0.05},
        "dpo": {"beta": 0.1},
    }
)
"""Each loss's keys and defaults; `epsilon_high: None` means `epsilon`."""


def shared_loss(
    name: str | CustomLoss,
    config: Mapping[str, Any],  # the loss's own keys
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    streams: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, dict[str, float]]:
    """The loss `name` summed over tokens, and sums for the metrics (see `loss_metrics`).

    All tensors are (B, T), float32, the mask 0 or 1. `cross_entropy` reads no `old_logprobs`.
    `dpo` reads `streams["reference_logprobs"]` and pairs rows by `streams["pair_ids"]`, or rows
    0-1, 2-3, ... without it; the sign of a row's advantage tells the chosen (+) from the rejected
    (-), its size is the weight w. A callable gets the first four with unmasked entries set to 0.

    Raises ConfigError on an unknown loss or key, ValueError on rows that don't form pairs,
    UserCodeError when a callable raises, or returns something else than a scalar with a gradient.
    """
    keep = mask > 0
    rows = _Rows(
        _kept(logprobs, keep), _kept(old_logprobs, keep), _kept(advantages, keep), keep, streams
    )
    if callable(name):
        return _custom(name, rows, mask)
    loss, sums = _TABLE[_known(name)](rows, loss_settings(name, config))
    return loss, {"tokens": float(keep.sum()), **sums}


def loss_settings(name: str, config: Mapping[str, Any]) -> dict[str, float]:
    """The loss's keys with the defaults filled in; raises ConfigError on a key it doesn't have."""
    defaults = LOSS_DEFAULTS[_known(name)]
    for key in config:
        if key not in defaults:
            expected = ", ".join(defaults) or "no keys at all"
            raise ConfigError(
                f"the loss {name!r} has no key {key!r}{_nearest(key, defaults)}: "
                f"it takes {expected}"
            )
    merged = {**defaults, **{key: v for key, v in config.items() if v is not None}}
    if "epsilon_high" in merged and merged["epsilon_high"] is None:
        merged["epsilon_high"] = merged["epsilon"]
    return {key: float(value) for key, value in merged.items() if value is not None}


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums of one or more `shared_loss` calls, added key by key.

    `ratio/mean`, `clip_fraction` and `kl/sampler_trainer` (mean of r - 1 - log r, the non-negative
    estimator of KL(sampler || trainer)) for the losses with a ratio; for dpo `dpo/margin` (of the
    implicit rewards) and `dpo/accuracy`, over pairs.
    """
    tokens, pairs = sums.get("tokens", 0.0), sums.get("pairs", 0.0)
    means = {
        label: sums[key] / count
        for key, label, count in (
            ("ratio_sum", "ratio/mean", tokens),
            ("clipped_sum", "clip_fraction", tokens),
            ("kl_sum", "kl/sampler_trainer", tokens),
            ("margin_sum", "dpo/margin", pairs),
            ("correct_sum", "dpo/accuracy", pairs),
        )
        if key in sums and count
    }
    return {**means, "tokens/trained": tokens}


def token_logprobs(logits: Tensor, ids: Tensor, *, chunk_tokens: int = 4096) -> Tensor:
    """log softmax(logits)[ids] in float32: logits (..., V) and ids (...) to (...).

    At most `chunk_tokens` rows are widened to float32 at once, in the backward pass too.
    """
    flat, targets = logits.reshape(-1, logits.shape[-1]), ids.reshape(-1)
    widens = logits.dtype != torch.float32 and torch.is_grad_enabled() and logits.requires_grad
    pieces = zip(torch.split(flat, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    chunks = [
        checkpoint(_gathered, piece, wanted, use_reentrant=False)
        if widens
        else _gathered(piece, wanted)
        for piece, wanted in pieces
    ]
    return torch.cat(chunks).reshape(ids.shape)


class _Rows(NamedTuple):
    """What a loss reads: (B, T) each, zero where `keep` is false."""

    logprobs: Tensor
    old: Tensor
    advantages: Tensor
    keep: Tensor
    streams: Mapping[str, Tensor]


def _importance_sampling(rows: _Rows, _: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    ratio = _ratio(rows)
    return -(ratio * rows.advantages).sum(), _ratio_sums(rows, ratio, ratio)


def _ppo(rows: _Rows, settings: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    ratio = _ratio(rows)
    clipped = ratio.clamp(1 - settings["epsilon"], 1 + settings["epsilon_high"])
    # Where both arms are equal torch.minimum halves the gradient between them; they are equal only
    # inside the bounds, where both have the same one.
    objective = torch.minimum(ratio * rows.advantages, clipped * rows.advantages)
    bound = torch.where(objective < ratio * rows.advantages, clipped, ratio)
    return -objective.sum(), _ratio_sums(rows, ratio, bound)


def _cispo(rows: _Rows, settings: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    ratio = _ratio(rows).detach()
    clipped = ratio.clamp(1 - settings["epsilon"], 1 + settings["epsilon_high"])
    loss = -(clipped * rows.advantages * rows.logprobs).sum()
    return loss, _ratio_sums(rows, ratio, clipped)


def _cross_entropy(rows: _Rows, _: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    return -(rows.advantages * rows.logprobs).sum(), {}


def _dro(rows: _Rows, settings: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    ratio = _ratio(rows)
    penalty = settings["beta"] / 2 * (rows.logprobs - rows.old).square()
    loss = -(rows.advantages * rows.logprobs - penalty).sum()
    return loss, _ratio_sums(rows, ratio, ratio)


def _dpo(rows: _Rows, settings: Mapping[str, float]) -> tuple[Tensor, dict[str, float]]:
    if "reference_logprobs" not in rows.streams:
        raise ValueError("dpo needs the stream 'reference_logprobs', and the batch has none")
    reference = _kept(rows.streams["reference_logprobs"], rows.keep)
    gains = (rows.logprobs - reference).sum(-1)
    signs, weights = rows.advantages.sum(-1).sign(), rows.advantages.abs().amax(-1)
    chosen, rejected = _pairs(rows, signs)
    margins = settings["beta"] * (gains[chosen] - gains[rejected])
    weight = (weights[chosen] + weights[rejected]) / 2
    return -(weight * logsigmoid(margins)).sum(), {
        "pairs": float(len(chosen)),
        "margin_sum": float(margins.detach().sum()),
        "correct_sum": float((margins.detach() > 0).sum()),
    }


_TABLE: Mapping[str, Callable[[_Rows, Mapping[str, float]], tuple[Tensor, dict[str, float]]]] = {
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "cross_entropy": _cross_entropy,
    "dro": _dro,
    "dpo": _dpo,
}


def _custom(loss: CustomLoss, rows: _Rows, mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    what = f"loss '{getattr(loss, '__name__', type(loss).__name__)}'"
    try:
        value = loss(rows.logprobs, rows.old, rows.advantages, mask)
    except Exception as error:
        raise blame(what, error) from error
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = f"a tensor of {tuple(value.shape)}" if isinstance(value, Tensor) else shown(value)
        raise UserCodeError(
            f"{what} returned {got}: it must return one number, a tensor: the sum over tokens"
        )
    if rows.logprobs.requires_grad and not value.requires_grad:
        raise UserCodeError(
            f"{what} returned {value.item()}, which has no gradient: it must depend on `logprobs`, "
            "without detach(), item() or no_grad()"
        )
    sums = _ratio_sums(rows, _ratio(rows), _ratio(rows))
    return value.reshape(()), {"tokens": float(rows.keep.sum()), **sums}


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _ratio(rows: _Rows) -> Tensor:
    """exp(lp - old), 1 where the mask is 0 (both are 0 there)."""
    return (rows.logprobs - rows.old).exp()


def _ratio_sums(rows: _Rows, ratio: Tensor, used: Tensor) -> dict[str, float]:
    """Sums over the kept tokens; a token counts as clipped where `used` differs from its ratio."""
    with torch.no_grad():
        kl = _kept(ratio - 1 - (rows.logprobs - rows.old), rows.keep)
        return {
            "ratio_sum": float(_kept(ratio, rows.keep).sum()),
            "clipped_sum": float(((used != ratio) & rows.keep).sum()),
            "kl_sum": float(kl.sum()),
        }


def _pairs(rows: _Rows, signs: Tensor) -> tuple[list[int], list[int]]:
    """Row numbers of the chosen and of the rejected, pair by pair."""
    ids = rows.streams.get("pair_ids")
    if ids is None:
        keys = [row // 2 for row in range(len(signs))]
    else:
        lowest = torch.full((), -torch.inf, dtype=ids.dtype, device=ids.device)
        keys = torch.where(rows.keep, ids, lowest).amax(-1).tolist()
    members: dict[float, dict[float, int]] = {}
    for row, (key, sign) in enumerate(zip(keys, signs.tolist(), strict=True)):
        if sign == 0 or sign in members.setdefault(key, {}):
            raise ValueError(
                f"row {row} of a dpo batch has {'no advantage' if sign == 0 else 'the same sign'} "
                "as its pair's other row: a pair is one row with a positive advantage (chosen) "
                "and one with a negative (rejected)"
            )
        members[key][sign] = row
    single = [key for key, signed in members.items() if len(signed) != 2]
    if single:
        raise ValueError(f"dpo pairs {single} have one row: both rows must be in one micro-batch")
    return [m[1.0] for m in members.values()], [m[-1.0] for m in members.values()]


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    wide = logits.float()
    return wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)


def _known(name: str) -> str:
    if name not in LOSS_DEFAULTS:
        raise ConfigError(
            f"no loss is called {name!r}{_nearest(name, LOSS_DEFAULTS)}: "
            f"the shared losses are {', '.join(LOSS_DEFAULTS)}"
        )
    return name


def _nearest(name: str, known: Mapping[str, Any]) -> str:  # only the keys are read
    close = difflib.get_close_matches(str(name), known, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
