"""The JSON schemas of tools: checks arguments against them, and converts text to their types."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from retrain.chat.formats.base import read_json
from retrain.environment import ToolSpec

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

_PYTHON: Final = {"True": True, "False": False, "None": None}
"""How models write values besides JSON."""


@lru_cache(maxsize=256)
def validator_of(parameters: str) -> Validator:
    """Checks a tool's arguments; raises ValueError if `parameters` is not a JSON schema.

    A tool would fail with an argument that it doesn't have, so unknown arguments are errors unless
    the schema explicitly allows them.
    """
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from jsonschema.validators import validator_for
    from referencing import Registry

    schema = {"type": "object", **json.loads(parameters)}
    kind = validator_for(schema, default=Draft202012Validator)
    if problem := best_match(kind(kind.META_SCHEMA).iter_errors(schema)):
        raise ValueError(_misfit("", problem))
    if schema.get("properties"):
        schema.setdefault("additionalProperties", False)
    return kind(schema, registry=Registry())  # one that fetches nothing from the network


def as_json(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, default=dict)  # for mappings of other kinds


def fault(name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str | None:
    """Why a call doesn't fit the tools, or None."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        offered = ", ".join(tool.name for tool in tools)
        return f"there is no tool {name!r}: the tools are {offered}"
    try:
        problem = best_match(validator_of(as_json(tool.parameters)).iter_errors(arguments))
    except (RecursionError, Unresolvable) as error:
        return f"arguments can't be checked against the tool's schema: {error}"
    return None if problem is None else _misfit("arguments", problem)


def _misfit(root: str, problem: ValidationError) -> str:
    """A problem that jsonschema found, in one line that begins with its path."""
    options = problem.context or [problem]  # of anyOf and oneOf
    reason = "; or ".join(dict.fromkeys(one.message for one in options))
    if len(reason) > 200:  # the value is at the start, the reason at the end
        reason = f"{reason[:95]} ... {reason[-95:]}"
    return f"{root}{problem.json_path[1:]}: {reason}"


def converted(name: str, texts: Mapping[str, str], tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Arguments that a format writes as text, in the types of the tool's schema.

    A text that the schema accepts only as a string stays one, such as "3" where a string is wanted.
    Otherwise it is read as JSON if it is a value of another type, and stays text if it isn't.
    """
    tool = next((tool for tool in tools if tool.name == name), None)
    return {key: _converted(key, text, tool) for key, text in texts.items()}


def _converted(key: str, text: str, tool: ToolSpec | None) -> Any:
    stripped = text.strip()
    try:
        value = _PYTHON[stripped] if stripped in _PYTHON else read_json(text)
    except ValueError:
        return text
    if isinstance(value, str):  # a text in quotes
        return text
    return (
        text if tool is None or (_fits(tool, key, text) and not _fits(tool, key, value)) else value
    )


def _fits(tool: ToolSpec, key: str, value: Any) -> bool:
    """Whether one argument fits, whatever the others are."""
    from referencing.exceptions import Unresolvable

    try:
        problems = validator_of(as_json(tool.parameters)).iter_errors({key: value})
        return not any(list(p.absolute_path)[:1] == [key] for p in problems)
    except (RecursionError, Unresolvable):
        return False
