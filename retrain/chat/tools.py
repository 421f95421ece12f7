"""Tool calls: read from a reply by its format, numbered and checked against the tools.

A model may write anything, so parsing never raises: a call that can't be read or doesn't fit a tool
becomes a `ToolCall` with an `error`, which the environment can show to the model. Calls in the
model's reasoning are drafts and are ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from retrain.chat.formats.base import Format
from retrain.chat.schemas import as_json, converted, fault, validator_of
from retrain.environment import ToolCall, ToolSpec
from retrain.errors import shown

_ID: Final = re.compile(r"[A-Za-z0-9]{9}")
"""Ids that every template takes: some require nine letters and digits."""


class ParsedReply(NamedTuple):
    """A parsed reply."""

    text: str
    """The reply with its reasoning and without its calls; unchanged if it has none."""
    calls: tuple[ToolCall, ...]
    readable: bool
    """Whether each call has a name and an object of arguments, as templates require."""


def parse_reply(
    text: str, tools: Sequence[ToolSpec], form: Format, *, first: int = 0, opener: str = ""
) -> ParsedReply:
    """The calls in a reply to a prompt that ends with `opener`, numbered from `first`."""
    found = form.find(text, form.answer_start(text, opener))
    if not found:
        return ParsedReply(text, (), True)
    calls: list[ToolCall] = []
    kept: list[str] = []
    end = 0
    for number, one in enumerate(found, first):
        kept.append(text[end : one.start])
        end = one.end
        own = _ID.fullmatch(one.id) and one.id not in [call.id for call in calls]
        call_id = one.id if own else f"call{number:05d}"
        if one.error is not None:
            calls.append(ToolCall(one.name, {}, call_id, one.error))
            continue
        arguments = converted(one.name, one.arguments, tools) if form.untyped else one.arguments
        error = fault(one.name, arguments, tools)
        calls.append(ToolCall(one.name, arguments, call_id, error))
    rest = "".join([*kept, text[end:]])
    return ParsedReply(rest.rstrip(), tuple(calls), all(one.error is None for one in found))


def tools_of(given: object) -> tuple[ToolSpec, ...]:
    """The tools of a dataset's row: a list in the chat templates' format, or that list as JSON.

    None means no tools. Raises TypeError or ValueError if it is not a list of tools.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
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
        where = f"tool {tool.name!r}: parameters"
        try:
            validator_of(as_json(tool.parameters))
        except TypeError:
            got = shown(tool.parameters)
            raise TypeError(f"{where}: got {got}, expected a JSON schema, as a dict") from None
        except ValueError as error:
            raise ValueError(f"{where}{error}") from None


def as_template(call: ToolCall) -> dict[str, Any]:
    """A call in the format that chat templates expect in an assistant message."""
    function = {"name": call.name, "arguments": dict(call.arguments)}
    return {"id": call.id, "type": "function", "function": function}
