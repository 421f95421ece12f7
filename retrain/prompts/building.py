"""From a section `prompts` of a config to its source."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import isasyncgenfunction, iscoroutinefunction
from typing import Any

from retrain.config import PromptsConfig
from retrain.config.binding import bind
from retrain.config.plugins import Kind, construct, find_plugin
from retrain.errors import PromptError
from retrain.prompts.base import Origin, PromptSource
from retrain.prompts.preparing import prepared
from retrain.prompts.sequences import source_of

PROMPTS = Kind("prompts", PromptSource, callable)


def built(
    section: PromptsConfig, origin: Origin, known: Mapping[str, str] | None = None
) -> PromptSource:
    """The source that a section describes, with its rows checked. Raises ConfigError.

    `known` are the keys of the whole config and their paths, for the hints.
    """
    where = origin.where
    target = find_plugin(PROMPTS, section.type, f"{where}.type", origin.base_dir)
    keys = bind(
        target,
        section.arguments,
        where,
        given={"base_dir": origin.base_dir, "origin": origin},
        beside=type(section).model_fields,
        known=known,
    )
    source = construct(where, lambda: _made(target, keys, section.type), target)
    return construct(where, lambda: prepared(source, section, origin.base_dir, where))


def _made(target: Any, keys: dict[str, Any], name: str) -> PromptSource:
    if iscoroutinefunction(target) or isasyncgenfunction(target):
        raise PromptError(f"{name} is async, expected a plain function or generator")
    return source_of(target(**keys), name)  # of a class: the source itself
