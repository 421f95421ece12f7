"""Messages to tokens and back, so that each turn's prompt extends the tokens of the last turn.

    prompt_ids of turn k+1 = prompt_ids of turn k + the sampled ids of turn k + what follows them

What follows (the end of the turn if the model didn't sample it, separators, the observation, the
start of the next turn) is the text after the reply in the template's rendering of the whole
conversation. Only that text is encoded. Invariants:

- A sampled token is never decoded and encoded again in a place where it is trained: it appears
  unchanged in the next prompt, or the next prompt doesn't extend this one.
- `observe` extends the prompt if the rendering with the reply and the observation begins with the
  rendering that was sampled from and continues with the reply. The reply's ends may be trimmed and
  its tool calls written in the template's way. Otherwise the template rewrites history, for example
  by dropping past reasoning, and the whole conversation is rendered and encoded anew. Batching
  then starts a new sample.
- If `observe` raises, the conversation is unchanged.

With `chat: none` there is no template: texts are concatenated, after the tokens that the tokenizer
puts before every text (BOS).
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
"""Size of the cache of tokenized openings, about 40 MB: each prompt recurs every epoch."""


class Chat:
    """Converts a run's messages to token ids; makes a Conversation for each rollout.

    `template` is `auto` (the tokenizer's own), `none` (for a base model: concatenate texts) or the
    source of a Jinja template. `arguments` are the template's variables, such as enable_thinking.
    Raises ConfigError if there is no template or it can't render a user message.
    """

    stop_token_ids: tuple[int, ...]
    """The tokens that end a turn: eos and, if it differs, the template's end-of-turn token."""

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
        self._openings: OrderedDict[object, _Opening] = OrderedDict()
        self._cached = 0  # tokens of the openings

    def begin(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> Conversation:
        """Start a conversation with `messages`; equal openings are tokenized once.

        Raises TypeError or ValueError if an argument is not a list of messages or tools, and
        UserCodeError if the template rejects or ignores the messages.
        """
        checked = checked_messages(messages, "first messages")
        if not checked:
            raise ValueError("got no messages, expected at least one to start a rollout")
        key = (tuple([tuple(m.items()) for m in checked]), repr(tools) if tools else "")
        try:
            opening = self._openings.pop(key, None)
        except TypeError:  # unhashable: a message has tool calls
            return Conversation(self, self._open(checked, tools), checked)
        if opening is None:
            opening = self._open(checked, tools)
            self._cached += len(opening.prompt_ids)
        self._openings[key] = opening  # the most recently used one is the last
        while self._cached > _CACHED_TOKENS:
            self._cached -= len(self._openings.popitem(last=False)[1].prompt_ids)
        return Conversation(self, opening, checked)

    def _open(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> _Opening:
        check_tools(tools)
        shown = tuple(tool.as_template() for tool in tools)
        text = self.template.render(messages, shown)
        self.template.require_heard(messages, text, shown)
        shows_calls = bool(tools) and self.template.shows_tools and self.template.shows_calls
        prompt_ids = self.tokens.start + self.tokens.encode(text)
        if not prompt_ids:
            raise ValueError("got empty messages, expected at least one token to start a rollout")
        return _Opening(text, prompt_ids, tuple(tools), shown, shows_calls)


class Conversation:
    """One rollout's history and the ids to sample from; made by `Chat.begin`."""

    __slots__ = ("_calls", "_chat", "_completion", "_opening", "_said", "_text", "messages",
                 "prompt_ids")  # fmt: skip

    messages: list[Message]
    """The whole history: opening, replies and observations."""
    prompt_ids: list[int]
    """The prompt of the next reply; `observe` replaces the list and never changes it in place."""

    def __init__(self, chat: Chat, opening: _Opening, messages: list[Message]) -> None:
        self._chat = chat
        self._opening = opening
        self.messages = messages
        self.prompt_ids = opening.prompt_ids
        self._text = opening.text  # the rendering of the messages before the reply
        self._completion: Completion | None = None
        self._said = ""
        self._calls = 0

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools offered to the model, in the structure that chat templates expect."""
        return self._opening.shown

    def fork(self) -> Conversation:
        """An independent copy that shares what has been tokenized."""
        copy = Conversation(self._chat, self._opening, self.messages.copy())
        copy.prompt_ids, copy._text = self.prompt_ids, self._text
        copy._completion, copy._said, copy._calls = self._completion, self._said, self._calls
        return copy

    @property
    def opens_reasoning(self) -> bool:
        """Whether the prompt ends with the start of reasoning."""
        return not self._chat.template.joins and bool(reasoning_opener(self._text))

    @property
    def said(self) -> str:
        """The text of the last reply, with its tool calls."""
        return self._said

    def reply(self, completion: Completion, first_call: int | None = None) -> Action:
        """Add the model's turn; if there are tools, parse the tool calls.

        The calls are numbered from `first_call`, by default across the conversation.

        The Action's text is what was sampled. The message in the history also includes the start
        of reasoning with which the prompt ended, since templates look for it.

        Raises RuntimeError if `observe` has not answered the last reply.
        """
        if self._completion is not None:
            raise RuntimeError("reply() was called twice; call observe() after each reply")
        tools, template = self._opening.tools, self._chat.template
        self._completion = completion
        self._said = said = self._chat.tokens.text_of(completion, bool(tools))
        opener = reasoning_opener(self._text)
        message = template.reply_message(said, opener)
        if not tools:
            self.messages.append(message)
            return Action(said, (), completion.token_ids, completion.stop_reason)
        first = self._calls if first_call is None else first_call
        reply = parse_reply(said, tools, first=first, reasoning=bool(opener))
        self._calls += len(reply.calls)
        # A call that the template can't show as a call stays in the text.
        if reply.calls and reply.readable and self._opening.shows_calls:
            message = template.reply_message(reply.text, opener)
            message["tool_calls"] = [as_template(call) for call in reply.calls]
        self.messages.append(message)
        ids, stopped = completion.token_ids, completion.stop_reason
        return Action(reply.text, reply.calls, ids, stopped, reply.readable)

    def ended_by(self, completion: Completion) -> list[Message]:
        """The whole history with a last reply; the conversation itself is unchanged."""
        if self._opening.tools:
            ended = self.fork()
            ended.reply(completion)
            return ended.messages
        said = self._chat.tokens.text_of(completion, calls=False)
        message = self._chat.template.reply_message(said, reasoning_opener(self._text))
        return [*self.messages, message]

    def spell(self, message: Message) -> list[int]:
        """The ids of a given (not sampled) reply, including the end of its turn.

        They are what the template writes after `prompt_ids`. If that is no extension (the template
        removes reasoning), they are the message's text.
        Raises UserCodeError if the template rejects the message or ignores its tool calls.
        """
        chat, shown = self._chat, self._opening.shown
        if message.get("tool_calls") and not chat.template.shows_calls:
            raise UserCodeError(
                "the chat template ignores tool_calls, so the model would not learn them; write "
                "the call into the message's content, as the model should say it"
            )
        text = chat.template.render([*self.messages, message], shown, generation=False)
        if text.startswith(self._text):
            return chat.tokens.encode_reply(text[len(self._text) :])
        opener = reasoning_opener(self._text)
        return chat.tokens.encode_reply(message["content"].removeprefix(opener))

    def observe(self, observation: Sequence[Message]) -> None:
        """Append the environment's answer and compute the next `prompt_ids`.

        Raises TypeError or ValueError if `observation` is not a list of messages, UserCodeError if
        the template rejects or ignores them, and RuntimeError if there is no reply to answer.
        """
        completion, chat, shown = self._completion, self._chat, self._opening.shown
        if completion is None:
            raise RuntimeError("there is no reply to answer; call reply() before observe()")
        added = checked_messages(observation, "observation")
        if any(message["role"] == "assistant" for message in added):
            raise ValueError("observation: got the role 'assistant', which is the model's own")
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
        """The ids that follow the sampled ones; None if `text` doesn't extend the conversation."""
        if not text.startswith(self._text):
            return None
        rest = after_reply(text[len(self._text) :], self._said)
        if rest is None and "tool_calls" in self.messages[-1]:
            rest = self._after_calls(text, added)
        return None if rest is None else self._chat.tokens.encode_after(sampled, rest)

    def _after_calls(self, text: str, added: Sequence[Message]) -> str | None:
        """What follows a reply whose tool calls the template writes in its own way.

        The rendering with the model's own text in place of the calls shows where the reply ends.
        The real rendering must have the same end and the same text beside the calls, so that only
        the spelling of the calls differs.
        """
        opener = reasoning_opener(self._text)
        in_own_words = self._chat.template.reply_message(self._said, opener)
        try:
            plain = self._chat.template.render(
                [*self.messages[:-1], in_own_words, *added], self._opening.shown
            )
        except UserCodeError:  # this template requires a call before a tool's answer
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
    """What all rollouts of a prompt share."""

    text: str
    prompt_ids: list[int]
    tools: tuple[ToolSpec, ...]
    shown: tuple[Mapping[str, Any], ...]  # the tools in the template's form
    shows_calls: bool


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
        raise ValueError(f"{what}: got role {shown(role)}, expected user, tool or system")
    if content is None and message.get("tool_calls"):  # recorded calls often have no text
        content = ""
    if content is None:
        raise ValueError(f'{what} has no content; write "" for an empty one')
    if not isinstance(content, str):
        raise TypeError(f"{what}: got content {shown(content)}, expected a string")
    return cast(Message, {**message, "role": role, "content": content})
