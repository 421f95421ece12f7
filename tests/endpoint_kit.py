"""What the tests of the endpoint share: a scripted model, and clients whose calls are alike."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

from retrain.agents.calls import Calls
from retrain.agents.server import EndpointServer
from retrain.chat import Chat
from retrain.config import EndpointConfig
from retrain.environment import Endpoint
from retrain.types import Completion
from tests import chat_kit

TOKENIZER = chat_kit.byte_level(chat_kit.TOOLS)
CHAT = Chat(TOKENIZER)
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
ADD = {"name": "add", "description": "The sum.", "parameters": SCHEMA}


def saying(text: str, **arguments: Any) -> str:
    """A reply with a call of `add`, written as no template and no SDK would."""
    call = json.dumps({"arguments": arguments, "name": "add"})
    return f"{text}<tool_call>  {call} </tool_call>"


class Script:
    """A sampler that says what it is given, reply for reply."""

    def __init__(self, *replies: str) -> None:
        self.replies = list(replies)
        self.asked: list[tuple[list[int], dict[str, Any]]] = []
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def __call__(self, prompt_ids: Any, n: int, key: str, options: Any) -> list[Completion]:
        self.asked.append((list(prompt_ids), dict(options)))
        self.started.set()
        if not self.replies:
            try:
                await asyncio.Event().wait()
            finally:
                self.cancelled.set()
        return [said(self.replies.pop(0), options.get("max_tokens")) for _ in range(n)]


def said(text: str, max_tokens: int | None = None) -> Completion:
    ids = [*TOKENIZER.encode(text), TOKENIZER.eos_token_id][:max_tokens]
    ended = max_tokens is None or len(ids) < max_tokens
    text = TOKENIZER.decode(ids, skip_special_tokens=True)
    return Completion(ids, [-0.5] * len(ids), text, "stop" if ended else "length", 0)


class Open(NamedTuple):
    """A rollout of a scripted model."""

    endpoint: Endpoint
    calls: Calls
    script: Script
    server: EndpointServer

    def extends(self) -> list[bool]:
        """Whether each call after the first continues the tokens of the one before."""
        pairs = zip(self.calls.turns, self.calls.turns[1:], strict=False)
        wholes = [([*a.prompt_ids, *a.completion.token_ids], b) for a, b in pairs]
        return [
            list(b.prompt_ids[: len(whole)]) == whole and b.parent == number
            for number, (whole, b) in enumerate(wholes)
        ]


@asynccontextmanager
async def opened(
    *replies: str,
    server: EndpointServer | None = None,
    seats: Sequence[str] = (),
    max_turns: int = 9,
    stop: Sequence[str] = (),
    **config: Any,
) -> AsyncIterator[Open]:
    """A rollout on this server, or on one of its own."""
    if server is None:
        found = EndpointServer(EndpointConfig(**config), TOKENIZER.decode)
        async with found.serving(), opened(*replies, server=found, seats=seats) as rollout:
            yield rollout
        return
    script = Script(*replies)
    calls = Calls(CHAT, script, max_turns, None, stop=stop)
    async with server.open(calls, seats) as endpoint:
        yield Open(endpoint, calls, script, server)


async def call(method: Callable[..., Any], *args: Any, **arguments: Any) -> Any:
    """The result of a call of an SDK; one of a sync client runs in a thread."""
    if inspect.iscoroutinefunction(inspect.unwrap(method)):
        return await method(*args, **arguments)
    return await asyncio.to_thread(method, *args, **arguments)


async def streamed(manager: Any, final: str) -> Any:
    """What the SDK accumulates from a stream."""
    if not hasattr(manager, "__aenter__"):
        return await asyncio.to_thread(_streamed, manager, final)
    async with manager as stream:
        async for _ in stream:
            pass
        return await getattr(stream, final)()


def _streamed(manager: Any, final: str) -> Any:
    with manager as stream:
        for _ in stream:
            pass
        return getattr(stream, final)()
