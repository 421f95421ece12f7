"""The JSON schema of a config file, with the keys of every built-in plug-in, for editors.

A section with a built-in plug-in allows no further keys; one with a plug-in of the user's own does.
Short forms (`environment: echo`) are allowed where `load_config` allows them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.assembly.parts import KINDS
from retrain.config import AlgorithmConfig, RunConfig
from retrain.config.binding import CASE, key_schema
from retrain.config.plugins import built_in_names, find_plugin
from retrain.errors import PluginError
from retrain.scoring import NAMES, FunctionReward

SECTIONS = {"AlgorithmConfig": "algorithm", "RewardConfig": "reward"}
"""Models with declared keys, and their kinds."""
SHARED = {"prompts": "PromptsConfig", "environment": "Plugin", "backend": "Plugin"}
"""The sections of one plug-in, and their models."""
DEFAULTS = {"algorithm": AlgorithmConfig().type, "backend": RunConfig().backend.type}
"""The plug-ins of sections without a `type`."""
Json = dict[str, Any]  # any: JSON values


def run_schema() -> Json:
    """The JSON schema of a config file."""
    schema: Json = RunConfig.model_json_schema()
    sections, models = schema["properties"], schema["$defs"]
    sections.pop("base_dir", None)
    for entry in sections.values():
        if "$ref" in entry:  # a section is described by its model
            model = models[entry["$ref"].rpartition("/")[2]]
            entry.setdefault("description", model["description"])
    for model, kind in SECTIONS.items():
        models[model] = _with_keys(models[model], kind, models)
    for section, model in SHARED.items():
        about = {"description": sections[section]["description"]}
        sections[section] = _with_keys(models[model], section, models) | about
    sections["loggers"]["items"] = _with_keys(models["Plugin"], "logger", models)
    sections["prompts"]["type"] = ["object", "string", "array"]
    sections["backend"].pop("required")
    held_out = models["EvalConfig"]["properties"]
    held_out["prompts"] = {**sections["prompts"], **held_out["prompts"]}
    del held_out["prompts"]["$ref"]
    opponent = {"anyOf": [{"$ref": "#/$defs/Plugin"}, {"type": "string"}]}
    for opponents in (sections["opponents"], held_out["opponents"]["anyOf"][0]):
        opponents["additionalProperties"] = opponent
    for model, key in (("RewardConfig", "only_if"), ("AlgorithmConfig", "mismatch")):
        models[model]["properties"][key]["anyOf"].append({"type": "string"})
    models["ChatConfig"]["type"] = ["object", "string"]
    models["SamplingConfig"]["properties"]["stop"]["type"] = ["array", "string"]
    for section in ("rewards", "loggers"):
        sections[section]["type"] = ["array", "object", "string"]
        sections[section] |= {"if": {"type": "object"}, "then": sections[section]["items"]}
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "retrain run"}
    tidy: Json = _changed({**schema, **head}, _on_one_line)
    return head | tidy


def with_variables(schema: Any) -> Any:
    """The schema with `${NAME}` in the place of a number or a boolean."""

    def change(value: Json) -> None:
        scalar = value.get("type") in ("boolean", "integer", "number")
        if scalar and not value.keys() & {"const", "enum"}:
            value |= {"type": [value["type"], "string"], "pattern": r"^\$\{[^{}]*\}$"}

    return _changed(schema, change)


def _on_one_line(value: Json) -> None:
    if isinstance(value.get("description"), str):
        value["description"] = " ".join(value["description"].split())


def _changed(value: Any, change: Callable[[Json], None]) -> Any:
    """A copy of a JSON value, each object of which was passed to `change`."""
    if isinstance(value, list):
        return [_changed(inner, change) for inner in value]
    if not isinstance(value, dict):
        return value
    copy = {key: _changed(inner, change) for key, inner in value.items()}
    change(copy)
    return copy


def _with_keys(model: Json, kind: str, models: Json) -> Json:
    """A plug-in's model: for each built-in name, its keys.

    The keys apply only to a mapping; a string is the short form of {type: string}.
    """
    cases = []
    names = built_in_names(kind)
    for name in names:
        keys = _keys(kind, name)
        if keys is not None:
            models |= keys.pop("$defs", {})
            if keys.get("additionalProperties") is False:
                keys["properties"] = {
                    **dict.fromkeys(model["properties"], True),
                    **keys["properties"],
                }
            condition: Json = {"properties": {"type": {"const": name}}}
            if name != DEFAULTS.get(kind):
                condition["required"] = ["type"]
            cases.append({"if": condition, "then": keys})
    kind_of = {**model["properties"]["type"], "examples": names}
    properties = {**model["properties"], "type": kind_of}
    return {**model, "type": ["object", "string"], "properties": properties, "allOf": cases}


def _keys(kind: str, name: str) -> Json | None:
    """The keys of a built-in; None if one of its libraries is not installed."""
    try:
        found = find_plugin(KINDS[kind], name, kind, Path())
    except PluginError:
        return None
    if kind == "backend":
        keys: Json = found.model_json_schema()
        for model in keys.get("$defs", {}).values():
            if (rank := model.get("properties", {}).get("r")) is not None:
                model["properties"]["rank"] = {**rank, "deprecated": True}
        return {key: keys[key] for key in CASE if key in keys}
    if isinstance(found, FunctionReward):
        return key_schema(found.function, provided=NAMES)
    return key_schema(found, provided=("base_dir", "origin"))
