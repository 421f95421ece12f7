"""Random agents that call `Calls`, and samplers that remember what they sampled."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from conversation_kit import user

from retrain.agents.calls import Calls, Reply
from retrain.algorithms.batching import segments
from retrain.environment import ToolSpec
from retrain.types import Completion, Message, Prompt, Trajectory

ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {}, "b": {}}})
SUB = ToolSpec("sub", "Subtract.", {"type": "object", "properties": {"a": {}}})
SAYINGS = [
    "4", " 4\n", "", "<think>\nHm\n</think>\n\n4", "Hm\n</think>\n\n4", "<think>\nHm",
    '<tool_call>\n{"name": "add", "arguments": {"b": 2.0, "a": [1, true]}}\n</tool_call>',
    'So: <tool_call>{"name":"add","arguments":{}}</tool_call><tool_call>{"name":"sub"}</tool_call>',
    "<tool_call>{oops}</tool_call>", "4<tool_call>",
]  # fmt: skip


class Scripted:
    """A sampler that says what `say` returns, with a log-prob of its own for each token.

    With `gate`, calls wait for it.
    """

    def __init__(self, say: Callable[[], Sequence[int]], decode: Callable[..., str]) -> None:
        self.say, self.decode = say, decode
        self.given: list[tuple[list[int], Completion]] = []
        """What was asked and answered."""
        self.keys: list[str] = []
        self.gate: asyncio.Event | None = None
        self.waiting = asyncio.Semaphore(0)
        """Released by each call that waits for the gate."""
        self.error: BaseException | None = None

    async def __call__(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        self.keys.append(key)
        for _ in range(len(key) % 3):  # calls end in another order than they begin
            await asyncio.sleep(0)
        if self.gate is not None:
            self.waiting.release()
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        said = []
        for _ in range(n):
            ids = list(self.say())
            logprobs = [-1 - len(self.given) - i / 4096 for i in range(len(ids))]
            text = self.decode(ids, skip_special_tokens=True)
            said.append(Completion(ids, logprobs, text, "stop", len(self.given) % 3))
            self.given.append((list(prompt_ids), said[-1]))
        return said


def given_back(reply: Reply, form: int) -> Message:
    """A reply as an agent gives it back: each bit of `form` changes its form."""
    text = reply.text
    message: Message = {"role": "assistant", "content": text.strip() if form & 1 else text}
    if reply.reasoning and form & 2:
        message["reasoning_content"] = reply.reasoning
    elif reply.reasoning and form & 4:
        message["content"] = f"<think>{reply.reasoning}</think>{message['content']}"
    if reply.tool_calls:
        message["tool_calls"] = [
            {
                "type": "function",
                "id": f"mine{call.id}" if form & 8 else call.id,
                "function": {"arguments": _reordered(dict(call.arguments)), "name": call.name},
            }
            for call in reply.tool_calls
        ]
    return message


def _reordered(value: Any) -> Any:
    """The same JSON value, with its keys in another order and whole floats as integers."""
    if isinstance(value, dict):
        return {key: _reordered(value[key]) for key in reversed(value)}
    if isinstance(value, list):
        return [_reordered(one) for one in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass
class Known:
    """A history that ends with a reply, as the agent holds it."""

    messages: list[Message]
    reply: Reply
    tools: tuple[ToolSpec, ...]


@dataclass
class Agent:
    """Plays a random program of calls; `expected` are the turns that must continue others."""

    calls: Calls
    random: Random
    tools: tuple[ToolSpec, ...]
    known: list[Known] = field(default_factory=list)
    texts: list[tuple[str | list[int], Reply]] = field(default_factory=list)
    asked: list[tuple[list[Message], tuple[ToolSpec, ...]]] = field(default_factory=list)
    expected: list[tuple[int, Reply]] = field(default_factory=list)
    said: dict[int, Reply] = field(default_factory=dict)

    async def play(self, moves: Sequence[str]) -> None:
        for move in moves:
            await getattr(self, move)()

    async def begin(self) -> None:
        opening = [user(self.random.choice(["Hi", "Hi", "What?"]))]
        if self.random.random() < 0.5:
            opening.insert(0, {"role": "system", "content": "Be short."})
        await self._ask(opening, self.tools)

    async def extend(self) -> None:
        if not self.known:
            return await self.begin()
        return await self._extend(self.random.choice(self.known))

    async def edit(self) -> None:
        """Change, drop or repeat a message, or the tools, and go on."""
        if not self.known:
            return
        known = self.random.choice(self.known)
        messages = json.loads(json.dumps(known.messages))
        index, how = self.random.randrange(len(messages)), self.random.randrange(5)
        if how == 0:
            messages[index]["content"] += "!"
        elif how == 1 and len(messages) > 1:
            del messages[index]
        elif how == 2:
            messages.insert(index, dict(messages[index]))
        elif how == 3:
            messages[index]["reasoning_content"] = "other thoughts"
        tools = (ADD, SUB) if how == 4 and known.tools else known.tools
        await self._ask([*messages, user("Go on.")], tools)

    async def retry(self) -> None:
        if self.asked:
            await self._ask(*self.random.choice(self.asked))

    async def parallel(self) -> None:
        moves = [self.random.choice([self.begin, self.extend, self.retry, self.text])
                 for _ in range(self.random.randint(2, 4))]  # fmt: skip
        await asyncio.gather(*[move() for move in moves])

    async def disconnect(self) -> None:
        """Leave during a call, and maybe call again."""
        call = asyncio.ensure_future(self.random.choice([self.begin, self.extend, self.text])())
        for _ in range(self.random.randint(1, 4)):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])

    async def text(self) -> None:
        """Complete a string or ids, new ones or what follows an earlier completion."""
        prompt: str | list[int] = self.random.choice(["Once", [5, 6, 7]])
        if self.texts and self.random.random() < 0.7:
            before, reply = self.random.choice(self.texts)
            if isinstance(before, str):
                prompt = before + reply.text + self.random.choice(["", " and", "\n"])
            else:
                prompt = [*before, *reply.completion.token_ids, *([9] * self.random.randint(0, 2))]
        for reply in await self.calls.complete(prompt, n=self.random.choice([1, 1, 2])):
            self.texts.append((prompt, reply))
            self.said[reply.turn] = reply

    async def _extend(self, known: Known) -> None:
        last, more = known.messages[-1], [user(self.random.choice(["And?", "Why?"]))]
        if "tool_calls" in last:
            more = [
                {"role": "tool", "content": "7", "tool_call_id": call["id"]}
                for call in last["tool_calls"]
            ]
        replies = await self._ask([*known.messages, *more], known.tools)
        self.expected += [(reply.turn, known.reply) for reply in replies]

    async def _ask(self, messages: list[Message], tools: tuple[ToolSpec, ...]) -> list[Reply]:
        self.asked.append((messages, tools))
        sent = json.loads(json.dumps(messages))
        replies = await self.calls.chat(sent, tools, n=self.random.choice([1, 1, 1, 2]))
        for reply in replies:
            said = given_back(reply, self.random.getrandbits(4))
            self.said[reply.turn] = reply
            self.known.append(Known([*messages, said], reply, tools))
        return replies


def trained(calls: Calls) -> Counter[tuple[Any, ...]]:
    """Each trained token with what it follows, its log-prob and its version."""
    samples = segments(Trajectory(Prompt("0.0.0", ()), calls.turns), 1.0, "r")
    return Counter(
        (tuple(s.token_ids[:i]), s.token_ids[i], s.logprobs[i], s.versions[i])
        for s in samples
        for i, kept in enumerate(s.loss_mask)
        if kept
    )


def sampled(given: Sequence[tuple[list[int], Completion]]) -> Counter[tuple[Any, ...]]:
    """The same for what a sampler returned."""
    return Counter(
        ((*prompt, *c.token_ids[:i]), c.token_ids[i], c.logprobs[i], c.version)
        for prompt, c in given
        for i in range(len(c.token_ids))
    )
