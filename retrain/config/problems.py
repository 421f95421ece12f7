"""Pydantic's errors as one-line messages: dotted path, what was given, what was expected."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from retrain.config.hints import unknown_key
from retrain.errors import shown

_NAMES = {
    "bool": "a boolean",
    "dict": "a mapping",
    "finite_number": "a finite number",
    "float": "a number",
    "frozen_set": "a list",
    "int": "an integer",
    "list": "a list",
    "model": "a mapping",
    "path": "a path",
    "string": "a string",
    "tuple": "a list",
}
"""The types in the names of pydantic's errors, such as int_type and int_parsing."""
_LIMITS = {
    "greater_than": (">", "gt"),
    "greater_than_equal": (">=", "ge"),
    "less_than": ("<", "lt"),
    "less_than_equal": ("<=", "le"),
}
_MISSING = {
    "type": "expected a built-in name, module:Class or path/file.py:Class",
    "prompts": "expected the source of the prompts, such as {type: file, path: data/my.jsonl}",
}


def problems_of(
    error: ValidationError,
    keys: type[BaseModel] | Sequence[str],
    ignored: Collection[str] = (),
    prefix: str = "",
    known: Mapping[str, str] | None = None,
    missing: str = "it has no default",
) -> list[str]:
    """One line per problem, each with its dotted path below `prefix`; none for `ignored` paths.

    `keys` is the model that was validated, or the valid keys of a plug-in. `known` maps the names
    of further keys to their paths. `missing` says who needs a missing key.
    """
    names = {**(keys_of(keys, prefix) if isinstance(keys, type) else {}), **(known or {})}
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        location = detail["loc"]
        if not isinstance(keys, type):  # the other strings name the members of a union
            location = (location[0], *(part for part in location[1:] if isinstance(part, int)))
        path = ".".join(map(str, (prefix, *location) if prefix else location))
        if not any(path == other or path.startswith(f"{other}.") for other in ignored):
            visible = {**detail, "input": _visible(detail["input"], path, ignored)}
            alike.setdefault(path, []).append(visible)
    lines: list[str] = []
    for path, details in alike.items():
        value, kind, location = details[0]["input"], details[0]["type"], details[0]["loc"]
        if kind == "extra_forbidden":
            lines += unknown_key(path, value, _beside(keys, location), names)
        elif kind == "missing":
            lines.append(f"{path}: missing; {_MISSING.get(str(location[-1]), missing)}")
        elif kind == "value_error" and isinstance(value, Mapping):  # a validator of the section
            lines.append(f"{path}: {details[0]['ctx']['error']}")
        else:
            expected = " or ".join(dict.fromkeys(map(_expected, details)))
            lines.append(
                f"{path}: got {_in_yaml(value)}, {expected.replace(' or expected', ' or')}"
            )
            if kind == "string_type" and isinstance(value, Mapping):
                for key in value:
                    lines += unknown_key(f"{path}.{key}", value[key], (), names)
    return lines


def _in_yaml(value: Any) -> str:
    """A value as YAML has it, shortened; never the content of a mapping."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return shown(value)


def _expected(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _LIMITS:
        sign, key = _LIMITS[kind]
        limit = context[key]
        return f"expected {'an integer' if isinstance(limit, int) else 'a number'} {sign} {limit:g}"
    if name := _NAMES.get(re.sub("_(type|parsing|from_float)$", "", kind)):
        return f"expected {name}"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "value_error":
        return f"but {context['error']}"
    return f"but {str(detail['msg'])[0].lower()}{str(detail['msg'])[1:]}"


def _visible(value: Any, path: str, hidden: Collection[str]) -> Any:
    """`value` without the keys that are rejected anyway."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _visible(inner, f"{path}.{key}", hidden)
        for key, inner in value.items()
        if f"{path}.{key}" not in hidden
    }


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """The last part of each key below `model`, mapped to its path; several are joined by "or"."""
    found: dict[str, list[str]] = {}
    for path in _paths(model, prefix):
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: " or ".join(paths) for name, paths in found.items()}


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name in _keys(model):
        annotation = model.model_fields[name].annotation
        path = f"{prefix}.{name}".lstrip(".")
        yield path
        inner = _model_in(annotation)
        if inner is not None and getattr(annotation, "__origin__", None) is not tuple:
            yield from _paths(inner, path)


def _beside(keys: type[BaseModel] | Sequence[str], location: Sequence[int | str]) -> Sequence[str]:
    """The valid keys at the place of `location`'s last part."""
    if not isinstance(keys, type):
        return keys
    here: type[BaseModel] | None = keys
    for part in location[:-1]:
        if isinstance(part, str) and here is not None and part in here.model_fields:
            here = _model_in(here.model_fields[part].annotation)
    return [] if here is None else _keys(here)


def _keys(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((m for m in map(_model_in, get_args(annotation)) if m is not None), None)
