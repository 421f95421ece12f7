"""Tool calls: parsed from a reply's text and checked against the tools.

The format is that of Hermes and Qwen models; a reply may have any number of calls:

    <tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>

A model may write anything, so parsing never raises: a call that can't be read or doesn't fit a tool
becomes a `ToolCall` with an `error`, which the environment can show to the model. Calls in the
model's reasoning (up to `</think>`) are drafts and are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn

from retrain.environment import ToolCall, ToolSpec
from retrain.errors import shown

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"

_CALL: Final = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)


class Reply(NamedTuple):
    """A parsed reply."""

    text: str
    """The reply without its calls; unchanged if it has none."""
    calls: tuple[ToolCall, ...]
    readable: bool
    """Whether each call has a name and an object of arguments, as templates require."""


def parse_reply(
    text: str, tools: Sequence[ToolSpec], *, first: int = 0, reasoning: bool = False
) -> Reply:
    """The calls in `text`, numbered from `first`.

    `reasoning` means that the prompt opened the reasoning, so that the reply begins inside it.
    """
    start = _end_of_reasoning(text, reasoning)
    found = list(_CALL.finditer(text, start))
    if not found:
        return Reply(text, (), True)
    readable, calls = True, []
    for number, match in enumerate(found, first):
        # Some templates require ids of nine letters and digits.
        call, is_readable = _read(match[1], bool(match[2]), tools, f"call{number:05d}")
        calls.append(call)
        readable = readable and is_readable
    rest = text[:start] + _CALL.sub("", text[start:])
    return Reply(rest.rstrip(), tuple(calls), readable)


def split_reasoning(text: str, opened: bool) -> tuple[str, str]:
    """The reasoning of a reply and its answer.

    `opened` means that the prompt opened the reasoning, so that the reply begins inside it.
    """
    end = _end_of_reasoning(text, opened)
    if not end:
        return "", text
    reasoning = text[:end].strip().removeprefix("<think>").removesuffix("</think>")
    return reasoning.strip("\n"), text[end:].lstrip("\n")


def tools_of(given: object) -> tuple[ToolSpec, ...]:
    """The tools of a data set's row: a list in the chat templates' format, or that list as JSON.

    None means no tools. Raises TypeError or ValueError if it is not a list of tools.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError:
            raise ValueError(f"tools: got {shown(given)}, expected JSON") from None
    given = () if given is None else given
    if not isinstance(given, list | tuple):
        raise TypeError(f"tools: got {shown(given)}, expected a list of tools")
    tools = tuple(map(_tool, given))
    check_tools(tools)
    return tools


def _tool(given: object) -> ToolSpec:
    function = given.get("function", given) if isinstance(given, Mapping) else given
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise TypeError(
            f'tool: got {shown(given)}, expected {{"name": ..., "description": ..., '
            '"parameters": ...} or {"type": "function", "function": {...}}'
        )
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    return ToolSpec(function["name"], function.get("description") or "", parameters)


def check_tools(tools: Sequence[object]) -> None:
    """Raise TypeError or ValueError unless all `tools` are valid."""
    names = set()
    for tool in tools:
        if not isinstance(tool, ToolSpec):
            raise TypeError(
                f"tools: got {shown(tool)}, expected ToolSpec(name, description, parameters)"
            )
        if tool.name in names:
            raise ValueError(f"tools: got two tools named {tool.name!r}, expected different names")
        names.add(tool.name)
        _check_schema(tool)


def _check_schema(tool: ToolSpec) -> None:
    where = f"tool {tool.name!r}: parameters"
    try:
        _validator(_as_json(tool.parameters))
    except TypeError:
        raise TypeError(
            f"{where}: got {shown(tool.parameters)}, expected a JSON schema (a dict of JSON values)"
        ) from None
    except ValueError as error:
        raise ValueError(f"{where}{error}") from None


@lru_cache(maxsize=256)
def _validator(parameters: str) -> Validator:
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


def _as_json(schema: Mapping[str, Any]) -> str:
    return json.dumps(schema, default=dict)  # for mappings of other kinds


def as_template(call: ToolCall) -> dict[str, Any]:
    """A call in the format that chat templates expect in an assistant message."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}


def _end_of_reasoning(text: str, reasoning: bool) -> int:
    """Where the answer starts: at the end of `text` if the reasoning never ends."""
    if not reasoning and not text.lstrip().startswith("<think>"):
        return 0
    end = text.find("</think>")
    return len(text) if end < 0 else end + len("</think>")


def _read(
    payload: str, closed: bool, tools: Sequence[ToolSpec], call_id: str
) -> tuple[ToolCall, bool]:
    """One call, and whether it could be parsed."""
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
        return ToolCall(name, {}, call_id, f"arguments: got {got}, expected an object"), False
    return ToolCall(name, arguments, call_id, _fault(name, arguments, tools)), True


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


def _fault(name: str, arguments: Mapping[str, Any], tools: Sequence[ToolSpec]) -> str | None:
    """Why a call doesn't fit the tools, or None."""
    from jsonschema.exceptions import best_match
    from referencing.exceptions import Unresolvable

    tool = next((tool for tool in tools if tool.name == name), None)
    if tool is None:
        offered = ", ".join(tool.name for tool in tools)
        return f"there is no tool {name!r}: the tools are {offered}"
    try:
        problem = best_match(_validator(_as_json(tool.parameters)).iter_errors(arguments))
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
