"""The forward pass of a training request: rows to micro-batches, log-probs and the loss.

Pure functions of a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from retrain.engine.losses import shared_loss, token_logprobs

if TYPE_CHECKING:
    from retrain.service.tuning import BaseModel

LOGITS_ON_CPU, LOGITS_ON_GPU = 2**26, 2**29
"""Maximum size of a micro-batch's logits, unless a single row has more. On a CPU, larger
micro-batches are no faster."""
BYTES_PER_LOGIT = 24
"""That a pass takes at its peak: about six copies in float32."""


class TargetRow(NamedTuple):
    """A training sequence whose position t predicts `targets[t]`.

    Every field has length N. With K targets per token, all but `tokens` have N x K numbers, row by
    row.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    advantages: Sequence[float]
    logprobs: Sequence[float]
    mask: Sequence[float]
    in_ratio: Sequence[float] = ()
    """1 for the tokens that make up a sequence's ratio; only for gspo."""
    width: int | None = None
    """K; None is one target per token, in one dimension."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a forward pass."""

    logprobs: list[list[float]]
    """Of each row's targets, as many as it has."""
    loss: float
    tokens: float
    """Targets with mask 1."""


def tokens_at_once(base: BaseModel) -> int:
    """The maximum number of tokens of a micro-batch."""
    logits = LOGITS_ON_CPU if base.device.type == "cpu" else LOGITS_ON_GPU
    return max(1, logits // base.vocabulary)


def run_micro_batch(
    model: Callable[..., Any],
    device: torch.device,
    rows: Sequence[TargetRow],
    loss: str,
    config: Mapping[str, Any],
) -> tuple[Tensor, Tensor]:
    """The loss, and the log-probs of the targets, (B, T, K)."""
    lengths = torch.tensor([len(row.tokens) for row in rows])
    attended = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(device)
    tokens = _padded([(row.tokens, 1) for row in rows], torch.long, device)[..., 0]
    widths = [row.width or 1 for row in rows]
    _, targets, *credit = zip(*(row[:5] for row in rows), strict=True)
    labels = _padded(list(zip(targets, widths, strict=True)), torch.long, device)
    advantages, old, mask = (
        _padded(list(zip(values, widths, strict=True)), torch.float32, device) for values in credit
    )
    logits = model(input_ids=tokens, attention_mask=attended, use_cache=False).logits
    logprobs = _target_logprobs(logits, labels)
    if loss == "gspo":
        in_ratio = _padded([(row.in_ratio, 1) for row in rows], torch.float32, device)
        loss, old = "ppo", _sequence_old(logprobs.detach(), old, in_ratio)
    flat, *inputs = (tensor.flatten(1) for tensor in (logprobs, old, advantages, mask))
    value, _ = shared_loss(loss, config, flat, inputs[0], inputs[1], inputs[2])
    return value, logprobs


def _padded(
    rows: Sequence[tuple[Sequence[float], int]], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Rows of N x K numbers, each with its K, as (B, T, K); padding is 0."""
    widest = max(width for _, width in rows)
    tensors = [
        pad(torch.tensor(values, dtype=dtype).view(-1, width), (0, widest - width))
        for values, width in rows
    ]
    return pad_sequence(tensors, batch_first=True).to(device)


def _target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[targets] in float32: (B, T, V) and (B, T, K) to (B, T, K)."""
    if targets.shape[-1] == 1:
        return token_logprobs(logits, targets[..., 0])[..., None]
    wide = logits.float()
    return wide.gather(-1, targets) - wide.logsumexp(-1, keepdim=True)


def _sequence_old(logprobs: Tensor, old: Tensor, in_ratio: Tensor) -> Tensor:
    """The `old` with which every token's ratio is its sequence's; (B, T, 1) each.

    GSPO-token (arXiv:2507.18071, section 4.3): a token's ratio has the value of the geometric mean
    of the ratios of its sequence's tokens, and the gradient of its own log-prob. It equals PPO with
    this `old`.
    """
    gaps = torch.where(in_ratio > 0, logprobs - old, 0.0)
    mean = gaps.sum(1, keepdim=True) / in_ratio.sum(1, keepdim=True)
    return logprobs - mean
