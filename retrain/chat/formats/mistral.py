"""Mistral: `[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]`.

Models since Mistral Small 3.2 write `[TOOL_CALLS]add[ARGS]{"a": 1}`, once per call, some with an
id: `[TOOL_CALLS]add[CALL_ID]a1b2c3d4e[ARGS]{"a": 1}`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from retrain.chat.formats.base import (
    Format,
    Found,
    call_of,
    named_call,
    not_json,
    read_json,
    read_json_at,
)

TAG: Final = "[TOOL_CALLS]"
_CALL: Final = re.compile(r"\[TOOL_CALLS\](.*?)(?=\[TOOL_CALLS\]|</s>|\Z)", re.DOTALL)
_NAMED: Final = re.compile(r"\s*([^\[\]{}\s]+)(?:\s*\[CALL_ID\](\w*))?\s*\[ARGS\]")


class Mistral(Format):
    """A list in JSON, or a name with its arguments, behind `[TOOL_CALLS]`."""

    tokens = (TAG, "[ARGS]", "[CALL_ID]")

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [found for match in _CALL.finditer(text, start) for found in _read(text, match)]


def _read(text: str, match: re.Match[str]) -> Iterator[Found]:
    start, end = match.span()
    if named := _NAMED.match(match[1]):
        yield _read_named(text, match, named)
        return
    at = match.start(1) + len(match[1]) - len(match[1].lstrip())
    try:
        calls, stop = _read_json(text, at, end)
    except ValueError as error:
        yield Found(start, end, error=not_json(error))
        return
    if not isinstance(calls, list):
        calls = [calls]
    for number, call in enumerate(calls):
        own = str(call.get("id") or "") if isinstance(call, dict) else ""
        yield call_of(stop if number else start, stop, _decoded(call))._replace(id=own)
    if not calls:
        yield Found(start, stop, error="got an empty list, expected calls")


def _read_named(text: str, match: re.Match[str], named: re.Match[str]) -> Found:
    """A name and its arguments in JSON."""
    start, end = match.span()
    at = match.start(1) + named.end()
    at += len(text[at:end]) - len(text[at:end].lstrip())
    try:
        _, stop = _read_json(text, at, end)
    except ValueError:
        stop = end
    return named_call(start, stop, named[1], text[at:stop])._replace(id=named[2] or "")


def _read_json(text: str, at: int, end: int) -> tuple[Any, int]:
    """The JSON value at `at`, and where it ends: behind `end` only if that is in a string.

    The decoder counts the lines before an error, so it gets no more text than it needs.
    """
    while True:
        try:
            value, size = read_json_at(text[at:end], 0)
            return value, at + size
        except ValueError as error:
            if end >= len(text) or not str(error).startswith("Unterminated string"):
                raise
            end = text.find(TAG, end + (end - at))
            end = len(text) if end < 0 else end


def _decoded(call: object) -> object:
    """A call whose arguments may be a string of JSON."""
    if isinstance(call, dict) and isinstance(text := call.get("arguments"), str):
        try:
            return {**call, "arguments": read_json(text)}
        except ValueError:
            return call
    return call
