"""The losses of `retrain.losses`, and a user's own, on tensors.

The formulas return each token's loss and derivative, so no graph is built for a loss. A token whose
mask is 0 contributes exactly nothing to the loss and to the gradient, whatever its values are
(padding may hold infinities).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.utils.rnn import pad_sequence
from torch.utils.checkpoint import checkpoint

from retrain.config import MismatchConfig
from retrain.errors import ConfigError, NonFiniteError, UserCodeError, blame, shown
from retrain.losses import Formula, mismatch_weight, pair_rows, row_of, settings

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
    """The loss `name` summed over tokens, and sums over tokens or pairs for the metrics.

    A loss that clips has the sum `clip_fraction`, over tokens; a loss of pairs `dpo/margin` (of the
    implicit rewards) and `dpo/accuracy`, over `pairs`.

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
        return _custom(name, rows, mask), {}
    keys, row = settings(name, config), row_of(name)
    if row.formula is None:
        raise ConfigError(f"the loss {name!r} is TRL's own; only TRL computes it")
    compute = _pairwise if row.reads == "pairs" else _tokenwise
    with torch.no_grad():
        values, slopes, sums = compute(partial(row.formula, _Tensors, keys), rows)
    loss: Tensor = _Differentiated.apply(rows.logprobs, values, slopes)  # type: ignore[no-untyped-call]  # torch's
    return loss, sums


def mismatch_weights(
    rule: MismatchConfig, log_ratios: Tensor, mask: Tensor, rollouts: Tensor
) -> tuple[Tensor, float]:
    """The weight of each token, (B, T), and how many tokens or sequences are outside the bounds.

    `log_ratios` (B, T) are log(p_trainer / p_sampler), `mask` is 0 or 1, and `rollouts` (B,) has a
    number from 0 for the rollout of each row. The ratio of a sequence is the exponential of the
    mean of its log-ratios (GSPO, arXiv:2507.18071).
    """
    keep = mask > 0
    logs = _kept(log_ratios, keep)
    if rule.level == "token":
        weights, outside = mismatch_weight(_Tensors, rule.type, *rule.bounds, logs.exp())
        return weights, float((outside & keep).sum())
    count = int(rollouts.max()) + 1
    sums, tokens = (
        torch.zeros(count, device=logs.device).index_add(0, rollouts, values.float().sum(-1))
        for values in (logs, keep)
    )
    ratios = (sums / tokens.clamp(min=1.0)).exp()
    weights, outside = mismatch_weight(_Tensors, rule.type, *rule.bounds, ratios)
    return weights[rollouts][:, None].expand_as(logs), float((outside & (tokens > 0)).sum())


def custom_surrogate(
    loss: CustomLoss,
    logprobs: Sequence[Sequence[float]],
    old_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    masks: Sequence[Sequence[float]],
) -> tuple[float, list[list[float]]]:
    """A user's loss at log-probs from elsewhere, and dL/dlogp of each token.

    The rows are ragged; `loss` gets them padded to (B, T), in float32, with mask 0 on the padding.
    Raises UserCodeError as `shared_loss` does, NonFiniteError on NaN or infinity.
    """
    learner = _padded(logprobs).requires_grad_()
    given = (_padded(old_logprobs), _padded(advantages), _padded(masks))
    value, _ = shared_loss(loss, {}, learner, *given)
    (gradients,) = torch.autograd.grad(value, learner)
    if not torch.isfinite(value) or not torch.isfinite(gradients).all():
        raise NonFiniteError(
            f"the custom loss is {float(value.detach())}, or its gradient is not finite; check it "
            "for logarithms of 0 and divisions by 0"
        )
    rows = [row[: len(own)] for row, own in zip(gradients.tolist(), logprobs, strict=True)]
    return float(value.detach()), rows


@torch.no_grad()
def sequence_logprobs(model: Any, token_ids: Sequence[int], device: torch.device) -> list[float]:
    """The log-prob of each token by a causal LM, at temperature 1; 0.0 for the first."""
    ids = torch.tensor([token_ids], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return [0.0, *token_logprobs(logits, ids[:, 1:])[0].tolist()]


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


def _tokenwise(formula: Formula, rows: _Rows) -> tuple[Tensor, Tensor, Sums]:
    """The loss and the slope of each token, (B, T)."""
    ratio = (rows.logprobs - rows.old).exp()
    values, slopes, clipped = formula(rows.logprobs, rows.old, ratio, rows.advantages)
    sums = {} if clipped is None else {"clip_fraction": float((clipped & rows.keep).sum())}
    return _kept(values, rows.keep), _kept(slopes, rows.keep), sums


def _pairwise(formula: Formula, rows: _Rows) -> tuple[Tensor, Tensor, Sums]:
    """The loss of each pair, and the slope of each token, (B, T)."""
    if "reference_logprobs" not in rows.streams:
        raise ValueError("the batch lacks the stream 'reference_logprobs', which pairs need")
    gains = (rows.logprobs - _kept(rows.streams["reference_logprobs"], rows.keep)).sum(-1)
    pairs = pair_rows(_pair_ids(rows), rows.advantages.sum(-1).tolist())
    chosen, rejected = torch.tensor(pairs, device=gains.device).unbind(-1)
    values, slopes, margins = formula(gains[chosen] - gains[rejected])
    weights = rows.advantages.abs().amax(-1)
    weight = (weights[chosen] + weights[rejected]) / 2
    by_row = torch.zeros_like(gains)
    by_row[chosen], by_row[rejected] = weight * slopes, -weight * slopes
    sums = {
        "pairs": float(len(pairs)),
        "dpo/margin": float(margins.sum()),
        "dpo/accuracy": float((margins > 0).sum()),
    }
    return weight * values, _kept(by_row[:, None].expand_as(rows.keep), rows.keep), sums


def _pair_ids(rows: _Rows) -> list[float]:
    ids = rows.streams.get("pair_ids")
    if ids is None:
        return [row // 2 for row in range(len(rows.logprobs))]
    lowest = torch.full((), -torch.inf, dtype=ids.dtype, device=ids.device)
    found: list[float] = torch.where(rows.keep, ids, lowest).amax(-1).tolist()
    return found


def _custom(loss: CustomLoss, rows: _Rows, mask: Tensor) -> Tensor:
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
    return value.reshape(())


def _kept(values: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep, values, torch.zeros((), dtype=values.dtype, device=values.device))


def _padded(rows: Sequence[Sequence[float]]) -> Tensor:
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return pad_sequence(tensors, batch_first=True)


def _gathered(logits: Tensor, ids: Tensor) -> Tensor:
    wide = logits.float()
    return wide.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - wide.logsumexp(-1)
