"""Tool calls: read from a reply's text, checked against the tools that were offered.

The form is that of Hermes and Qwen models, any number of them in a reply:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

A model may write anything, so nothing here raises: whatever can't be read or doesn't fit becomes a
`ToolCall` whose `error` says why, for the environment to show to the model. What stands in the
model's reasoning (up to `</think>`) is a draft and never a call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, NoReturn

from retrain.environment import ToolCall, ToolSpec
from retrain.errors import shown

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_CALL: Final = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)
_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


class Reply(NamedTuple):
    """A reply taken apart."""

    text: str
    """The reply without its calls; untouched when it makes none."""
    calls: tuple[ToolCall, ...]
    readable: bool
    """Each call has a name and an object of arguments, so that a template can show it."""


def parse_reply(
    text: str, tools: Sequence[ToolSpec], *, first: int = 0, reasoning: bool = False
) -> Reply:
    """The calls of `text`, with ids from number `first` on.

    `reasoning` says that the prompt has opened the reasoning, so that the reply begins inside it.
    """
    start = _end_of_reasoning(text, reasoning)
    found = list(_CALL.finditer(text, start))
    if not found:
        return Reply(text, (), True)
    readable, calls = True, []
    for number, match in enumerate(found, first):
        # Some templates insist on nine letters and digits.
        call, is_readable = _read(match[1], bool(match[2]), tools, f"call{number:05d}")
        calls.append(call)
        readable = readable and is_readable
    rest = text[:start] + _CALL.sub("", text[start:])
    return Reply(rest.rstrip(), tuple(calls), readable)


def tools_of(given: object) -> tuple[ToolSpec, ...]:
    """The tools in a data set's column: in chat templates' form or its functions, or as JSON text.

    Raises TypeError or ValueError for what is no list of tools; None is no tools.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(f"tools is {shown(given)}, which is no JSON") from None
    given = () if given is None else given
    if not isinstance(given, list | tuple):
        raise TypeError(f"tools must be a list of tools, got {shown(given)}")
    tools = tuple(map(_tool, given))
    check_tools(tools)
    return tools


def _tool(given: object) -> ToolSpec:
    function = given.get("function", given) if isinstance(given, Mapping) else given
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            'a tool is {"name": ..., "description": ..., "parameters": ...}, on its own or as the '
            f'"function" of {{"type": "function"}}, got {shown(given)}'
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(function["name"], function.get("description") or "", parameters)


def check_tools(tools: Sequence[object]) -> None:
    """Raise TypeError or ValueError for what can't be offered as tools, before a model calls it."""
    names = set()
    for tool in tools:
        if not isinstance(tool, ToolSpec):
            raise TypeError(
                "tools must be a sequence of ToolSpec(name, description, parameters), got "
                f"{shown(tool)}"
            )
        if tool.name in names:
            raise ValueError(f"there are two tools with the name {tool.name!r}")
        names.add(tool.name)
        _check_schema(tool.parameters, f"tool {tool.name!r}: parameters")


def _check_schema(schema: object, path: str) -> None:
    if not isinstance(schema, Mapping):
        raise TypeError(f"{path} must be a JSON schema (a dict), got {shown(schema)}")
    properties, wanted = schema.get("properties", {}), schema.get("type", [])
    unknown = set([wanted] if isinstance(wanted, str) else wanted) - _TYPES.keys()
    if unknown:
        got = ", ".join(sorted(unknown))
        raise ValueError(f"{path} has the type {got}: JSON schema knows {', '.join(_TYPES)}")
    if not isinstance(properties, Mapping):
        raise TypeError(
            f"{path}.properties must be a dict of JSON schemas, got {shown(properties)}"
        )
    for name, inner in properties.items():
        _check_schema(inner, f"{path}.{name}")
    if isinstance(schema.get("items"), Mapping):
        _check_schema(schema["items"], f"{path}[]")


def as_template(call: ToolCall) -> dict[str, Any]:
    """The form in which an assistant message carries a call to a chat template."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _end_of_reasoning(text: str, reasoning: bool) -> int:
    """Where the reply itself starts: at the end, if the model never stops to reason."""
    if not reasoning and not text.lstrip().startswith("<think>"):
        return 0
    end = text.find("</think>")
    return len(text) if end < 0 else end + len("</think>")


def _read(
    payload: str, closed: bool, tools: Sequence[ToolSpec], call_id: str
) -> tuple[ToolCall, bool]:
    """One call, and whether it could be read at all."""
    if not closed:
        return ToolCall("", {}, call_id, f"{OPEN} without {CLOSE}"), False
    try:
        call = json.loads(payload, parse_constant=_refuse_constant)
        json.dumps(call, ensure_ascii=False).encode()  # half a surrogate pair has no tokens
    except (ValueError, RecursionError) as error:
        return ToolCall("", {}, call_id, f"the call is not valid JSON: {error}"), False
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        wanted = 'an object {"name": ..., "arguments": {...}}'
        return ToolCall("", {}, call_id, f"the call must be {wanted}"), False
    name, arguments = call["name"], call.get("arguments", {})
    if not isinstance(arguments, dict):
        got = type(arguments).__name__
        return ToolCall(name, {}, call_id, f"arguments must be an object, got {got}"), False
    return ToolCall(name, arguments, call_id, _misfit(name, arguments, tools)), True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _misfit(name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str | None:
    """Why a call fits none of the tools, or None."""
    for tool in tools:
        if tool.name == name:
            schema = {"type": "object", **tool.parameters}
            return check_value(arguments, schema, "arguments", closed=True)
    offered = ", ".join(tool.name for tool in tools)
    return f"there is no tool {name!r}: the tools are {offered}"


def check_value(
    value: object, schema: Mapping[str, Any], path: str, *, closed: bool = False
) -> str | None:
    """Why `value` doesn't fit the JSON schema, or None.

    Knows `type`, `enum`, `required`, `properties`, `additionalProperties: false` and `items`;
    other keywords are left to the tool. `closed` refuses properties that the schema doesn't name
    unless it allows them outright: a tool called with a made-up argument would fail anyhow.
    """
    if "enum" in schema and value not in schema["enum"]:
        return f"{path} must be one of {json.dumps(schema['enum'])}, got {_shown(value)}"
    if "type" in schema and not _has_type(value, schema["type"]):
        wanted = schema["type"] if isinstance(schema["type"], str) else " or ".join(schema["type"])
        return f"{path} must be of type {wanted}, got {_shown(value)}"
    if isinstance(value, dict):
        return _check_object(value, schema, path, closed)
    if isinstance(value, list) and isinstance(schema.get("items"), Mapping):
        problems = (
            check_value(item, schema["items"], f"{path}[{i}]") for i, item in enumerate(value)
        )
        return next(filter(None, problems), None)
    return None


def _check_object(
    value: Mapping[str, Any], schema: Mapping[str, Any], path: str, closed: bool
) -> str | None:
    properties: Mapping[str, Any] = schema.get("properties", {})
    missing = [name for name in schema.get("required", ()) if name not in value]
    if missing:
        return f"{path} lacks {', '.join(missing)}"
    if schema.get("additionalProperties", not (closed and properties)) is False:
        unknown = [name for name in value if name not in properties]
        if unknown:
            known = ", ".join(properties) or "none"
            return f"{path} has no {', '.join(unknown)}: it takes {known}"
    problems = (
        check_value(value[name], inner, f"{path}.{name}")
        for name, inner in properties.items()
        if name in value
    )
    return next(filter(None, problems), None)


def _has_type(value: object, wanted: str | Sequence[str]) -> bool:
    names = [wanted] if isinstance(wanted, str) else wanted
    return any(_is(value, name) for name in names)


def _is(value: object, name: str) -> bool:
    if isinstance(value, bool):  # to Python, True is an int
        return name == "boolean"
    if name == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[name])


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."
