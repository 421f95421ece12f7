"""The loss that a run trains, and a user's own function of log-probs, checked before a model loads.

A loss of your own is `module:function` or `path.py:function` in `algorithm.loss`; see
`engine.losses.CustomLoss` for its arguments and its result.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from retrain.algorithms.base import Algorithm
from retrain.config import RunConfig
from retrain.config.plugins import Kind, find_plugin
from retrain.errors import ConfigError, PluginError


def run_loss(config: RunConfig) -> str:
    """The config's loss, or else its algorithm's default."""
    if config.algorithm.loss is not None:
        return config.algorithm.loss
    kind = Kind("algorithm", Algorithm)
    return str(find_plugin(kind, config.algorithm.type, "algorithm.type", config.base_dir).loss)


def loss_keys(config: RunConfig) -> dict[str, Any]:
    """The loss's own keys. `force` is for the run: it allows old samples with an unclipped loss."""
    return {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}


def custom_loss(config: RunConfig) -> Callable[..., Any] | None:
    """The user's function (an engine.losses.CustomLoss, which names torch types); None: a name.

    Raises PluginError when it isn't found or can't be called with four tensors, ConfigError when
    `loss_config` has keys for it.
    """
    loss = run_loss(config)
    if ":" not in loss:
        return None
    function: Callable[..., Any] = find_plugin(
        Kind("loss", LossFunction, callable), loss, "algorithm.loss", config.base_dir
    )
    try:
        inspect.signature(function).bind(*range(4))
    except TypeError as error:
        raise PluginError(
            f"algorithm.loss: {loss} can't be called with four tensors ({error}); define it "
            "as (logprobs, old_logprobs, advantages, mask)"
        ) from None
    except ValueError:  # some built-in functions have no signature
        pass
    if keys := loss_keys(config):
        raise ConfigError(
            f"algorithm.loss_config: got {', '.join(keys)}, but a custom loss takes no keys; give "
            "its arguments default values"
        )
    return function


class LossFunction:
    """A placeholder for `Kind`: a loss is a function, never a class."""
