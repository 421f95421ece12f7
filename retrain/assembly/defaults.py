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

from retrain.assembly.parts import KINDS, dumped, normalisation_of
from retrain.config.plugins import find_plugin
from retrain.errors import ConfigError
from retrain.losses import row_of
from retrain.supervision.jsonable import plain

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
        normalisation = normalisation_of(row_of(loss), section.get("normalisation"))
        complete |= {"loss": loss, "normalisation": normalisation}
    return complete


def _arguments(target: Any) -> dict[str, Any]:  # a class, a function, or an object
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}
    return {
        name: plain(parameter.default)
        for name, parameter in parameters.items()
        if parameter.default is not parameter.empty
    }
