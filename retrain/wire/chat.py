"""ChatClient: a model behind OpenAI's chat API, on any server that speaks it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from retrain.errors import shown
from retrain.types import Message
from retrain.wire.client import Call, HttpClient
from retrain.wire.retries import RetryPolicy

SECONDS = 600.0
"""The most that one attempt takes, unless `total` is less."""
DOWN = frozenset((429, 502, 503, 504))
"""Statuses of a server that loads or is overloaded, and of a proxy whose server is down."""
REACHED = frozenset(range(300, 600)) - DOWN - {401}
"""Statuses of a server that is up, whatever it says of its list of models."""


@dataclass(frozen=True, slots=True)
class ChatReply:
    """What the model said, without its reasoning, and what the call cost."""

    text: str
    """Empty if the model wrote only reasoning, as when its tokens ran out."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    """0 if the server does not count them."""


class ChatClient:
    """Calls `model` at the base URL `url`, such as https://api.openai.com/v1.

    A call that fails with status 429 or 5xx, or loses its connection, is sent again after growing
    pauses, or after the pause that the server asks for. The API key appears in no message.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key_env: str | None = None,
        total: float = 300.0,
        **options: Any,
    ) -> None:
        """Connects to nothing yet.

        Raises ValueError if the environment variable is not set, ConfigError for a wrong URL or if
        httpx is not installed.

        Args:
            api_key_env: The environment variable that holds the key; by default none is sent.
            total: Seconds that all attempts of one call may take together.
            options: Further fields of each request, such as temperature; None is not sent.
        """
        key = os.environ.get(api_key_env) if api_key_env else None
        if api_key_env and not key:
            raise ValueError(f"api_key_env: the environment variable {api_key_env} is not set")
        self.model, self.url = model, url
        self._options = {name: value for name, value in options.items() if value is not None}
        self._http = HttpClient(
            url,
            secrets={"Authorization": f"Bearer {key}"} if key else {},
            policy=RetryPolicy(total=total),
        )

    async def reach(self) -> None:
        """Wait for a server that starts, up to 20 seconds: any answer but that of a wrong key will
        do, since not every server lists its models.

        Raises RunError when the server can't be reached, or rejects the key.
        """
        call = Call("GET", "models", accept=REACHED)
        await self._http.send(call, lambda response: None)

    async def ask(self, messages: Sequence[Message], **options: Any) -> ChatReply:
        """The reply to a conversation; `options` are further fields of this request.

        Raises RunError when the server refuses the call or can't be reached.
        """
        asked = {**self.request(messages), **options}
        call = Call.json("POST", "chat/completions", asked, timeout=SECONDS)
        return await self._http.send(call, lambda response: _reply(response.json()))

    def request(self, messages: Sequence[Message]) -> dict[str, Any]:
        """The body of the request: equal calls have equal ones."""
        wired = [_on_the_wire(message) for message in messages]
        return {"model": self.model, **self._options, "messages": wired}

    async def close(self) -> None:
        """Close the connections."""
        await self._http.close()


def _on_the_wire(message: Message) -> Mapping[str, Any]:
    """A message with the arguments of its tool calls as text, as OpenAI's API has them."""
    if not message.get("tool_calls"):
        return message
    calls = [
        {**call, "function": {**call["function"], "arguments": _as_text(call["function"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _as_text(function: Mapping[str, Any]) -> str:
    arguments = function["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _reply(answer: Any) -> ChatReply:
    """The content of a chat completion; raises ValueError if it is none."""
    try:
        message = answer["choices"][0]["message"]
        content = message["content"]
        if content is None and (message.get("reasoning_content") or message.get("reasoning")):
            content = ""
    except (KeyError, IndexError, TypeError, AttributeError):
        content = None
    if not isinstance(content, str):
        raise ValueError(f"got {shown(answer)}, expected a chat completion with text")
    used = answer.get("usage")
    used = used if isinstance(used, Mapping) else {}
    counts = [used.get(name) for name in ("prompt_tokens", "completion_tokens")]
    return ChatReply(content, *(count if isinstance(count, int) else 0 for count in counts))
