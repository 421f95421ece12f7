"""Pydantic's errors as one-line messages: dotted path, what was given, what was expected."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import AliasChoices, BaseModel, ValidationError

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


def problems_of(
    error: ValidationError,
    keys: type[BaseModel] | Mapping[str, Any],
    ignored: Collection[str] = (),
    prefix: str = "",
    known: Mapping[str, str] | None = None,
    missing: str = "it has no default",
    values: Mapping[str, Any] | None = None,
) -> list[str]:
    """One line per problem, each with its dotted path below `prefix`; none for `ignored` paths.

    `keys` is the model that was validated, or the types of a plug-in's keys. `known` maps the names
    of further keys to their paths. `missing` says who needs a missing key. `values` are the
    plug-in's keys.
    """
    names = {**(keys_of(keys, prefix) if isinstance(keys, type) else {}), **(known or {})}
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for detail in error.errors(include_url=False):
        path = f"{prefix}.{_path(keys, detail['loc'], values or {})}".lstrip(".")
        if not f"{path}.".startswith(tuple(f"{other}." for other in ignored)):
            visible = {**detail, "input": _visible(detail["input"], path, ignored)}
            alike.setdefault(path, []).append(visible)
    found = (_lines(path, details, keys, names, missing) for path, details in alike.items())
    return [line for lines in found for line in lines]


def _lines(
    path: str,
    details: Sequence[Mapping[str, Any]],
    keys: type[BaseModel] | Mapping[str, Any],
    names: Mapping[str, str],
    missing: str,
) -> list[str]:
    """The problems of one value: usually one, but one per key of an unknown section."""
    value, kind, location = details[0]["input"], details[0]["type"], details[0]["loc"]
    if kind == "extra_forbidden":
        if name := _other_name(keys, location):
            section = path.rpartition(".")[0]
            return [f"{path}: another name of {section}.{name}; set only one of them"]
        return unknown_key(path, value, _beside(keys, location), names)
    if kind.startswith("union_tag"):
        models = _place(keys, location)[1] if isinstance(keys, type) else ()
        return [_no_such_type(path, details[0]["ctx"], models)]
    if kind == "missing":
        wanted = "expected a built-in name, module:Class or path/file.py:Class"
        return [f"{path}: missing; {wanted if location[-1] == 'type' else missing}"]
    if kind == "value_error" and isinstance(value, Mapping):  # a validator of the section
        return [f"{path}: {details[0]['ctx']['error']}"]
    expected = " or ".join(dict.fromkeys(map(_expected, details)))
    line = f"{path}: got {_in_yaml(value)}, {expected.replace(' or expected', ' or')}"
    return [line, *(_unknown_keys(path, value, names) if kind == "string_type" else ())]


def _unknown_keys(path: str, value: Any, names: Mapping[str, str]) -> Iterator[str]:
    """The problems of a mapping that should be a string."""
    for key in value if isinstance(value, Mapping) else ():
        yield from unknown_key(f"{path}.{key}", value[key], (), names)


def _no_such_type(path: str, context: Mapping[str, Any], options: Sequence[type[BaseModel]]) -> str:
    got = f"got {context['tag']!r}" if "tag" in context else "missing"
    return f"{path}.type: {got}, expected {' or '.join(map(_tag, options))}"


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
        said = str(context["error"])
        return said if said.startswith("expected ") else f"but {said}"
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


@cache
def keys_of(model: type[BaseModel], prefix: str = "") -> Mapping[str, str]:
    """The last part of each key below `model`, mapped to its path; several are joined by "or"."""
    found: dict[str, list[str]] = {}
    for path in dict.fromkeys(_paths(model, prefix)):
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: " or ".join(paths) for name, paths in found.items()}


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name in _keys(model):
        annotation = model.model_fields[name].annotation
        path = f"{prefix}.{name}".lstrip(".")
        yield path
        if get_origin(annotation) is not tuple:
            for inner in _models_in(annotation):
                yield from _paths(inner, path)


def _beside(
    keys: type[BaseModel] | Mapping[str, Any], location: Sequence[int | str]
) -> Sequence[str]:
    """The valid keys at the place of `location`'s last part."""
    if isinstance(keys, type):
        return [key for model in _place(keys, location[:-1])[1] for key in _keys(model)]
    first, *rest = location
    inner = _models_in(keys.get(str(first)))
    return [key for model in inner for key in _beside(model, rest)] if rest else list(keys)


def _other_name(
    keys: type[BaseModel] | Mapping[str, Any], location: Sequence[int | str]
) -> str | None:
    """The key that has the last part of `location` as another name, if one has."""
    models = _place(keys, location[:-1])[1] if isinstance(keys, type) else []
    fields = [(name, f.validation_alias) for m in models for name, f in m.model_fields.items()]
    others = (n for n, a in fields if isinstance(a, AliasChoices) and location[-1] in a.choices)
    return next(others, None)


def _path(
    keys: type[BaseModel] | Mapping[str, Any],
    location: Sequence[int | str],
    values: Mapping[str, Any],
) -> str:
    parts = _place(keys, location)[0] if isinstance(keys, type) else _way(location, values)
    return ".".join(map(str, parts))


def _place(
    keys: type[BaseModel], location: Sequence[int | str]
) -> tuple[list[int | str], list[type[BaseModel]]]:
    """The keys on the way, and the models that are possible there.

    In pydantic's `location` a string after a union's key names one of its members.
    """
    path: list[int | str] = []
    models, union = [keys], False
    for part in location:
        fields = {name: field for m in models[::-1] for name, field in m.model_fields.items()}
        if part in fields:
            annotation = fields[str(part)].annotation
            models, union = _models_in(annotation), _is_union(annotation)
        elif union and isinstance(part, str):
            models, union = [m for m in models if _tag(m) == part] or models, False
            continue
        path.append(part)
    return path, models


def _way(location: Sequence[int | str], values: Any) -> list[int | str]:
    """The parts of a plug-in's `location` that are indices and keys, also a missing one."""
    path: list[int | str] = []
    for depth, part in enumerate(location):
        if isinstance(part, int):
            values = values[part] if isinstance(values, list) and part < len(values) else None
        elif isinstance(values, Mapping) and (part in values or depth == len(location) - 1):
            values = values.get(part)
        elif depth:  # a member of a union
            continue
        path.append(part)
    return path


def _tag(model: type[BaseModel]) -> str:
    """The `type` of a model that is one of several."""
    return str(model.model_fields["type"].default) if "type" in model.model_fields else ""


def _is_union(annotation: Any) -> bool:
    members = set(get_args(annotation)) - {NoneType}
    return get_origin(annotation) in (Union, UnionType) and len(members) > 1


def _keys(model: type[BaseModel]) -> list[str]:
    return [name for name, field in model.model_fields.items() if not field.exclude]


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    """The models in `Model`, `Model | Other | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
