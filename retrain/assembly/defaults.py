"""Configs with what their plug-ins add by default, so that it doesn't matter what a user wrote out.

`Parts.resolved` writes the same values: a run resumes from its own config.yaml.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.adapters.base import AdapterOptions
from retrain.assembly.kinds import KINDS
from retrain.config.plugins import find_plugin
from retrain.errors import ConfigError
from retrain.jsonable import Filled, plain
from retrain.losses import Normalisation, row_of

_SECTIONS = {"environment": "environment", "algorithm": "algorithm", "backend": "backend"} | {
    "prompts": "prompts", "rewards": "reward", "loggers": "logger"
}  # fmt: skip
"""The sections that are plug-ins or lists of them, and their kinds."""
Section = Mapping[str, Any]  # any: JSON values


def with_defaults(config: Section, base_dir: Path) -> dict[str, Any]:
    """A dumped config, with the defaults of its plug-ins where it has none of its own.

    A plug-in that can't be found or has other keys is kept as it is.
    """
    complete = dict(config)
    for name in _SECTIONS.keys() & complete.keys():
        kind, section = _SECTIONS[name], complete[name]
        if isinstance(section, Mapping):
            complete[name] = _complete(kind, section, base_dir)
        else:
            complete[name] = [_complete(kind, item, base_dir) for item in section]
    if isinstance(complete.get("eval"), Mapping):
        complete["eval"] = with_defaults(complete["eval"], base_dir)
    return complete


def dumped(options: AdapterOptions) -> dict[str, Any]:
    """All keys of a backend. A set has no order: sorted, it is always written the same."""
    return {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in options.model_dump().items()
    }


def as_filled(value: Any, given: Any) -> Any:
    """`value` with the strings of `given` that the environment filled in: files have their text."""
    if isinstance(value, dict) and isinstance(given, Mapping):
        return {key: as_filled(inner, given.get(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple) and isinstance(given, list) and len(value) == len(given):
        return [as_filled(*pair) for pair in zip(value, given, strict=True)]
    return given if isinstance(given, Filled) and value == given else value


def normalisation_of(loss: str, given: Normalisation | None) -> Normalisation | None:
    """What a loss is averaged over; None if it normalises itself."""
    row = row_of(loss)
    return None if row.normalises_itself else given or row.normalisation


def _complete(kind: str, section: Section, base_dir: Path) -> Section:
    try:
        target = find_plugin(KINDS[kind], section["type"], kind, base_dir)
    except ConfigError:
        return section
    if kind == "backend":
        keys = {key: value for key, value in section.items() if key != "type"}
        with suppress(ValidationError):
            return {"type": section["type"], **dumped(target.model_validate(keys))}
        with suppress(ValidationError):  # it has a key that this version doesn't know
            return {**dumped(target()), **section}
        return section
    complete = {**_arguments(target), **section}
    if kind == "algorithm" and (loss := section.get("loss") or getattr(target, "loss", None)):
        normalisation = normalisation_of(loss, section.get("normalisation"))
        complete |= {"loss": loss, "normalisation": normalisation}
    return complete


def _arguments(target: Any) -> dict[str, Any]:  # a class, a function, or an object
    """The default values of its arguments."""
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    return {
        name: plain(parameter.default)
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
