"""From pydantic's errors to sentences: dotted path, what was got, what was expected, what to do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from retrain.config.hints import unknown_key
from retrain.errors import shown

_EXPECTED = {
    "bool_type": "true or false",
    "dict_type": "a mapping",
    "finite_number": "a finite number",
    "float_type": "a number",
    "frozen_set_type": "a list",
    "int_from_float": "a whole number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a mapping of its keys",
    "path_type": "a path",
    "string_type": "a text",
    "tuple_type": "a list",
}


def problems_of(
    error: ValidationError,
    model: type[BaseModel],
    ignored: Collection[str] = (),
    prefix: str = "",
    known: Mapping[str, str] | None = None,
) -> list[str]:
    """One line a problem, each with its dotted path behind `prefix`; none for `ignored` paths.

    `known` maps further keys' names to their paths, beside those of `model`.
    """
    names = {**keys_of(model, prefix), **(known or {})}
    lines = []
    for detail in error.errors(include_url=False):
        location: Sequence[int | str] = detail["loc"]
        path = ".".join(str(part) for part in ((prefix, *location) if prefix else location))
        value, kind = detail["input"], detail["type"]
        if any(path == secret or path.startswith(secret + ".") for secret in ignored):
            continue
        if kind == "extra_forbidden":
            lines += unknown_key(
                path, _visible(value, path, ignored), _beside(model, location), names
            )
        elif isinstance(value, Mapping) and kind == "string_type":
            inner = _visible(value, path, ignored)
            lines.append(f"{path}: got a mapping, expected a text")
            lines += [
                line
                for key in inner
                for line in unknown_key(f"{path}.{key}", inner[key], (), names)
            ]
        elif kind == "missing":
            lines.append(f"{path}: missing; {_hint(model, location)}")
        elif kind == "value_error" and isinstance(value, Mapping):  # told in its own words
            lines.append(f"{path}: {detail['ctx']['error']}")
        else:
            lines.append(f"{path}: got {_in_yaml(value)}, {_expected(detail)}")
    return lines


def problems_of_value(error: ValidationError, path: str) -> list[str]:
    """The same for one value, checked against a type that may be a union."""
    expected: dict[str, list[str]] = {}
    got: dict[str, Any] = {}
    for detail in error.errors(include_url=False):
        inner = ".".join([path, *(str(part) for part in detail["loc"] if isinstance(part, int))])
        got[inner] = detail["input"]
        expected.setdefault(inner, []).append(_expected(detail).removeprefix("expected "))
    return [
        f"{inner}: got {_in_yaml(got[inner])}, expected {' or '.join(dict.fromkeys(words))}"
        for inner, words in expected.items()
    ]


def _in_yaml(value: Any) -> str:
    """A value in the config's words: short, and never the inside of a mapping."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple) and len(value) > 4:
        return f"a list of {len(value)}"
    if value is None:
        return "nothing (null)"
    if isinstance(value, bool):
        return str(value).lower()
    return shown(value)


def keys_of(model: type[BaseModel], prefix: str = "") -> dict[str, str]:
    """The last part of each key below `model`, mapped to its path; several are joined by "or"."""
    found: dict[str, list[str]] = {}
    for path in _paths(model, prefix):
        found.setdefault(path.rpartition(".")[2], []).append(path)
    return {name: " or ".join(paths) for name, paths in found.items()}


def _paths(model: type[BaseModel], prefix: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if field.exclude:
            continue
        path = f"{prefix}.{name}".lstrip(".")
        yield path
        inner = _model_in(field.annotation)
        if inner is not None and not _is_list(field.annotation):
            yield from _paths(inner, path)


def _beside(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The valid keys at the place of `location`'s last part."""
    here: type[BaseModel] | None = model
    for part in location[:-1]:
        if isinstance(part, str) and here is not None and part in here.model_fields:
            here = _model_in(here.model_fields[part].annotation)
    if here is None:
        return []
    return [name for name, field in here.model_fields.items() if not field.exclude]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `Model`, `Model | None` or `tuple[Model, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for part in get_args(annotation):
        found = _model_in(part)
        if found is not None:
            return found
    return None


def _is_list(annotation: Any) -> bool:
    return getattr(annotation, "__origin__", None) is tuple


def _hint(model: type[BaseModel], location: Sequence[int | str]) -> str:
    last = location[-1]
    if last == "type":
        return "expected the name of a built-in, module:Class or path/file.py:Class"
    if last == "prompts":
        return "expected where the prompts come from, such as {type: file, path: data/my.jsonl}"
    return "it has no default"


def _expected(detail: Mapping[str, Any]) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    limits = {
        "greater_than_equal": ("ge", "at least"),
        "greater_than": ("gt", "more than"),
        "less_than_equal": ("le", "at most"),
        "less_than": ("lt", "less than"),
    }
    if kind in limits:
        key, words = limits[kind]
        return f"expected {words} {context[key]}"
    if kind == "literal_error":
        return f"expected {context['expected']}"
    if kind == "value_error":
        return f"but {context['error']}"
    if kind in _EXPECTED:
        return f"expected {_EXPECTED[kind]}"
    return f"but {str(detail['msg'])[0].lower()}{str(detail['msg'])[1:]}"


def _visible(value: Any, path: str, hidden: Collection[str]) -> Any:
    """`value` without the keys that are refused anyway."""
    if not isinstance(value, Mapping):
        return value
    return {
        key: _visible(inner, f"{path}.{key}", hidden)
        for key, inner in value.items()
        if f"{path}.{key}" not in hidden
    }
