"""Messages in the form that a chat template takes, where that differs from the usual one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, cast

from retrain.chat.formats.base import Format
from retrain.types import Message


def system_in_user(messages: Sequence[Message]) -> list[Message]:
    """The text of the first system messages in front of the first user message.

    For templates without a system role, such as Gemma's. Without a user message it becomes one.
    """
    count = next((i for i, m in enumerate(messages) if m["role"] != "system"), len(messages))
    text = "\n\n".join([message["content"] for message in messages[:count]])
    rest = list(messages[count:])
    place = next((i for i, m in enumerate(rest) if m["role"] == "user"), None)
    if place is None:
        return [Message(role="user", content=text), *rest]
    joined = f"{text}\n\n{rest[place]['content']}"
    rest[place] = Message(**{**rest[place], "content": joined})
    return rest


def explained(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: Format
) -> list[Message]:
    """The tools in the first system message, and calls and their results in the text of messages.

    For templates that show no tools. Results that follow each other are one message of the user.
    """
    found: list[Message] = []
    for is_answer, part in groupby(messages, lambda message: message["role"] == "tool"):
        if is_answer:
            text = "\n".join(form.answer(message["content"]) for message in part)
            found.append(Message(role="user", content=text))
        else:
            found += [_with_calls_as_text(message, form) for message in part]
    if not tools:
        return found
    text = form.explain(tools)
    if found and found[0]["role"] == "system":
        text = f"{found.pop(0)['content']}\n\n{text}"
    return [Message(role="system", content=text), *found]


def _with_calls_as_text(message: Message, form: Format) -> Message:
    """The message with its tool calls in its text."""
    if not message.get("tool_calls"):
        return message
    parts = [message["content"], *map(form.write, message["tool_calls"])]
    kept = {key: value for key, value in message.items() if key != "tool_calls"}
    return cast(Message, {**kept, "content": "\n".join(part for part in parts if part)})


def with_text_arguments(message: Message) -> Message:
    """The arguments of tool calls as JSON text, as OpenAI's API has them."""
    return Message(**{**message, "tool_calls": [_as_text(c) for c in message["tool_calls"]]})


def _as_text(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": arguments}}


def in_reasoning(message: Message) -> Message:
    """The text of a message behind its reasoning, for templates that take only one of the two."""
    both = f"{message['reasoning_content']}\n\n{message['content']}"
    return Message(**{**message, "reasoning_content": both, "content": ""})
