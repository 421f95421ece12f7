"""DeepSeek V3, R1 and V3.1, whose markup is tokens with full-width bars.

V3 and R1: `<｜tool▁call▁begin｜>function<｜tool▁sep｜>add`, a newline, the arguments as a block of
JSON in backquotes, `<｜tool▁call▁end｜>`. V3.1: `<｜tool▁call▁begin｜>add<｜tool▁sep｜>{"a": 1}`,
`<｜tool▁call▁end｜>`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from retrain.chat.formats.base import Format, Found, named_call

ALL, ALL_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
ONE, SEP, ONE_END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_CALL: Final = re.compile(
    rf"(?:{ALL}\s*)?{ONE}(.*?)(?:({ONE_END})(?:\s*{ALL_END})?|(?={ONE})|\Z)", re.DOTALL
)
_BLOCK: Final = re.compile(r"([^\n]*)\n```json\n(.*)\n```\s*\Z", re.DOTALL)


class DeepSeek(Format):
    """A name and a JSON object between `<｜tool▁call▁begin｜>` and `<｜tool▁call▁end｜>`."""

    tokens = (ALL, ALL_END, ONE, SEP, ONE_END)

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [_read(match) for match in _CALL.finditer(text, start)]


def _read(match: re.Match[str]) -> Found:
    start, end = match.span()
    if not match[2]:
        return Found(start, end, error=f"{ONE} without {ONE_END}")
    kind, sep, payload = match[1].partition(SEP)
    if not sep:
        return Found(start, end, error=f"the call has no {SEP}")
    block = _BLOCK.match(payload)
    if block is not None:
        return named_call(start, end, block[1].strip(), block[2])
    if kind.strip() == "function" and "\n" in payload.strip():
        return Found(start, end, error="the arguments must be a block ```json ... ```")
    return named_call(start, end, kind.strip(), payload)
