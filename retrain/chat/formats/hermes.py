"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from retrain.chat.formats.base import Format, Found, call_of, not_json, read_json

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
_CALL: Final = re.compile(rf"{OPEN}(.*?)({CLOSE}|\Z)", re.DOTALL)


class Hermes(Format):
    """A JSON object in `<tool_call>` tags; a reply may have any number of them."""

    tokens = (OPEN, CLOSE)

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [_read(match) for match in _CALL.finditer(text, start)]


def _read(match: re.Match[str]) -> Found:
    start, end = match.span()
    if not match[2]:
        return Found(start, end, error=f"{OPEN} without {CLOSE}")
    try:
        return call_of(start, end, read_json(match[1]))
    except ValueError as error:
        return Found(start, end, error=not_json(error))
