"""Writes the tables of configuration.md from the models themselves: `python docs/configuration.py`.

Types and defaults come from the JSON schema, meanings from the docstrings below the fields. What
stands above MARK in the page is written by hand and kept.
"""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import retrain.config
from retrain.adapters.base import AdapterOptions
from retrain.assembly import KINDS
from retrain.assembly.schema import run_schema
from retrain.config.plugins import find_plugin
from retrain.rewarding import FunctionReward

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

Json = Mapping[str, Any]  # any: JSON values


def page(present: str) -> str:
    """The page with its tables written anew; `present` is the page as it stands."""
    by_hand = present.partition(MARK)[0]
    return "\n".join([by_hand + MARK, "", *_sections(run_schema())]).rstrip() + "\n"


def _sections(schema: Json) -> Iterator[str]:
    models: Json = schema["$defs"]
    yield "## Top level\n"
    yield from _table(schema["properties"], schema["required"], retrain.config.RunConfig)
    for name, entry in schema["properties"].items():
        model = _model(name, entry, models)
        if name in PLUGINS:
            yield f"\n## {name}\n"
            yield from _plugin_section(name, model, models)
        elif "properties" in model:
            owner = getattr(retrain.config, str(model["title"]))
            yield f"\n## {name}\n"
            if owner.__doc__:
                yield f"{_words(owner.__doc__)}\n"
            yield from _table(model["properties"], model.get("required", ()), owner)


def _model(name: str, entry: Json, models: Json) -> Json:
    """The model behind a section, whatever the schema wraps it in."""
    if name in ("rewards", "loggers"):
        entry = entry["items"]
    for option in [entry, *entry.get("anyOf", ())]:
        if "$ref" in option:
            model: Json = models[_last(option["$ref"])]
            return model
    return entry


def _plugin_section(name: str, model: Json, models: Json) -> Iterator[str]:
    own = getattr(retrain.config, str(model["title"]))
    yield "`type` is a built-in name, `module:Class` or `path/file.py:Class`.\n"
    if set(model["properties"]) != {"type"}:
        yield from _table(model["properties"], model.get("required", ()), own)
    for case in model["allOf"]:
        built_in = case["if"]["properties"]["type"]["const"]
        yield from _built_in(PLUGINS[name], built_in, case["then"], models)


def _built_in(kind: str, name: str, keys: Json, models: Json) -> Iterator[str]:
    found = find_plugin(KINDS[kind], name, kind, PAGE.parent)
    yield f"\n### {name}\n"
    yield _words(inspect.getdoc(getattr(found, "function", found)) or "") + "\n"
    is_options = isinstance(found, type) and issubclass(found, AdapterOptions)
    owner = None if isinstance(found, FunctionReward) or not is_options else found
    if keys["properties"]:
        yield from _table(keys["properties"], keys.get("required", ()), owner)
    for key, entry in keys["properties"].items():
        lora = next((o for o in [entry, *entry.get("anyOf", ())] if "$ref" in o), None)
        if lora is not None and owner is not None:
            model = models[_last(lora["$ref"])]
            homes = [inspect.getmodule(cls) for cls in owner.__mro__]
            part = next(getattr(h, model["title"]) for h in homes if hasattr(h, model["title"]))
            yield f"\n`{key}` of {name}: {_words(part.__doc__)}\n"
            yield from _table(model["properties"], model.get("required", ()), part)


def _table(properties: Json, required: Any, owner: type | None) -> Iterator[str]:
    meanings = {} if owner is None else field_docs(owner)
    yield "| key | value | default | |"
    yield "|---|---|---|---|"
    for key, entry in properties.items():
        default = "required" if key in required else _default(entry)
        yield f"| `{key}` | {_kind(entry)} | {default} | {meanings.get(key, '')} |"


def _default(entry: Json) -> str:
    if entry.get("default") is None or "$ref" in entry:
        return ""
    return f"`{json.dumps(entry['default'])}`".replace("|", "\\|")


def _kind(entry: Json) -> str:
    """What a value may be, in words."""
    options = [o for o in entry.get("anyOf", ()) if o.get("type") != "null"]
    if options:
        return " or ".join(dict.fromkeys(map(_kind, options)))
    if "enum" in entry or "const" in entry:
        return ", ".join(f"`{value}`" for value in entry.get("enum") or [entry["const"]])
    if "$ref" in entry:
        return "mapping"
    name = entry.get("type", "anything")
    name = " or ".join(name) if isinstance(name, list) else name
    words = {"object": "mapping", "string": "text", "boolean": "true or false", "array": "list"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = [f"{sign} {entry[key]:g}" for key, sign in bounds.items() if key in entry]
    named = " or ".join(words.get(word, word) for word in name.split(" or "))
    return f"{named} {', '.join(limits)}".rstrip()


def field_docs(owner: type) -> dict[str, str]:
    """The docstrings that stand below a class's fields, those of its bases included."""
    docs: dict[str, str] = {}
    for cls in reversed(owner.__mro__):
        if not cls.__module__.startswith("retrain"):
            continue
        [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in zip(definition.body, definition.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                docs[field.target.id] = _words(str(below.value.value)).replace("|", "\\|")
    return docs


def _words(text: str) -> str:
    return " ".join(text.split())


def _last(reference: str) -> str:
    return reference.rpartition("/")[2]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
