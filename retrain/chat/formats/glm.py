"""GLM-4.5: the function's name, then keys and values in tags.

<tool_call>add
<arg_key>a</arg_key>
<arg_value>1</arg_value>
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from retrain.chat.formats.base import Format, Found

_CALL: Final = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_PAIR: Final = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)(</arg_value>|\Z)", re.DOTALL
)


class Glm(Format):
    """`<arg_key>` and `<arg_value>` in `<tool_call>` tags."""

    tokens = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>",
              "</arg_value>")  # fmt: skip
    untyped = True

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [_read(match) for match in _CALL.finditer(text, start)]


def _read(match: re.Match[str]) -> Found:
    start, end = match.span()
    if not match[2]:
        return Found(start, end, error="<tool_call> without </tool_call>")
    name, arguments, rest = match[1].partition("<arg_key>")
    name = name.strip()
    body = arguments + rest
    pairs = list(_PAIR.finditer(body))
    if not name or any(character in name for character in " \n<>{"):
        return Found(
            start, end, error="the call must begin with the name of a tool, then a newline"
        )
    if _PAIR.sub("", body).strip() or not all(pair[3] for pair in pairs):
        wanted = "<arg_key>...</arg_key><arg_value>...</arg_value>"
        return Found(start, end, name, error=f"the arguments must be pairs of {wanted}")
    return Found(start, end, name, {pair[1].strip(): pair[2] for pair in pairs})
