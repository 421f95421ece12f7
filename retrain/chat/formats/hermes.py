"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from retrain.chat.formats.base import Format, Found, call_of, not_json, read_json

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_CALL: Final = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)


class Hermes(Format):
    """A JSON object in `<tool_call>` tags; a reply may have any number of them."""

    tokens = (OPEN, CLOSE)

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [_read(match) for match in _CALL.finditer(text, start)]

    def explain(self, tools: Sequence[Mapping[str, Any]]) -> str:
        listed = "\n".join([_json(tool) for tool in tools])
        return (
            "You can call these tools, each given as a JSON schema:\n"
            f"<tools>\n{listed}\n</tools>\n\n"
            f"A call is a JSON object with the tool's name and its arguments, in {OPEN} tags:\n"
            f'{OPEN}\n{{"name": <name>, "arguments": <arguments>}}\n{CLOSE}'
        )

    def write(self, call: Mapping[str, Any]) -> str:
        function = call["function"]
        arguments = function["arguments"]
        if isinstance(arguments, str):
            arguments = json.loads(arguments)
        return f"{OPEN}\n{_json({'name': function['name'], 'arguments': arguments})}\n{CLOSE}"

    def answer(self, text: str) -> str:
        return f"<tool_response>\n{text}\n</tool_response>"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _read(match: re.Match[str]) -> Found:
    start, end = match.span()
    if not match[2]:
        return Found(start, end, error=f"{OPEN} without {CLOSE}")
    try:
        return call_of(start, end, read_json(match[1]))
    except ValueError as error:
        return Found(start, end, error=not_json(error))
