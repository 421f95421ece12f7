"""gpt-oss: harmony, in which a reply is one or more messages on channels.

    <|channel|>analysis<|message|>I add.<|end|>
    <|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}
    <|call|>

The analysis is the reasoning. A message to a function is a call; others are the answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from retrain.chat.formats.base import Format, Found, named_call

_BODY: Final = "<|message|>"
_END: Final = re.compile(r"<\|end\|>|(?=<\|call\|>|<\|return\|>|<\|start\|>)|\Z")
_TO: Final = re.compile(r"\bto=([^\s<]+)")
_CHANNEL: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_OTHERS: Final = ("assistant", "all", "user")


class GptOss(Format):
    """Harmony's channels."""

    tokens = ("<|channel|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>",
              "<|return|>")  # fmt: skip
    ends = ("<|call|>", "<|return|>")
    replaced = ("<|return|>",)
    channels = True

    def find(self, text: str, start: int) -> Sequence[Found]:
        return [
            named_call(one.start, one.end, one.to.removeprefix("functions."), one.body)
            for one in _messages(text)
            if one.to
        ]

    def answer_start(self, text: str, opener: str) -> int:
        return 0

    def split(self, text: str, opener: str) -> tuple[str, str]:
        reasoning: list[str] = []
        answer: list[str] = []
        end = 0
        for one in _messages(text):
            end = one.end
            if one.to:
                answer.append(text[one.start : one.end])
            else:
                (reasoning if one.channel == "analysis" else answer).append(one.body)
        if not end and "<|channel|>" not in text:
            return "", text
        return "\n".join(reasoning), "\n".join(answer)


class _Message(NamedTuple):
    start: int
    end: int
    """Before the token that ends a turn."""
    channel: str
    to: str
    """The function that it calls."""
    body: str


def _messages(text: str) -> Iterator[_Message]:
    """The messages of a text that may begin inside the head of the first one."""
    end = 0
    while (body := text.find(_BODY, end)) >= 0:
        start = max(end, text.rfind("<|start|>", end, body))
        head, body = text[start:body], body + len(_BODY)
        stop = _END.search(text, body)
        assert stop is not None, "each text has an end"
        to, channel = _TO.search(head), _CHANNEL.search(head)
        end = stop.end()
        name = "" if to is None or to[1] in _OTHERS else to[1]
        said = text[body : stop.start()]
        yield _Message(start, end, "" if channel is None else channel[1], name, said)
