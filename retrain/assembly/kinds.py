"""The kinds of plug-ins, and how a section of the config becomes an object."""

from __future__ import annotations

from functools import partial
from typing import Any

from retrain.adapters.base import AdapterOptions
from retrain.algorithms.base import Algorithm
from retrain.config import Plugin, RunConfig
from retrain.config.binding import bind
from retrain.config.plugins import Kind, construct, find_plugin
from retrain.config.problems import keys_of
from retrain.environment import Environment
from retrain.observe.callbacks import Callback
from retrain.prompts.building import PROMPTS
from retrain.rewarding import REWARD

KINDS = {
    "environment": Kind("environment", Environment),
    "reward": REWARD,
    "algorithm": Kind("algorithm", Algorithm),
    "prompts": PROMPTS,
    "backend": Kind("backend", AdapterOptions),
    "logger": Kind("logger", Callback),
}


def target_of(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """The class or function that a section names."""
    return find_plugin(KINDS[kind], plugin.type, f"{where}.type", config.base_dir)


def maker(kind: str, plugin: Plugin, where: str, config: RunConfig) -> partial[Any]:
    """A section's class with its keys, checked and bound."""
    target = target_of(kind, plugin, where, config)
    keys = bind(
        target,
        plugin.arguments,
        where,
        given={"base_dir": config.base_dir},
        beside=type(plugin).model_fields,
        known=keys_of(RunConfig),
    )
    return partial(target, **keys)


def make(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """One instance of a section's class. Raises ConfigError."""
    return construct(where, maker(kind, plugin, where, config))
