"""Llama 3.1 and later: a reply that is `{"name": "add", "parameters": {"a": 1}}`.

The call may follow `<|python_tag|>`. Several calls are separated by semicolons, commas or newlines.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from retrain.chat.formats.base import Format, Found, call_of, not_json, read_json_at

TAG: Final = "<|python_tag|>"
_TAGGED: Final = re.compile(rf"\s*{re.escape(TAG)}\s*")
_BARE: Final = re.compile(r'\s*(?=\{\s*"(?:name|type|parameters|function)"\s*:)')
_BETWEEN: Final = re.compile(rf"[\s;,]*(?:{re.escape(TAG)}\s*)?(?=\{{)")
_KEYS: Final = ("parameters", "arguments")


class Llama3Json(Format):
    """The whole answer is JSON, so an answer that begins with other text has no call."""

    tokens = (TAG,)
    ends = ("<|eom_id|>",)

    def find(self, text: str, start: int) -> Sequence[Found]:
        begin = _BARE.match(text, start)
        tagged = begin is None
        if tagged and (at := text.find(TAG, start)) >= 0:
            begin = _TAGGED.match(text, at)
        found: list[Found] = []
        while begin is not None:
            try:
                call, end = read_json_at(text, begin.end())
            except ValueError as error:
                found.append(Found(begin.start(), len(text), error=not_json(error)))
                break
            if not tagged and not found and not ("name" in call and {*_KEYS} & {*call}):
                break  # an answer in JSON
            found.append(call_of(begin.start(), end, call, _KEYS))
            begin = _BETWEEN.match(text, end)
        return found
