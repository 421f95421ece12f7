"""The messages that user code returns, checked before a template gets them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from retrain.errors import shown
from retrain.types import Message


def checked_messages(messages: object, what: str) -> list[Message]:
    """A copy of the messages that user code returned; raises TypeError or ValueError."""
    if not isinstance(messages, list | tuple):
        wanted = '[{"role": "user", "content": ...}]'
        raise TypeError(
            f"{what}: got {shown(messages)}, expected a list of messages such as {wanted}"
        )
    return [_checked_message(message, f"{what}[{i}]") for i, message in enumerate(messages)]


def _checked_message(message: object, what: str) -> Message:
    if not isinstance(message, Mapping):
        wanted = '{"role": ..., "content": ...}'
        raise TypeError(f"{what}: got {shown(message)}, expected a dict {wanted}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{what}: got role {shown(role)}, expected one such as user")
    if content is None and message.get("tool_calls"):  # recorded calls often have no text
        content = ""
    if content is None:
        raise ValueError(f'{what} has no content; write "" for an empty one')
    if not isinstance(content, str):
        raise TypeError(f"{what}: got content {shown(content)}, expected a string")
    return cast(Message, {**message, "role": role, "content": content})
