"""Which losses run on a remote service, and their value and dL/dlogp where we compute them.

The shared losses, TRL's names for them, and a user's own function of log-probs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from retrain.adapters.base import SHARED_LOSSES
from retrain.adapters.losses import custom_loss, loss_keys, run_loss
from retrain.adapters.remote.datums import Datum
from retrain.adapters.remote.surrogate import Surrogate, loss_settings, surrogate
from retrain.batching import TRL_AS_SHARED
from retrain.config import RunConfig
from retrain.errors import ConfigError
from retrain.types import Batch

REMOTE_LOSSES = SHARED_LOSSES | frozenset(TRL_AS_SHARED)
"""TRL's own names run remotely where they are a shared loss with a normaliser."""


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError for a loss that can't be had, or a key that it doesn't read."""
    loss = run_loss(config)
    custom_loss(config)
    if loss not in REMOTE_LOSSES:
        return
    try:
        loss_settings(TRL_AS_SHARED.get(loss, (loss,))[0], loss_keys(config))
    except ConfigError as error:
        raise ConfigError(f"algorithm.loss_config: {error}") from None


async def valued(
    batch: Batch,
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Datum],
    config: RunConfig,
) -> Surrogate:
    """The batch's loss at the learner's log-probs; in a thread, since Python takes a while.

    Raises NonFiniteError when it is NaN or infinite, UserCodeError when a loss of the user's fails.
    """
    custom = custom_loss(config) if ":" in batch.loss else None
    if custom is None:
        return await asyncio.to_thread(surrogate, batch.loss, batch.loss_config, logprobs, datums)
    from retrain.engine.custom_loss import custom_surrogate  # torch: only for a user's own loss

    value, gradients, metrics = await asyncio.to_thread(
        custom_surrogate,
        custom,
        logprobs,
        [datum.logprobs for datum in datums],
        [datum.advantages for datum in datums],
        [datum.mask for datum in datums],
    )
    return Surrogate(value, gradients, metrics)
