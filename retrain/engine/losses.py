"""The losses of `retrain.losses`, and a user's own, on tensors.

The formulas return each token's loss and derivative, so no graph is built for a loss. A token whose
mask is 0 contributes exactly nothing to the loss and to the gradient, whatever its values are
(padding may hold infinities).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from retrain.errors import NonFiniteError, UserCodeError, blame, shown
from retrain.losses import Formula, pair_rows, row_of, settings

CustomLoss = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(logprobs, old_logprobs, advantages, mask), each (B, T), to the sum over tokens, a scalar."""

Sums = dict[str, float]


def shared_loss(
    name: str | CustomLoss,
    config: Mapping[str, Any],  # the loss's own keys
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    streams: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Tensor, Sums]:
    """The loss `name` summed over tokens, and sums for the metrics (see `loss_metrics`).

    All tensors are (B, T), float32, the mask 0 or 1. A loss that reads weights ignores
    `old_logprobs`. A loss of pairs reads `streams["reference_logprobs"]` and pairs rows by
    `streams["pair_ids"]`, or rows 0-1, 2-3, ... without it; the sign of a row's advantages marks
    the chosen (+) and the rejected row (-), their size is the pair's weight. A callable gets the
    first four tensors, with the entries whose mask is 0 set to 0.

    Raises ConfigError on an unknown loss or key, ValueError on rows that do not form pairs,
    UserCodeError when a callable raises or does not return a scalar with a gradient.
    """
    keep = mask > 0
    rows = _Rows(
        _kept(logprobs, keep), _kept(old_logprobs, keep), _kept(advantages, keep), keep, streams
    )
    if callable(name):
        loss, sums = _custom(name, rows, mask)
    else:
        keys, row = settings(name, config), row_of(name)
        assert row.formula is not None  # `settings` rejects a loss without one
        compute = _pairwise if row.reads == "pairs" else _tokenwise
        with torch.no_grad():
            values, slopes, sums = compute(row.formula, keys, rows, row.reads == "ratio")
        loss = _Differentiated.apply(rows.logprobs, values, slopes)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return loss, {"tokens": float(keep.sum()), **sums}


def loss_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Means from the sums of one or more `shared_loss` calls, added key by key.

    `ratio/mean`, `clip_fraction` and `kl/sampler_trainer` (mean of r - 1 - log r, the non-negative
    estimator of KL(sampler || trainer)) for losses with a ratio; `dpo/margin` (of the implicit
    rewards) and `dpo/accuracy`, means over pairs, for losses of pairs.
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


def custom_surrogate(
    loss: CustomLoss,
    logprobs: Sequence[Sequence[float]],
    old_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    masks: Sequence[Sequence[float]],
) -> tuple[float, list[list[float]], dict[str, float]]:
    """A user's loss at log-probs from elsewhere, dL/dlogp of each token, and `loss_metrics`.

    The rows are ragged; `loss` gets them padded to (B, T), in float32, with mask 0 on the padding.
    Raises UserCodeError as `shared_loss` does, NonFiniteError on NaN or infinity.
    """
    learner = _padded(logprobs).requires_grad_()
    value, sums = shared_loss(
        loss, {}, learner, _padded(old_logprobs), _padded(advantages), _padded(masks)
    )
    (gradients,) = torch.autograd.grad(value, learner)
    if not torch.isfinite(value) or not torch.isfinite(gradients).all():
        raise NonFiniteError(
            f"the custom loss is {float(value.detach())}, or its gradient is not finite; check it "
            "for logarithms of 0 and divisions by 0"
        )
    rows = [row[: len(own)] for row, own in zip(gradients.tolist(), logprobs, strict=True)]
    return float(value.detach()), rows, loss_metrics(sums)


def token_logprobs(logits: Tensor, ids: Tensor, *, chunk_tokens: int = 4096) -> Tensor:
    """log softmax(logits)[ids] in float32: logits (..., V) and ids (...) to (...).

    At most `chunk_tokens` rows are widened to float32 at once, also in the backward pass.
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


class _Tensors:
    """`Ops` for tensors."""

    exp = staticmethod(torch.exp)
    clip = staticmethod(torch.clamp)
    where = staticmethod(torch.where)
    sigmoid = staticmethod(torch.sigmoid)
    logsigmoid = staticmethod(logsigmoid)


class _Differentiated(torch.autograd.Function):
    """The sum of `values`, whose gradient with respect to `logprobs` is `slopes`."""

    @staticmethod
    def forward(ctx: Any, logprobs: Tensor, values: Tensor, slopes: Tensor) -> Tensor:
        ctx.save_for_backward(slopes)
        return values.sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (slopes,) = ctx.saved_tensors
        return gradient * slopes, None, None


def _tokenwise(
    formula: Formula, keys: Mapping[str, float], rows: _Rows, has_ratio: bool
) -> tuple[Tensor, Tensor, Sums]:
    """The loss and the slope of each token, (B, T), and sums for the metrics."""
    old = rows.old if has_ratio else None
    ratio = (rows.logprobs - rows.old).exp() if has_ratio else None
    values, slopes, clipped = formula(_Tensors, keys, rows.logprobs, old, ratio, rows.advantages)
    sums = {} if ratio is None else _ratio_sums(rows, ratio, clipped)
    return _kept(values, rows.keep), _kept(slopes, rows.keep), sums


def _pairwise(
    formula: Formula, keys: Mapping[str, float], rows: _Rows, has_ratio: bool
) -> tuple[Tensor, Tensor, Sums]:
    """The loss of each pair, the slope of each token, (B, T), and sums for the metrics."""
    if "reference_logprobs" not in rows.streams:
        raise ValueError("the batch lacks the stream 'reference_logprobs', which pairs need")
    gains = (rows.logprobs - _kept(rows.streams["reference_logprobs"], rows.keep)).sum(-1)
    weights = rows.advantages.abs().amax(-1)
    pairs = pair_rows(_pair_ids(rows), rows.advantages.sum(-1).tolist())
    chosen, rejected = torch.tensor(pairs, device=gains.device).unbind(-1)
    values, slopes, margins = formula(_Tensors, keys, gains[chosen] - gains[rejected])
    weight = (weights[chosen] + weights[rejected]) / 2
    by_row = torch.zeros_like(gains)
    by_row[chosen], by_row[rejected] = weight * slopes, -weight * slopes
    return (
        weight * values,
        _kept(by_row[:, None].expand_as(rows.logprobs), rows.keep),
        {
            "pairs": float(len(chosen)),
            "margin_sum": float(margins.sum()),
            "correct_sum": float((margins > 0).sum()),
        },
    )


def _pair_ids(rows: _Rows) -> list[float]:
    ids = rows.streams.get("pair_ids")
    if ids is None:
        return [row // 2 for row in range(len(rows.logprobs))]
    lowest = torch.full((), -torch.inf, dtype=ids.dtype, device=ids.device)
    found: list[float] = torch.where(rows.keep, ids, lowest).amax(-1).tolist()
    return found


def _custom(loss: CustomLoss, rows: _Rows, mask: Tensor) -> tuple[Tensor, Sums]:
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
    with torch.no_grad():
        sums = _ratio_sums(rows, (rows.logprobs - rows.old).exp(), None)
    return value.reshape(()), sums


def _ratio_sums(rows: _Rows, ratio: Tensor, clipped: Tensor | None) -> Sums:
    """Sums over the kept tokens."""
    kl = _kept(ratio - 1 - (rows.logprobs - rows.old), rows.keep)
    return {
        "ratio_sum": float(_kept(ratio, rows.keep).sum()),
        "clipped_sum": 0.0 if clipped is None else float((clipped & rows.keep).sum()),
        "kl_sum": float(kl.sum()),
    }


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return pad_sequence(tensors, batch_first=True)


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    wide = logits.float()
    return wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)
