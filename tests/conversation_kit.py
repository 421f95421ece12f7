"""What the tests of conversations share."""

from __future__ import annotations

from typing import Any

from retrain.chat import Conversation
from retrain.environment import ToolSpec
from retrain.types import Completion, Message

ADD = ToolSpec(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)

HI: Message = {"role": "user", "content": "Hi"}

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def say(tokenizer: Any, text: str) -> Completion:
    """The sampler's completion of a text, special tokens included."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    plain = tokenizer.decode(ids, skip_special_tokens=True)
    return Completion(ids, [-1.0] * len(ids), plain, "stop", 0)


def seen(tokenizer: Any, conversation: Conversation) -> str:
    return str(tokenizer.decode(conversation.prompt_ids))


def extends(conversation: Conversation, prompt_ids: list[int], completion: Completion) -> bool:
    seen = [*prompt_ids, *completion.token_ids]
    return conversation.prompt_ids[: len(seen)] == seen
