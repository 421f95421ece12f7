"""The calls of an agent in one rollout, and which earlier call each one continues.

A chat API gets the whole history with each call. If it begins with the history of an earlier call
and its reply (`histories`), the new prompt continues that call's conversation and so its tokens.
Every other history is rendered and encoded anew. So the calls of a rollout are a tree: an edited or
compacted history, a sub-agent with its own system prompt, parallel calls and `n > 1` are branches.
Batching makes a sample of each branch and trains what the branches share once
(`retrain.algorithms.batching.segments`).

A call that is cancelled, because its client left or the rollout is over, leaves no turn and uses
nothing of the budget.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any, TypeVar

from retrain.agents.histories import Histories, Key, Said, Texts, renamed
from retrain.chat import Chat, Conversation
from retrain.chat.tools import as_template
from retrain.environment import ToolCall, ToolSpec
from retrain.errors import RetrainError, text_of
from retrain.sampler import PARTIAL, SamplingParams, hash_of
from retrain.types import Completion, Message, Turn

T = TypeVar("T")
NOTHING: Mapping[Any, Any] = {}
OVER = "the rollout of this API key is over"
FAILED = "the run is ending: its sampler failed"


class CallError(Exception):
    """Why a call gets no reply: `status` as in HTTP, `code` as in OpenAI's API."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class Reply:
    """One choice of an answer."""

    turn: int
    """Its number in the rollout, from 0."""
    text: str
    """The answer without reasoning and tool calls."""
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    completion: Completion
    prompt_tokens: int
    stop: str = ""
    """The stop string that ended it, which is not part of `text`."""

    @property
    def message(self) -> Message:
        """What a history that continues it contains."""
        message = Message(role="assistant", content=self.text)
        if self.tool_calls:
            message["tool_calls"] = [as_template(call) for call in self.tool_calls]
        return message


def fitted(
    params: SamplingParams, prompt_ids: Sequence[int], limit: int, options: Mapping[str, Any]
) -> SamplingParams:
    """`params` with `options`, and no more tokens than `limit` leaves after the prompt.

    Raises CallError if it leaves none.
    """
    room = limit - len(prompt_ids)
    if room < 1:
        raise CallError(
            400,
            "context_length_exceeded",
            f"the prompt has {len(prompt_ids)} tokens, expected fewer than {limit}",
        )
    wanted = options.get("max_tokens", params.max_tokens)
    return replace(params, **{**options, "max_tokens": min(wanted, room)})


SampleCall = Callable[
    [list[int], int, str, Mapping[str, Any]], Coroutine[Any, Any, list[Completion]]
]
"""Samples for a prompt `n` completions with options; the same key, a string, gets the same seed.
Raises CallError if the prompt leaves no room for a token, and what the sampler raises."""


class Calls:
    """The calls of one rollout; made when it starts, closed when it ends."""

    def __init__(
        self,
        chat: Chat,
        sample: SampleCall,
        max_turns: int,
        max_tokens: int | None,
        first_call: int = 0,
        stop: Sequence[str] = (),
    ) -> None:
        """A call that would exceed `max_turns`, or begins after `max_tokens`, gets status 429.

        The ids of tool calls are numbered from `first_call`. `stop` are the stop strings of calls
        that have none: a reply's text ends before them, while its turn keeps all sampled tokens.
        """
        self._chat, self._sample, self._stop = chat, sample, tuple(stop)
        self._max_turns, self._max_tokens = max_turns, max_tokens
        self.turns: list[Turn] = []
        self.histories: dict[str, tuple[Sequence[Message], Sequence[Mapping[str, Any]]]] = {}
        """The conversation of each seat's last reply, and its tools."""
        self.truncated = ""
        """The limit that a call met: `max_turns`, `max_tokens` or `context`."""
        self.rewarded = 0.0
        """The reward that was posted for the whole rollout."""
        self.failure: BaseException | None = None
        """What the sampler raised: the run ends with it."""
        self.closed = False
        self._histories = Histories()
        self._texts = Texts(chat.tokens)
        self._numbers: dict[tuple[str, str], set[int]] = {}
        """The calls of each prompt, which get different seeds."""
        self._under_way: set[asyncio.Task[Any]] = set()
        self._reserved, self._call_ids = 0, first_call

    async def chat(
        self,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...] = (),
        n: int = 1,
        seat: str = "",
        options: Mapping[str, Any] = NOTHING,
        continues: bool = False,
    ) -> list[Reply]:
        """`n` replies to a history; raises CallError.

        `options` are fields of SamplingParams to use instead of the run's, and `watch`, a
        `live.Live`. With `continues`, which a run doesn't use, the replies continue the last
        message.
        """
        self._admit(n)
        place, found, asked, conversation = self._conversation(messages, tools, seat, continues)
        self._watch(options, conversation.so_far)
        completions = await self._sampled(conversation.prompt_ids, n, seat, options)
        parent, before = (None, NOTHING) if found is None else (found.turn, found.thoughts)
        replies = []
        for completion in completions:
            said = conversation.fork()
            action = said.reply(completion, first_call=self._call_ids)
            self._call_ids += len(action.tool_calls)
            # A reply with a malformed call is only text.
            text = action.text if action.readable else said.answer
            calls = action.tool_calls if action.readable else ()
            text, stop = self._before_stop(completion, text, options)
            number, given = len(self.turns), len(conversation.prompt_ids)
            reply = Reply(number, text, action.reasoning, calls, completion, given, stop)
            added = (*asked, said.messages[-1])
            self.turns.append(said.turn(seat=seat, parent=parent, messages=added))
            thoughts = before
            if reply.reasoning:
                thoughts = {**before, len(messages): reply.reasoning}
            self._histories.add(place, reply.message, Said(reply.turn, said, thoughts))
            self.histories[seat] = said.messages, said.tools
            replies.append(reply)
        return replies

    def count(
        self, messages: Sequence[Message], tools: tuple[ToolSpec, ...] = (), seat: str = ""
    ) -> int:
        """How many tokens the prompt of a call has; raises CallError."""
        *_, conversation = self._conversation(messages, tools, seat)
        return len(conversation.prompt_ids)

    async def complete(
        self,
        prompt: str | Sequence[int],
        n: int = 1,
        seat: str = "",
        options: Mapping[str, Any] = NOTHING,
    ) -> list[Reply]:
        """The continuations of a string or of token ids, without a chat template.

        A prompt that begins with an earlier prompt of the seat and its continuation continues it.
        Raises CallError.
        """
        self._admit(n)
        try:
            parent, prompt_ids, asked, text = self._texts.find(seat, prompt, self.turns)
        except ValueError as error:
            raise CallError(400, "invalid_request_error", f"prompt: {error}") from error
        if not prompt_ids:
            raise CallError(400, "invalid_request_error", "prompt: got an empty prompt")
        self._watch(options, self._chat.tokens.text)
        completions = await self._sampled(prompt_ids, n, seat, options)
        replies = []
        for completion in completions:
            number = len(self.turns)
            message = Message(role="assistant", content=completion.text)
            new = Message(role="user", content=asked)
            turn = Turn(prompt_ids, completion, parent=parent, seat=seat, messages=(new, message))
            self.turns.append(turn)
            self._texts.add(seat, text, completion.text, number)
            self.histories[seat] = [Message(role="user", content=text), message], ()
            shown, stop = self._before_stop(completion, completion.text, options)
            replies.append(Reply(number, shown, "", (), completion, len(prompt_ids), stop))
        return replies

    def reward(self, value: float, turn: int | None = None) -> None:
        """Add to the reward of a turn, or of the whole rollout if `turn` is None.

        Raises CallError if there is no such turn, or the rollout is over.
        """
        if self.closed:
            raise CallError(401, "invalid_api_key", OVER)
        if turn is None:
            self.rewarded += value
            return
        if not 0 <= turn < len(self.turns):
            raise CallError(404, "not_found", f"this rollout has no completion {turn}")
        self.turns[turn] = self.turns[turn]._replace(reward=self.turns[turn].reward + value)

    async def close(self) -> None:
        """The rollout is over: cancel the calls under way and refuse later ones."""
        self.closed = True
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    def _admit(self, n: int) -> None:
        """Raise CallError if `n` more turns can't begin."""
        if self.closed:
            raise CallError(401, "invalid_api_key", OVER)
        if self.failure is not None:
            raise CallError(503, "server_error", FAILED)
        if len(self.turns) + self._reserved + n > self._max_turns:
            self.truncated = "max_turns"
            raise CallError(
                429,
                "insufficient_quota",
                f"this rollout has used {len(self.turns) + self._reserved} of its "
                f"{self._max_turns} completions (rollout.max_turns)",
            )
        sampled = sum(len(turn.completion.token_ids) for turn in self.turns)
        if self._max_tokens is not None and sampled >= self._max_tokens:
            self.truncated = "max_tokens"
            raise CallError(
                429,
                "insufficient_quota",
                f"this rollout has sampled {sampled} tokens, its limit is {self._max_tokens} "
                "(rollout.max_tokens)",
            )

    def _conversation(
        self,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...],
        seat: str,
        continues: bool = False,
    ) -> tuple[int, Said | None, Sequence[Message], Conversation]:
        """The place of a history, what it continues and adds, and its conversation.

        Raises CallError if it can't be one.
        """
        try:
            opening: Key = (seat, json.dumps([t.as_template() for t in tools], sort_keys=True))
            place, last, found = self._histories.find(opening, messages)
            if found is None or continues:
                begun = self._chat.begin(messages, tools, continues=continues)
                return place, None, messages, begun
            conversation = found.conversation.fork()
            added = renamed(messages[last + 1 :], messages[last], conversation.messages[-1])
            conversation.observe(added)
        except (TypeError, ValueError, RecursionError, RetrainError) as error:
            raise CallError(400, "invalid_request_error", f"messages: {text_of(error)}") from error
        return place, found, added, conversation

    async def _sampled(
        self, prompt_ids: list[int], n: int, seat: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        """What the sampler returns; raises CallError."""
        # Parallel calls come in any order, so the seed depends on the prompt, not on the turn.
        hashed = hash_of(prompt_ids)
        taken = self._numbers.setdefault((seat, hashed), set())
        number = next(i for i in count() if i not in taken)
        taken.add(number)
        self._reserved += n
        key = f"{seat}/{hashed}/{number}"
        try:
            return await self._while_open(self._sample(prompt_ids, n, key, options))
        except BaseException as error:
            taken.discard(number)
            if isinstance(error, CallError) and error.code == "context_length_exceeded":
                self.truncated = "context"
            if isinstance(error, CallError) or not isinstance(error, Exception):
                raise
            self.failure = self.failure or error
            raise CallError(503, "server_error", FAILED) from error
        finally:
            self._reserved -= n

    async def _while_open(self, call: Coroutine[Any, Any, T]) -> T:
        """Await in a separate task, so that `close` and a lost connection can cancel it.

        Raises CallError if the rollout is over.
        """
        task = asyncio.ensure_future(call)
        self._under_way.add(task)
        try:
            result = await task
        except asyncio.CancelledError:
            task.cancel()
            if self.closed:
                raise CallError(401, "invalid_api_key", OVER) from None
            raise
        finally:
            self._under_way.discard(task)
        if self.closed:  # it was answered just when the rollout ended
            raise CallError(401, "invalid_api_key", OVER)
        return result

    def _before_stop(
        self, completion: Completion, text: str, options: Mapping[str, Any]
    ) -> tuple[str, str]:
        """The text before the stop string that ended a completion, and that string."""
        stops = options.get("stop", self._stop) if completion.stop_reason == "stop" else ()
        said = completion.text
        stop = min([one for one in stops if one in said], key=said.find, default="")
        return (text.partition(stop)[0], stop) if stop else (text, "")

    def _watch(self, options: Mapping[str, Any], spell: Callable[[Sequence[int]], str]) -> None:
        """Let what follows a call spell its replies, up to where a stop string may begin."""
        if (watch := options.get("watch")) is not None:
            starts = {
                stop[:i] for stop in options.get("stop", self._stop) for i in range(len(stop))
            }

            def spelled(token_ids: Sequence[int]) -> str:
                text = spell(token_ids).rstrip(PARTIAL)
                begun = max(map(len, filter(text.endswith, starts)), default=0)
                return text[: len(text) - begun]

            watch.spell = spelled
