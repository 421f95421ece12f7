"""A constructor's signature as the schema of a plug-in's keys."""

from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from retrain.config.hints import unknown_key
from retrain.config.problems import problems_of_value
from retrain.errors import PluginError

_EMPTY = inspect.Parameter.empty
_SCALARS = (bool, int, float, str, type(None))
_NAMES = {str: "a string", int: "an integer", float: "a number", bool: "a boolean", Path: "a path"}
_ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def bind(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    where: str,
    *,
    given: Mapping[str, Any] | None = None,
    provided: Collection[str] = (),
    beside: Collection[str] = (),
    known: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The keyword arguments to call `target` with: the config's keys, checked and converted.

    Args:
        given: Values for parameters of these names, such as `base_dir`; keys override them.
        provided: Parameters that are filled in later, and can't be set by keys.
        beside: Other valid keys at this place, for the hints.
        known: The keys of the whole config and their paths, for the hints.

    Raises PluginError with every unknown, missing or wrongly typed key.
    """
    parameters, hints, problems = parameters_of(target), _hints(target), list[str]()
    settable = [name for name in parameters if name not in provided]
    bound = {name: value for name, value in (given or {}).items() if name in parameters}
    for key, value in arguments.items():
        if key in settable:
            bound[key] = _converted(hints.get(key, Any), value, f"{where}.{key}", problems)
        elif takes_any_key(target) and key not in provided:
            bound[key] = value
        else:
            problems += unknown_key(f"{where}.{key}", value, [*settable, *beside], known or {})
    for name in settable:
        if name not in bound and parameters[name].default is _EMPTY:
            problems.append(f"{where}.{name}: missing; {_needs(target, hints.get(name), provided)}")
    if problems:
        raise PluginError(*problems)
    return bound


def _needs(target: Callable[..., Any], annotation: Any, provided: Collection[str]) -> str:
    callee = getattr(target, "__name__", type(target).__name__)
    others = f", in addition to what it is called with: {', '.join(provided)}" if provided else ""
    return f"{callee} needs {_NAMES.get(annotation, 'a value')}{others}"


def parameters_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be passed by name."""
    return {
        parameter.name: parameter
        for parameter in _signature(target)
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def takes_any_key(target: Callable[..., Any]) -> bool:
    """Whether `target` has a `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _signature(target))


def key_schema(target: Callable[..., Any], provided: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of the keys; their descriptions are the docstring's `Args:`."""
    hints = _hints(target)
    described = _descriptions(target)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in parameters_of(target).items():
        if name in provided:
            continue
        try:
            properties[name] = TypeAdapter(hints.get(name, Any)).json_schema()
        except PydanticUserError:
            properties[name] = {}
        if name in described:
            properties[name]["description"] = described[name]
        if parameter.default is _EMPTY:
            required.append(name)
        elif isinstance(parameter.default, str | int | float | bool):
            properties[name]["default"] = parameter.default
    return {"properties": properties, "required": required}


def _descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Each parameter's text below `Args:` in the docstring, or in that of a base class."""
    found: dict[str, str] = {}
    for owner in reversed(getattr(target, "__mro__", (target,))):
        _, _, listed = inspect.cleandoc(owner.__doc__ or "").partition("\nArgs:\n")
        found |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(listed)}
    return found


def _signature(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    if inspect.isclass(target) and target.__init__ is object.__init__:
        return iter(())
    try:
        return iter(inspect.signature(target).parameters.values())
    except (ValueError, TypeError):
        raise PluginError(f"{target!r} has no signature: wrap it in a function") from None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations; empty if one can't be resolved, such as an import under TYPE_CHECKING."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):
        return {}


def _converted(annotation: Any, value: Any, where: str, problems: list[str]) -> Any:
    """`value` as `annotation` says, scalars strictly: `true` or "3" is no int. Adds problems."""
    try:
        adapter = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a class of the user's: its constructor checks it
    try:
        return adapter.validate_python(value, strict=_is_scalar(annotation))
    except ValidationError as error:
        problems += problems_of_value(error, where)
        return value


def _is_scalar(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_is_scalar(part) for part in typing.get_args(annotation))
    return annotation in _SCALARS
