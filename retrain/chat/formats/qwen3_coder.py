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
    r"<tool_call>(.*?)(</tool_call>|\Z)|<function=.*?(?:(</function>)|\Z)", re.DOTALL
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
    (start, end), bare = match.span(), match[1] is None
    if not (match[3] if bare else match[2]):
        return Found(start, end, error=f"{'<function=' if bare else '<tool_call>'} is not closed")
    inside = (match[0] if bare else match[1]).strip()
    function = _FUNCTION.match(inside)
    if function is None or not inside.endswith(_CLOSE):
        return Found(start, end, error="the call must be <function=NAME>...</function>")
    name, body = function[1].strip(), inside[function.end() : -len(_CLOSE)]
    parameters = list(_PARAMETER.finditer(body))
    open_ends = [parameter[1] for parameter in parameters if not parameter[3]]
    if open_ends:
        return Found(start, end, name, error=f"<parameter={open_ends[0]}> is not closed")
    if _PARAMETER.sub("", body).strip():
        return Found(start, end, name, error="got text outside <parameter=NAME>...</parameter>")
    return Found(start, end, name, {parameter[1]: parameter[2] for parameter in parameters})
