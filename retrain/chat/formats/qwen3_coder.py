"""Qwen3-Coder, Qwen3.5 and Nemotron 3: XML, with one element per argument.

<tool_call>
<function=add>
<parameter=a>
1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from retrain.chat.formats.base import Format, Found

_CALL: Final = re.compile(
    r"(?:(<tool_call>)|(?=<function=))(.*?)((?(1)</tool_call>|</function>)|\Z)", re.DOTALL
)
_FUNCTION: Final = re.compile(r"<function=([^>\n]*)>")
_CLOSE: Final = "</function>"
_PARAMETER: Final = re.compile(
    r"<parameter=([^>\n]*)>\n?(.*?)(?:(\n?</parameter>)(?=\s*(?:<parameter=|\Z))|\Z)", re.DOTALL
)


class Qwen3Coder(Format):
    """`<function=NAME>` with `<parameter=NAME>` elements, usually in `<tool_call>` tags."""

    tokens = ("<tool_call>", "</tool_call>")
    untyped = True

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [_read(match) for match in _CALL.finditer(text, start)]


def _read(match: re.Match[str]) -> Found:
    (start, end), (tag, inside, close) = match.span(), match.groups()
    if not close:
        return Found(start, end, error=f"{tag or '<function='} is not closed")
    inside = inside.strip() if tag else inside + close
    function = _FUNCTION.match(inside)
    if function is None or not inside.endswith(_CLOSE):
        return Found(start, end, error="the call must be <function=NAME>...</function>")
    name = function[1].strip()
    try:
        arguments = _arguments(inside[function.end() : -len(_CLOSE)])
    except ValueError as error:
        return Found(start, end, name, error=str(error))
    return Found(start, end, name, arguments)


def _arguments(body: str) -> dict[str, str]:
    found = {}
    for name, value, close in _PARAMETER.findall(body):
        if not close:
            raise ValueError(f"<parameter={name}> is not closed")
        found[name] = value
    if _PARAMETER.sub("", body).strip():
        raise ValueError("got text outside <parameter=NAME>...</parameter>")
    return found
