"""Messages in the form that a chat template takes, where that differs from the usual one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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
