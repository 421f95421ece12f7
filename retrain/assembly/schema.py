"""The config's JSON schema, with the keys of every built-in plug-in: what editors complete with.

Sections with a plug-in stay open, since a plug-in of one's own brings its own keys. Short forms
(`environment: echo`) are allowed where `config.load_config` allows them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.assembly.kinds import KINDS
from retrain.config import RunConfig
from retrain.config.binding import key_schema
from retrain.config.plugins import built_in_names, find_plugin
from retrain.errors import PluginError
from retrain.rewarding import NAMES, FunctionReward

SECTIONS = {
    "AlgorithmConfig": "algorithm",
    "RewardConfig": "reward",
}
"""Models of their own; the other plug-in sections share the model Plugin."""
SHARED = {"prompts": "prompts", "environment": "environment", "backend": "backend"}
Json = dict[str, Any]  # any: JSON values


def run_schema() -> Json:
    """The JSON schema of a config file."""
    schema: Json = RunConfig.model_json_schema()
    schema["title"] = "retrain run"
    sections, models = schema["properties"], schema["$defs"]
    sections.pop("base_dir", None)
    for model, kind in SECTIONS.items():
        models[model] = _with_keys(models[model], kind, models)
    for section, kind in SHARED.items():
        sections[section] = _with_keys(models["Plugin"], kind, models)
    sections["loggers"]["items"] = _with_keys(models["Plugin"], "logger", models)
    models["EvalConfig"]["properties"]["prompts"] = sections["prompts"]
    models["ChatConfig"]["type"] = ["object", "string"]
    sections["prompts"]["type"] = ["object", "string", "array"]
    for section in ("rewards", "loggers"):
        sections[section]["type"] = ["array", "object", "string"]
    return schema


def _with_keys(model: Json, kind: str, models: Json) -> Json:
    """A plug-in's model: for each built-in name, the keys that come with it.

    The keys apply to a mapping alone; a text is the short form of {type: text}.
    """
    cases = []
    names = built_in_names(kind)
    for name in names:
        keys = _keys(kind, name)
        if keys is not None:
            models |= keys.pop("$defs", {})
            cases.append({"if": {"properties": {"type": {"const": name}}}, "then": keys})
    kind_of = {**model["properties"]["type"], "examples": names}
    properties = {**model["properties"], "type": kind_of}
    return {**model, "type": ["object", "string"], "properties": properties, "allOf": cases}


def _keys(kind: str, name: str) -> Json | None:
    """The keys of a built-in; None where it can't be loaded here."""
    try:
        found = find_plugin(KINDS[kind], name, kind, Path())
    except PluginError:
        return None
    if kind == "backend":
        keys: Json = found.model_json_schema()
        return {key: keys[key] for key in ("properties", "required", "$defs") if key in keys}
    if isinstance(found, FunctionReward):
        return key_schema(found.function, provided=NAMES)
    return key_schema(found, provided=("base_dir",))
