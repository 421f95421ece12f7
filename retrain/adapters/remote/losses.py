"""Which losses run on a remote service, and their value and dL/dlogp where we compute them.

The shared losses, TRL's names for them, and a user's own function of log-probs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from retrain.adapters.base import SHARED_LOSSES
from retrain.adapters.remote.datums import Datum
from retrain.adapters.remote.surrogate import Surrogate, loss_settings, surrogate
from retrain.algorithms.base import Algorithm
from retrain.batching import TRL_AS_SHARED
from retrain.config import RunConfig
from retrain.errors import ConfigError
from retrain.plugins import Kind, find_plugin
from retrain.types import Batch

REMOTE_LOSSES = SHARED_LOSSES | frozenset(TRL_AS_SHARED)
"""TRL's own names run remotely where they are a shared loss with a normaliser."""


def run_loss(config: RunConfig) -> str:
    """The loss that a run trains: the config's, or else its algorithm's own."""
    if config.algorithm.loss is not None:
        return config.algorithm.loss
    kind = Kind("algorithm", Algorithm)
    return str(find_plugin(kind, config.algorithm.type, "algorithm.type", config.base_dir).loss)


def custom_loss(config: RunConfig) -> Any:
    """The user's function that `algorithm.loss` names (`module:function`, `file.py:function`).

    Raises ConfigError when it can't be found.
    """
    kind = Kind("loss", _NoClass, callable)
    return find_plugin(kind, run_loss(config), "algorithm.loss", config.base_dir)


def check_loss(config: RunConfig) -> None:
    """Raises ConfigError when `algorithm.loss_config` has a key that the loss doesn't read."""
    loss = run_loss(config)
    # `force` is the pipe's own: it allows a stale batch under a loss that does not clip.
    keys = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
    if loss in REMOTE_LOSSES:
        loss_settings(TRL_AS_SHARED.get(loss, (loss,))[0], keys)
    elif ":" in loss:
        custom_loss(config)
        if keys:
            raise ConfigError(f"got {', '.join(keys)}, but a loss of your own takes no keys")


async def valued(
    batch: Batch,
    logprobs: Sequence[Sequence[float]],
    datums: Sequence[Datum],
    config: RunConfig,
) -> Surrogate:
    """The batch's loss at the learner's log-probs; in a thread, since Python takes a while.

    Raises NonFiniteError when it is NaN or infinite.
    """
    if ":" not in batch.loss:
        return await asyncio.to_thread(surrogate, batch.loss, batch.loss_config, logprobs, datums)
    from retrain.engine.custom_loss import custom_surrogate  # torch: only for a user's own loss

    value, gradients, metrics = await asyncio.to_thread(
        custom_surrogate,
        custom_loss(config),
        logprobs,
        [datum.logprobs for datum in datums],
        [datum.advantages for datum in datums],
        [datum.mask for datum in datums],
    )
    return Surrogate(value, gradients, metrics)


class _NoClass:
    """No class is a loss: only functions are."""
