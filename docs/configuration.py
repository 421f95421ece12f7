"""Writes the tables of configuration.md: `python docs/configuration.py`.

Keys, types, defaults and descriptions come from the JSON schema. The text above MARK in the page is
written by hand and kept.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from retrain.assembly import KINDS
from retrain.assembly.schema import run_schema
from retrain.config.plugins import find_plugin

PAGE = Path(__file__).with_suffix(".md")
MARK = "<!-- Everything below is written by docs/configuration.py: change the docstrings. -->"
PLUGINS = {
    "prompts": "prompts",
    "environment": "environment",
    "rewards": "reward",
    "algorithm": "algorithm",
    "backend": "backend",
    "loggers": "logger",
}
"""Sections whose `type` names a plug-in, and its kind."""
"""Keys that mean the same under two names."""
ARGS = re.compile(r"\n\nArgs:\n( {4}.*\n?)+")

Json = Mapping[str, Any]  # any: JSON values


def page(present: str) -> str:
    """The page with new tables; `present` is its current text."""
    by_hand = present.partition(MARK)[0]
    return "\n".join([by_hand + MARK, "", *_sections(run_schema())]).rstrip() + "\n"


def _sections(schema: Json) -> Iterator[str]:
    models: Json = schema["$defs"]
    yield "## Top level\n"
    yield from _table(schema["properties"])
    for name, entry in schema["properties"].items():
        inner = entry["items"] if name in ("rewards", "loggers") else entry
        model = _model(inner, models) or inner
        if name in PLUGINS:
            yield f"\n## {name}\n\n{entry['description']}\n"
            yield from _plugin_section(PLUGINS[name], model, models)
        elif "properties" in model:
            yield f"\n## {name}\n\n{model['description']}\n"
            yield from _table(model["properties"], model.get("required", ()))
        if name == "backend":
            yield from _differences(model, models)


def _model(entry: Json, models: Json) -> Json | None:
    """The model that an entry refers to, directly or as one of several types."""
    for option in [entry, *entry.get("anyOf", ())]:
        if "$ref" in option:
            model: Json = models[option["$ref"].rpartition("/")[2]]
            return model
    return None


def _plugin_section(kind: str, model: Json, models: Json) -> Iterator[str]:
    yield from _table(model["properties"], model.get("required", ()))
    yield from _inner_tables(kind, model["properties"], models)
    for case in model["allOf"]:
        yield from _built_in(kind, case["if"]["properties"]["type"]["const"], _own(case), models)


def _own(case: Json) -> Json:
    """The keys of a built-in plug-in, without those that its section has for all."""
    keys: Json = case["then"]
    own = {name: entry for name, entry in keys["properties"].items() if entry is not True}
    return {**keys, "properties": own}


def _built_in(kind: str, name: str, keys: Json, models: Json) -> Iterator[str]:
    found = find_plugin(KINDS[kind], name, kind, PAGE.parent)
    text = inspect.getdoc(getattr(found, "function", found)) or ""
    about = " ".join(ARGS.sub("", f"{text}\n").split()).partition(" Raises ")[0]
    yield f"\n### {name}\n\n{about}\n"
    if keys["properties"]:
        yield from _table(keys["properties"], keys.get("required", ()))
    yield from _inner_tables(name, keys["properties"], models)


def _inner_tables(owner: str, properties: Json, models: Json) -> Iterator[str]:
    """The tables of the keys whose value is a mapping with its own keys."""
    for key, entry in properties.items():
        options = [_model(option, models) for option in entry.get("oneOf", ())]
        for model in options or [_model(entry, models)]:
            if model is None:
                continue
            by_type = "const" in model["properties"].get("type", {})
            kind = f" with the type `{model['properties']['type']['const']}`" if by_type else ""
            yield f"\n`{key}` of {owner}{kind}: {model['description']}\n"
            yield from _table(model["properties"], model.get("required", ()))


def _differences(section: Json, models: Json) -> Iterator[str]:
    """The table of the defaults that differ between the built-in backends."""
    yield "\n### Defaults that differ\n"
    yield "All other keys that backends share have the same default, including those of AdamW.\n"
    defaults: dict[str, dict[str, str]] = {}
    backends = []
    for case in section["allOf"]:
        backends.append(case["if"]["properties"]["type"]["const"])
        for key, entry in _flat(_own(case)["properties"], models):
            defaults.setdefault(key, {})[backends[-1]] = json.dumps(entry.get("default"))
    yield f"| key | {' | '.join(backends)} |"
    yield "|---" * (len(backends) + 1) + "|"
    for key, by_backend in defaults.items():
        if len(set(by_backend.values())) > 1:
            shown = [f"`{by_backend[b]}`" if b in by_backend else "" for b in backends]
            yield f"| `{key}` | {' | '.join(shown)} |".replace('"', "")
    yield "\nOn services, LoRA also trains the output layer; on `trl`, it never does."


def _flat(properties: Json, models: Json) -> Iterator[tuple[str, Json]]:
    """Each key with its entry, and the keys of mappings by their dotted paths."""
    for key, entry in properties.items():
        model = _model(entry, models)
        if model is None:
            yield key, entry
            continue
        yield key, {"default": "full weights" if entry.get("default") is None else "LoRA"}
        inner = {name: e for name, e in model["properties"].items() if not e.get("deprecated")}
        yield from ((f"{key}.{name}", entry) for name, entry in inner.items())


def _table(properties: Json, required: Collection[str] = ()) -> Iterator[str]:
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for key, entry in properties.items():
        if entry.get("deprecated"):
            continue
        default = "required" if key in required else _default(entry)
        meaning = entry.get("description", "").replace("|", "\\|")
        yield f"| `{key}` | {_kind(entry)} | {default} | {meaning} |"


def _default(entry: Json) -> str:
    if entry.get("default") is None or "$ref" in entry:
        return ""
    return f"`{json.dumps(entry['default'])}`".replace("|", "\\|")


def _kind(entry: Json) -> str:
    """What a value may be, in words."""
    every = entry.get("anyOf") or entry.get("oneOf") or ()
    options = [o for o in every if o.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum") or [entry["const"]])
    if "$ref" in entry or "oneOf" in entry:
        return "mapping"
    name = entry.get("type", "anything")
    words = {"object": "mapping", "array": "list"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[key]:g}" for key, sign in bounds.items() if key in entry]
    names = name if isinstance(name, list) else [name]
    named = " or ".join(words.get(word, word) for word in names)
    return f"{named} {', '.join(limits)}".rstrip()


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
