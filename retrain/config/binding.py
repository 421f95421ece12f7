"""A constructor's signature as the schema of a plug-in's keys: a pydantic TypedDict."""

from __future__ import annotations

import difflib
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from functools import lru_cache
from typing import Annotated, Any, NotRequired, Required

from pydantic import ConfigDict, Field, PydanticUserError, Strict, TypeAdapter, ValidationError
from typing_extensions import TypedDict

from retrain.config.plugins import with_objects
from retrain.config.problems import problems_of
from retrain.errors import PluginError, place_of

CASE = "properties", "required", "additionalProperties", "$defs"
"""What a JSON schema says of a plug-in's keys."""
_ARGUMENT = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)


def bind(
    target: Callable[..., Any],
    arguments: Mapping[str, Any],
    where: str,
    *,
    given: Mapping[str, Any] | None = None,
    bound: Mapping[str, Any] | None = None,
    provided: Collection[str] = (),
    beside: Collection[str] = (),
    known: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The keyword arguments to call `target` with: the config's keys, checked and converted.

    Args:
        given: What retrain passes to parameters of these names, such as `base_dir`: not keys.
        bound: Values for parameters of these names, which keys override.
        provided: Parameters that are filled in later, and can't be set by keys.
        beside: Other valid keys at this place, for the hints.
        known: The keys of the whole config and their paths, for the hints.

    Raises PluginError with every unknown, missing or wrongly typed key. If `target` has `**kwargs`,
    only keys that resemble a valid one are unknown.
    """
    parameters = _signature(target)
    ours, before = (_only(values or {}, parameters) for values in (given, bound))
    provided = (*provided, *ours)
    types = {name: parameter.annotation for name, parameter in parameters.items()}
    types |= dict.fromkeys(beside)
    valid = _only(types, types.keys() - set(provided))
    try:
        keys = typed_keys(target, provided, given=before).validate_python(dict(arguments))
    except ValidationError as error:
        missing = _needed_by(target, [name for name in provided if name not in ours])
        raise PluginError(
            *problems_of(error, valid, prefix=where, known=known, missing=missing, values=arguments)
        ) from None
    problems = list(_misspelt(keys.keys() - parameters.keys(), valid, where))
    taken = keys.keys() & set(provided)  # only with **kwargs: all keys are valid
    problems += [f"{where}.{key}: the run sets this argument; remove it" for key in sorted(taken)]
    if problems:
        raise PluginError(*problems)
    return {**ours, **before, **with_objects(keys)}


def _only(values: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name in names}


def _needed_by(target: Callable[..., Any], called_with: Sequence[str]) -> str:
    others = f", in addition to what it is called with: {', '.join(called_with)}"
    name = f"{getattr(target, '__name__', target)}{place_of(target)}"
    return f"{name} needs it{others if called_with else ''}"


def _misspelt(further: Set[str], valid: Collection[str], where: str) -> Iterator[str]:
    """The problems of keys that only `**kwargs` accepts, but that resemble a valid one."""
    plurals = {f"{name}s" for name in valid} | {name.removesuffix("s") for name in valid}
    for key in sorted(further - plurals):  # perhaps another argument
        for near in difflib.get_close_matches(key, valid, n=1, cutoff=0.8):
            unknown = f"{where}.{key}: unknown key; did you mean {where}.{near}?"
            yield f"{unknown} Otherwise declare it as an argument of the function"


def key_schema(target: Callable[..., Any], provided: Collection[str] = ()) -> dict[str, Any]:
    """The JSON schema of the keys; their descriptions are the docstring's `Args:`."""
    schema = typed_keys(target, provided).json_schema()
    return {key: schema[key] for key in CASE if key in schema}


def typed_keys(
    target: Callable[..., Any], provided: Collection[str], given: Collection[str] = ()
) -> TypeAdapter[dict[str, Any]]:
    """The keys that `target` takes, with those as optional that have a default or are given."""
    described, fields, any_key = _descriptions(target), dict[str, Any](), False
    for name, parameter in _signature(target).items():
        any_key = any_key or parameter.kind is parameter.VAR_KEYWORD
        named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        if name in provided or not named:
            continue
        default = parameter.default
        scalar = isinstance(default, str | int | float | bool)
        field = Field(
            description=described.get(name),
            json_schema_extra={"default": default} if scalar else None,
        )
        kind: Any = Annotated[_checkable(parameter.annotation), field]
        optional = name in given or default is not parameter.empty
        fields[name] = NotRequired[kind] if optional else Required[kind]
    keys = TypedDict("Keys", fields)  # type: ignore[misc]  # made of a signature
    config = ConfigDict(extra="allow" if any_key else "forbid")
    setattr(keys, "__pydantic_config__", config)  # noqa: B010 - mypy knows no such attribute
    checked: TypeAdapter[dict[str, Any]] = TypeAdapter(keys)  # type: ignore[arg-type]  # of Keys
    return checked


def _checkable(annotation: Any) -> Any:
    """The annotation, or Any where the constructor checks the value: for a class of the user's."""
    if annotation is inspect.Parameter.empty or isinstance(annotation, str):
        return Any
    return _strict(annotation) if has_schema(annotation) else Any


def has_schema(annotation: Any) -> bool:
    """Whether pydantic can check values of this type; cached, since finding out takes a
    millisecond."""
    try:
        return _found_schema(annotation)
    except TypeError:  # not hashable: Annotated with a list
        return _found_schema.__wrapped__(annotation)


@lru_cache(maxsize=1024)
def _found_schema(annotation: Any) -> bool:
    try:
        TypeAdapter(annotation).json_schema()
    except PydanticUserError:
        return False
    return True


def _descriptions(target: Callable[..., Any]) -> dict[str, str]:
    """Each parameter's text below `Args:` in the docstring, or in that of a base class."""
    found: dict[str, str] = {}
    for owner in reversed(getattr(target, "__mro__", (target,))):
        _, _, listed = inspect.cleandoc(owner.__doc__ or "").partition("\nArgs:\n")
        found |= {name: " ".join(text.split()) for name, text in _ARGUMENT.findall(listed)}
    return found


def _signature(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters; without types if one can't be resolved, as if imported for type checkers."""
    try:
        return inspect.signature(target, eval_str=True).parameters
    except (NameError, AttributeError, TypeError, ValueError):
        pass
    try:
        return inspect.signature(target).parameters
    except (ValueError, TypeError):
        raise PluginError(f"{target!r} has no signature: wrap it in a function") from None


def _strict(annotation: Any) -> Any:
    """The annotation, with its scalars strict: `true` or "3" is no integer."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.Union[tuple(map(_strict, typing.get_args(annotation)))]  # noqa: UP007
    return Annotated[annotation, Strict()] if annotation in (bool, int, float, str) else annotation
