"""Messages to tokens and back, so that each turn's prompt extends the last one's tokens.

    prompt_ids of turn k+1 = prompt_ids of turn k + the sampled ids of turn k + what follows them

What follows (the turn's end if the model didn't sample it, separators, the observation, the start
of the next turn) is read off the template's rendering of the whole conversation, as the text after
the reply, and only that text is encoded. Invariants:

- a sampled token is never decoded and encoded again into a place where it would be trained: it
  stands in the next prompt verbatim, or the next prompt is no extension of this one;
- `observe` extends exactly when the rendering with the reply and the observation begins with the
  rendering that was sampled from and goes on with the reply (its ends may be trimmed, its tool
  calls written in the template's way). Otherwise the template rewrites history, say by dropping
  past reasoning, and the whole conversation is rendered and encoded anew: batching sees that the
  prompt extends nothing and starts a new sample;
- a conversation that raises in `observe` is as it was before.

With `chat: none` there is no template: texts are joined without separators, after whatever the
tokenizer puts at the start of every text (BOS).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from retrain.chat.template import Template, after_reply, reasoning_opener
from retrain.chat.tokens import TurnTokens
from retrain.chat.tools import as_template, check_tools, parse_reply
from retrain.environment import Action, ToolSpec
from retrain.errors import UserCodeError, shown
from retrain.sampler import Tokenizer
from retrain.types import Completion, Message

_CACHED_TOKENS: Final = 1_000_000
"""Openings are kept up to this many tokens, some 40 MB: a prompt recurs each epoch."""


class Chat:
    """A run's way from messages to token ids; makes a Conversation for each rollout.

    `template` is `auto` (the tokenizer's own), `none` (a base model: texts are joined as they are)
    or the text of a Jinja template; `arguments` are its variables, such as enable_thinking.
    Raises ConfigError when there is no template, or it can't render a user's message.
    """

    stop_token_ids: tuple[int, ...]
    """The tokens that end a turn: eos, and the template's end-of-turn token where it differs."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str = "auto",
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self.template = Template(tokenizer, template, arguments)
        self.tokens = TurnTokens(tokenizer, self.template)
        self.stop_token_ids = self.tokens.stops
        self._openings = _Openings()

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Conversation:
        """A conversation that starts with `messages`; equal openings are tokenised once.

        Raises TypeError or ValueError for what is no list of messages or of tools, UserCodeError
        for messages that the template refuses or ignores.
        """
        checked = _checked(messages, "the messages that a rollout starts with")
        if not checked:
            raise ValueError("a rollout must start with at least one message, got []")
        key = (tuple([tuple(m.items()) for m in checked]), repr(tools) if tools else "")
        try:
            opening = self._openings.get(key)
        except TypeError:  # unhashable: a message that carries tool calls
            return Conversation(self, self._open(checked, tools), checked)
        if opening is None:
            opening = self._open(checked, tools)
            self._openings.put(key, opening)
        return Conversation(self, opening, checked)

    def _open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> _Opening:
        check_tools(tools)
        shown = tuple(tool.as_template() for tool in tools)
        text = self.template.render(messages, shown)
        self.template.require_heard(messages, text, shown)
        shows_calls = bool(tools) and self.template.shows_tools and self.template.shows_calls
        prompt_ids = self.tokens.start + self.tokens.encode(text)
        if not prompt_ids:
            raise ValueError("a rollout must start with at least one token, got empty messages")
        return _Opening(text, prompt_ids, tuple(tools), shown, shows_calls)


class Conversation:
    """One rollout's history, and the ids to sample from; made by `Chat.begin`."""

    __slots__ = ("_calls", "_chat", "_completion", "_opening", "_said", "_text", "messages",
                 "prompt_ids")  # fmt: skip

    messages: list[Message]
    """The whole history: opening, replies, observations."""
    prompt_ids: list[int]
    """What to sample the next reply from; replaced by `observe`, never changed in place."""

    def __init__(self, chat: Chat, opening: _Opening, messages: list[Message]) -> None:
        self._chat = chat
        self._opening = opening
        self.messages = messages
        self.prompt_ids = opening.prompt_ids
        self._text = opening.text  # what the template makes of the messages before the reply
        self._completion: Completion | None = None
        self._said = ""
        self._calls = 0

    def fork(self) -> Conversation:
        """A copy that goes its own way and shares what has been tokenised."""
        copy = Conversation(self._chat, self._opening, self.messages.copy())
        copy.prompt_ids, copy._text = self.prompt_ids, self._text
        copy._completion, copy._said, copy._calls = self._completion, self._said, self._calls
        return copy

    def reply(self, completion: Completion) -> Action:
        """Take the model's turn down; tool calls are parsed when tools are offered.

        The Action's text is what was sampled; the message in the history also holds the start of
        reasoning that the prompt ended with, since templates look for it.

        Raises RuntimeError when the last reply has not been observed.
        """
        if self._completion is not None:
            raise RuntimeError("reply() was called twice: the environment's observe() comes first")
        tools, template = self._opening.tools, self._chat.template
        self._completion = completion
        self._said = said = self._chat.tokens.text_of(completion, bool(tools))
        opener = reasoning_opener(self._text)
        message = template.reply_message(said, opener)
        if not tools:
            self.messages.append(message)
            return Action(said, (), completion.token_ids, completion.stop_reason)
        reply = parse_reply(said, tools, first=self._calls, reasoning=bool(opener))
        self._calls += len(reply.calls)
        # A call that can't be shown as a call stays in the text, where the model put it.
        if reply.calls and reply.readable and self._opening.shows_calls:
            message = template.reply_message(reply.text, opener)
            message["tool_calls"] = [as_template(call) for call in reply.calls]
        self.messages.append(message)
        return Action(reply.text, reply.calls, completion.token_ids, completion.stop_reason)

    def spell(self, message: Message) -> list[int]:
        """The ids of a reply that is given instead of sampled, its turn's end included.

        They are what the template writes for it after `prompt_ids`; where that is no extension (a
        template that takes reasoning out), the message's text as the model would have said it.
        Raises UserCodeError when the template refuses the message or ignores its tool calls.
        """
        chat, shown = self._chat, self._opening.shown
        if message.get("tool_calls") and not chat.template.shows_calls:
            raise UserCodeError(
                "the chat template doesn't write tool_calls, so that nothing would be learnt of "
                "them: write the call into the message's content, as the model is to say it"
            )
        text = chat.template.render([*self.messages, message], shown, generation=False)
        if text.startswith(self._text):
            return chat.tokens.encode_reply(text[len(self._text) :])
        opener = reasoning_opener(self._text)
        return chat.tokens.encode_reply(message["content"].removeprefix(opener))

    def observe(self, observation: Sequence[Message]) -> None:
        """Append the environment's answer and compute the next `prompt_ids`.

        Raises TypeError or ValueError for what is no list of messages, UserCodeError for messages
        that the template refuses or ignores, RuntimeError when there is no reply to answer.
        """
        completion, chat, shown = self._completion, self._chat, self._opening.shown
        if completion is None:
            raise RuntimeError("observe() answers a reply: call reply() first")
        added = _checked(observation, "an observation")
        if any(message["role"] == "assistant" for message in added):
            raise ValueError("an observation can't have the role 'assistant': the model speaks it")
        messages = [*self.messages, *added]
        text = chat.template.render(messages, shown)
        chat.template.require_heard(messages, text, shown)
        following = self._following(completion.token_ids, text, added)
        if following is None:
            prompt_ids = chat.tokens.start + chat.tokens.encode(text)
        else:
            prompt_ids = [*self.prompt_ids, *completion.token_ids, *following]
        self.messages, self.prompt_ids, self._text = messages, prompt_ids, text
        self._completion = None

    def _following(
        self, sampled: Sequence[int], text: str, added: Sequence[Message]
    ) -> list[int] | None:
        """The ids to put after the sampled ones; None when `text` doesn't extend what was said."""
        if not text.startswith(self._text):
            return None
        rest = after_reply(text[len(self._text) :], self._said)
        if rest is None and "tool_calls" in self.messages[-1]:
            rest = self._after_calls(text, added)
        return None if rest is None else self._chat.tokens.encode_after(sampled, rest)

    def _after_calls(self, text: str, added: Sequence[Message]) -> str | None:
        """What follows a reply whose tool calls the template writes in its own way.

        With the model's own words in the calls' place the reply is found; the true rendering has
        to end alike and to show the text beside the calls, so that only their spelling differs.
        """
        opener = reasoning_opener(self._text)
        in_own_words = self._chat.template.reply_message(self._said, opener)
        try:
            plain = self._chat.template.render(
                [*self.messages[:-1], in_own_words, *added], self._opening.shown
            )
        except UserCodeError:  # a tool's answer must follow a call, to this template
            return None
        if not plain.startswith(self._text):
            return None
        rest = after_reply(plain[len(self._text) :], self._said)
        if rest is None or not text.endswith(rest):
            return None
        turn = text[len(self._text) - len(opener) : len(text) - len(rest)]
        return rest if self.messages[-1]["content"].strip() in turn else None


@dataclass(frozen=True, slots=True)
class _Opening:
    """What rollouts of one prompt share."""

    text: str
    prompt_ids: list[int]
    tools: tuple[ToolSpec, ...]
    shown: tuple[Mapping[str, Any], ...]  # the tools in the template's form
    shows_calls: bool


class _Openings:
    """The openings used last, `_CACHED_TOKENS` tokens of them at most."""

    def __init__(self) -> None:
        self._kept: OrderedDict[object, _Opening] = OrderedDict()
        self._tokens = 0

    def get(self, key: object) -> _Opening | None:
        opening = self._kept.get(key)
        if opening is not None:
            self._kept.move_to_end(key)
        return opening

    def put(self, key: object, opening: _Opening) -> None:
        self._kept[key] = opening
        self._tokens += len(opening.prompt_ids)
        while self._tokens > _CACHED_TOKENS:
            self._tokens -= len(self._kept.popitem(last=False)[1].prompt_ids)


def _checked(messages: object, what: str) -> list[Message]:
    """A copy of what a user's code gave for a list of messages.

    Raises TypeError or ValueError that says what was got.
    """
    if not isinstance(messages, list | tuple):
        hint = ""
        if isinstance(messages, str):
            hint = f'; write [{{"role": "user", "content": {shown(messages)}}}]'
        elif isinstance(messages, Mapping):
            hint = "; put the message into a list"
        raise TypeError(f"{what} must be a list of messages, got {shown(messages)}{hint}")
    return [_checked_message(message, f"{what}: message {i}") for i, message in enumerate(messages)]


def _checked_message(message: object, what: str) -> Message:
    if not isinstance(message, Mapping):
        wanted = '{"role": ..., "content": ...}'
        raise TypeError(f"{what} must be a dict {wanted}, got {shown(message)}")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ValueError(f"{what} needs a role (user, tool, system), got {shown(role)}")
    if content is None and message.get("tool_calls"):  # recorded calls often have no text
        content = ""
    if content is None:
        raise ValueError(f'{what} needs a content; write "" for an empty one')
    if not isinstance(content, str):
        raise TypeError(f"{what} must have text as its content, got {shown(content)}")
    return cast(Message, {**message, "role": role, "content": content})
