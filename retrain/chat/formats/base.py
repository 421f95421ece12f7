"""What a tool-call format is: how a model writes calls and reasoning.

A format is one file. It finds the calls in a reply; everything else (checking them against the
tools, ids, the history) is common to all formats. A model may write anything, so `find` raises
nothing: a call that can't be read is a `Found` with an `error`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple, NoReturn

from retrain.chat.reasoning import answer_start, split_reasoning

_NONE: Final[Mapping[str, Any]] = MappingProxyType({})


class Found(NamedTuple):
    """A call in a text."""

    start: int
    end: int
    """With the markup around it. Of several calls in one piece of markup, the first has all."""
    name: str = ""
    arguments: Mapping[str, Any] = _NONE
    error: str | None = None
    """Why it can't be read."""
    id: str = ""
    """The model's own id of the call."""


class Format(ABC):
    """A way to write tool calls."""

    tokens: ClassVar[Sequence[str]] = ()
    """Markup that may be special tokens, which plain decoding would drop. If no other built-in
    format has the first one, a template with it is taken to be of this format."""
    ends: ClassVar[Sequence[str]] = ()
    """Tokens that end a turn, beside those of the chat template."""
    replaced: ClassVar[Sequence[str]] = ()
    """Of these tokens, those that a template replaces by its own end of a turn in the history."""
    untyped: ClassVar[bool] = False
    """Whether arguments are text, to be converted by the tool's schema."""
    channels: ClassVar[bool] = False
    """Whether replies without tools have markup too, which is no part of a message's content."""

    in_system: bool = False
    """Whether a system message shows the tools, as `explain` writes it, and not the template."""

    @abstractmethod
    def find(self, text: str, start: int) -> Sequence[Found]:
        """The calls in `text` from `start` on, where the answer begins."""

    def answer_start(self, text: str, opener: str) -> int:
        """Where calls may begin: those in the reasoning are drafts."""
        return answer_start(text, opener)

    def split(self, text: str, opener: str) -> tuple[str, str]:
        """The reasoning and the answer of a reply to a prompt that ends with `opener`."""
        return split_reasoning(text, opener)

    def explain(self, tools: Sequence[Mapping[str, Any]]) -> str:
        """The system message that shows tools and says how to call them.

        A format that has it also has `write` and `answer`, for the history.
        """
        raise NotImplementedError

    def write(self, call: Mapping[str, Any]) -> str:
        """A call of the history, as the model would write it."""
        raise NotImplementedError

    def answer(self, text: str) -> str:
        """The result of a call, as the user's message shows it."""
        raise NotImplementedError


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


_DECODER: Final = json.JSONDecoder(parse_constant=_refuse)


def read_json(text: str) -> Any:
    """A JSON value that has tokens; raises ValueError."""
    value, end = read_json_at(text, len(text) - len(text.lstrip()))
    if text[end:].strip():
        raise ValueError(f"Extra data after character {end}")
    return value


def read_json_at(text: str, start: int) -> tuple[Any, int]:
    """The JSON value that begins at `start`, and where it ends; raises ValueError."""
    try:
        value, end = _DECODER.raw_decode(text, start)
        return checked_json(value), end
    except RecursionError as error:
        raise ValueError(str(error)) from None


def checked_json(value: Any) -> Any:
    """`value`; raises ValueError if it is no JSON value, or has half of a surrogate pair."""
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, RecursionError) as error:
        raise ValueError(str(error)) from None
    return value


def call_of(start: int, end: int, call: Any, keys: Sequence[str] = ("arguments",)) -> Found:
    """The call in a JSON object with a name, and arguments under one of `keys`."""
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        wanted = f'an object {{"name": ..., "{keys[0]}": {{...}}}}'
        return Found(start, end, error=f"the call must be {wanted}")
    key = next((key for key in keys if key in call), keys[0])
    name, arguments = call["name"], call.get(key, {})
    if not isinstance(arguments, dict):
        got = type(arguments).__name__
        return Found(start, end, name, error=f"{key}: got {got}, expected an object")
    return Found(start, end, name, arguments)


def named_call(start: int, end: int, name: str, payload: str) -> Found:
    """The call of a function with arguments as a JSON object."""
    try:
        arguments = read_json(payload) if payload.strip() else {}
    except ValueError as error:
        return Found(start, end, name, error=not_json(error))
    return call_of(start, end, {"name": name, "arguments": arguments})


def not_json(error: ValueError) -> str:
    return f"the call is not valid JSON: {error}"
