"""A constructor's signature as the schema of a plug-in's keys."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import PydanticSchemaGenerationError, PydanticUserError, TypeAdapter, ValidationError

from retrain.config.hints import unknown_key
from retrain.config.problems import problems_of_value
from retrain.errors import PluginError

_SCALARS = (bool, int, float, str, type(None))


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

    `given` are values that the run offers to a parameter of that name (`base_dir`); `provided` are
    parameters that somebody fills in later; `beside` are other keys that are valid at this place,
    and `known` maps the keys of the whole config to their paths, both for the hints. Raises
    PluginError with every unknown, missing or wrongly typed key.
    """
    parameters = parameters_of(target)
    hints = _hints(target)
    settable = [name for name in parameters if name not in provided]
    bound: dict[str, Any] = {
        name: value for name, value in (given or {}).items() if name in parameters
    }
    problems: list[str] = []
    for key, value in arguments.items():
        if key in settable:
            try:
                bound[key] = _converted(hints.get(key, Any), value)
            except ValidationError as error:
                problems += problems_of_value(error, f"{where}.{key}")
        elif takes_any_key(target) and key not in provided:
            bound[key] = value
        else:
            problems += unknown_key(f"{where}.{key}", value, [*settable, *beside], known or {})
    for name in settable:
        if name not in bound and name not in arguments and parameters[name].default is _EMPTY:
            expected = _described(target, hints.get(name))
            others = f", beside what it is called with: {', '.join(provided)}" if provided else ""
            problems.append(f"{where}.{name}: missing; {expected}{others}")
    if problems:
        raise PluginError(*problems)
    return bound


_EMPTY = inspect.Parameter.empty


def parameters_of(target: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be given by name."""
    return {
        parameter.name: parameter
        for parameter in _signature(target)
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def takes_any_key(target: Callable[..., Any]) -> bool:
    """Whether `target` has a `**kwargs`."""
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in _signature(target))


def key_schema(target: Callable[..., Any], provided: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of the keys, for editors."""
    hints = _hints(target)
    properties: dict[str, Any] = {}
    required: list[str] = []
    for name, parameter in parameters_of(target).items():
        if name in provided:
            continue
        try:
            properties[name] = TypeAdapter(hints.get(name, Any)).json_schema()
        except PydanticUserError:
            properties[name] = {}
        if parameter.default is _EMPTY:
            required.append(name)
        elif isinstance(parameter.default, str | int | float | bool):
            properties[name]["default"] = parameter.default
    return {"properties": properties, "required": required}


def _signature(target: Callable[..., Any]) -> Iterator[inspect.Parameter]:
    if inspect.isclass(target) and target.__init__ is object.__init__:
        return iter(())
    try:
        return iter(inspect.signature(target).parameters.values())
    except (ValueError, TypeError):
        raise PluginError(f"{target!r} has no signature: wrap it in a function of yours") from None


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations, as far as they can be resolved."""
    function = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # an import under TYPE_CHECKING, say
        return {}


def _converted(annotation: Any, value: Any) -> Any:
    """`value` as `annotation` has it; scalars strictly, so that `true` or "3" is no int."""
    try:
        adapter = TypeAdapter(annotation)
    except (PydanticSchemaGenerationError, PydanticUserError):
        return value  # a type of the user's own: the constructor will say
    return adapter.validate_python(value, strict=_is_scalar(annotation))


def _is_scalar(annotation: Any) -> bool:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return all(_is_scalar(part) for part in typing.get_args(annotation))
    return annotation in _SCALARS


def _described(target: Callable[..., Any], annotation: Any) -> str:
    name = getattr(target, "__name__", type(target).__name__)
    words = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
    expected = words.get(annotation, "a path" if annotation is Path else "a value")
    return f"{name} needs {expected}"
