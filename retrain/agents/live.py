"""Server-sent events while a reply is sampled: its text as far as later tokens can't change it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from retrain.agents.api import Request
from retrain.agents.calls import CallError, Reply
from retrain.agents.completions import Text
from retrain.agents.connections import event_of
from retrain.agents.openai import ChatCompletions, error_body


class Live:
    """Follows the replies to a call, as `options["watch"]`. Made on the event loop."""

    spell: Callable[[Sequence[int]], str]
    """The text of the first tokens of a reply, without what later tokens may change."""

    def __init__(self) -> None:
        self._loop, self._news = asyncio.get_running_loop(), asyncio.Event()
        self._drawn: dict[int, tuple[Sequence[int], int]] = {}
        self.sent: dict[int, str] = {}
        """The text of each choice that was streamed."""

    def drawn(self, index: int, token_ids: Sequence[int]) -> None:
        """A reply has these tokens, a list that grows; called on the sampler's thread."""
        self._drawn[index] = token_ids, len(token_ids)
        self._loop.call_soon_threadsafe(self._news.set)

    def end(self, _: object) -> None:
        self._news.set()

    async def news(self) -> None:
        """Wait for more tokens, or for the end."""
        await self._news.wait()
        self._news.clear()

    def more(self) -> list[tuple[int, str]]:
        """The text of each choice that is new and final."""
        found = []
        for index, (token_ids, count) in sorted(self._drawn.items()):
            text, sent = self.spell(token_ids[:count]), self.sent.get(index, "")
            if len(text) > len(sent) and text.startswith(sent):
                found.append((index, text[len(sent) :]))
        return found


class Stream(StreamingResponse):
    """The events of a call that is under way, and is cancelled if the client disconnects."""

    def __init__(
        self,
        api: ChatCompletions | Text,
        request: Request,
        head: dict[str, Any],
        live: Live,
        call: asyncio.Task[list[Reply]],
        finish: Callable[[Sequence[Reply]], dict[str, Any]],
    ) -> None:
        """`finish` makes the whole answer of the replies."""
        self._api, self._request, self._head = api, request, head
        self._live, self._call, self._finish = live, call, finish
        super().__init__(self._events(), media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._call.cancel()

    async def _events(self) -> AsyncIterator[str]:
        live, sent = self._live, self._live.sent
        while not self._call.done():
            for index, text in live.more():
                yield event_of(self._api.delta(self._head, index, text, index not in sent))
                sent[index] = sent.get(index, "") + text
            await live.news()
        try:
            answer = self._finish(await self._call)
        except CallError as error:
            yield event_of(("", error_body(error)))
            return
        answer["created"] = self._head["created"]
        for event in self._api.events(self._request, answer, sent):
            yield event_of(event)
