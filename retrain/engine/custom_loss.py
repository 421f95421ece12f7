"""A user's own loss at log-probs that were computed elsewhere: its value and dL/dlogp, by autograd.

The counterpart of adapters.remote.surrogate, which has the named losses in closed form, without
torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from retrain.engine.losses import CustomLoss, loss_metrics, shared_loss
from retrain.errors import NonFiniteError


def custom_surrogate(
    loss: CustomLoss,
    logprobs: Sequence[Sequence[float]],
    old_logprobs: Sequence[Sequence[float]],
    advantages: Sequence[Sequence[float]],
    masks: Sequence[Sequence[float]],
) -> tuple[float, list[list[float]], dict[str, float]]:
    """The loss, dL/dlogp of each token of each row, and the metrics of `loss_metrics`.

    The rows are ragged; `loss` sees them padded to (B, T), in float32, with mask 0 on the padding.
    Raises UserCodeError as `shared_loss` does, NonFiniteError on NaN or infinity.
    """
    learner = _padded(logprobs).requires_grad_()
    value, sums = shared_loss(
        loss, {}, learner, _padded(old_logprobs), _padded(advantages), _padded(masks)
    )
    (gradients,) = torch.autograd.grad(value, learner)
    if not torch.isfinite(value) or not torch.isfinite(gradients).all():
        raise NonFiniteError(
            f"the custom loss is {float(value.detach())}, or a gradient of it is not finite: look "
            "for logarithms and divisions of 0 in it"
        )
    rows = [row[: len(own)] for row, own in zip(gradients.tolist(), logprobs, strict=True)]
    return float(value.detach()), rows, loss_metrics(sums)


def _padded(rows: Sequence[Sequence[float]]) -> torch.Tensor:
    tensors = [torch.tensor(row, dtype=torch.float32) for row in rows]
    return pad_sequence(tensors, batch_first=True)
