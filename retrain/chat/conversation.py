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

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from retrain.chat.formats.base import Format
from retrain.chat.formats.hermes import Hermes
from retrain.chat.messages import checked_messages
from retrain.chat.probing import formats, inferred, most_calls
from retrain.chat.reasoning import TAGS, reasoning_opener
from retrain.chat.template import Template, after_reply
from retrain.chat.tokens import TurnTokens
from retrain.chat.tools import ParsedReply, as_template, check_tools, parse_reply
from retrain.environment import Action, ToolSpec
from retrain.errors import ConfigError, UserCodeError
from retrain.sampler import Tokenizer
from retrain.types import Completion, Message, Turn

_CACHED_TOKENS: Final = 1_000_000
"""Size of the cache of tokenized openings, about 40 MB: each prompt recurs every epoch."""
_MARKUP: Final = re.compile(r"[<\[{]")
"""What the markup of reasoning and of tool calls begins with."""


class Chat:
    """Converts a run's messages to token ids; makes a Conversation for each rollout.

    `template` is `auto` (the tokenizer's own), `none` (for a base model: concatenate texts) or the
    source of a Jinja template. `arguments` are the template's variables, such as enable_thinking.
    `tools` is the format of tool calls; by default it is inferred from the template.
    Raises ConfigError if there is no template or it can't render a user message.
    """

    format: Format
    """How replies are read."""

    reads_calls: bool
    """Whether the format of tool calls is known."""

    stop_token_ids: tuple[int, ...]
    """The tokens that end a turn: eos and, if it differs, the template's end-of-turn token."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str = "auto",
        arguments: Mapping[str, Any] | None = None,
        tools: Format | None = None,
    ) -> None:
        self.template = Template(tokenizer, template, arguments)
        found = tools or (None if self.template.joins else inferred(self.template))
        if found is not None and found.in_system:
            self.template.form = found
        self.reads_calls = found is not None
        self.format = found or Hermes()  # for the reasoning
        self.tokens = TurnTokens(tokenizer, self.template, self.format)
        self.stop_token_ids = self.tokens.stops
        self._openings: OrderedDict[object, _Opening] = OrderedDict()
        self._cached = 0  # tokens of the openings

    @cached_property
    def most_calls(self) -> int:
        """How many tool calls of a reply the template shows in the format of the replies."""
        if self.template.form is not None:
            return 0
        return most_calls(self.template, self.format) if self.template.shows_tools else 0

    def begin(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
        *,
        given: bool = False,
        continues: bool = False,
    ) -> Conversation:
        """Start a conversation with `messages`; equal openings are tokenized once.

        `given` means that the replies are not sampled, so that no tool call has to be read. With
        `continues`, the reply continues the last message, which is the assistant's.
        Raises TypeError or ValueError if an argument is not a list of messages or tools,
        UserCodeError if the template rejects or ignores the messages, and ConfigError if there are
        tools, but the format of their calls is unknown.
        """
        if tools and not self.reads_calls and not given:
            raise ConfigError(self.problem_with_tools() + self.advice)
        checked = checked_messages(messages, "first messages")
        if not checked:
            raise ValueError("got no messages, expected at least one to start a rollout")
        if continues:
            return Conversation(self, self._open(checked, tools, continues=True), checked)
        return Conversation(self, self._cached_opening(checked, tools), checked)

    def _cached_opening(self, checked: Sequence[Message], tools: Sequence[ToolSpec]) -> _Opening:
        key = (tuple([tuple(m.items()) for m in checked]), repr(tools) if tools else "")
        try:
            opening = self._openings.pop(key, None)
        except TypeError:  # unhashable: a message has tool calls
            return self._open(checked, tools)
        if opening is None:
            opening = self._open(checked, tools)
            self._cached += len(opening.prompt_ids)
        self._openings[key] = opening  # the most recently used one is the last
        while self._cached > _CACHED_TOKENS:
            self._cached -= len(self._openings.popitem(last=False)[1].prompt_ids)
        return opening

    def problem_with_tools(self) -> str:
        """What is wrong with tools in this chat; empty if the model sees them and can call them."""
        if self.template.form is None and not self.template.probe_tools():
            return "chat.tools: the chat template shows no tools"
        return "" if self.reads_calls else "chat.tools: can't infer the format of tool calls"

    @cached_property
    def advice(self) -> str:
        """What to do about it."""
        if self.template.probe_tools():
            return f"; set chat.tools to the model's format: {', '.join(formats())}"
        return "; set chat.tools to {format: hermes, show: system}: a system message shows them"

    def _open(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], *, continues: bool = False
    ) -> _Opening:
        if tools:
            check_tools(tools)
        shown = tuple(tool.as_template() for tool in tools)
        text = self.template.render(messages, shown)
        self.template.require_heard(messages, text, shown)
        if continues:
            text = self.template.render_open(messages, shown)
        most_calls = self.most_calls if tools else 0
        prompt_ids = self.tokens.start + self.tokens.encode(text)
        if not prompt_ids:
            raise ValueError("got empty messages, expected at least one token to start a rollout")
        return _Opening(text, self.opener_of(text), prompt_ids, tuple(tools), shown, most_calls)

    def opener_of(self, text: str) -> str:
        """The start of reasoning with which a prompt ends, else ""."""
        return "" if self.template.joins else reasoning_opener(text)


class Conversation:
    """One rollout's history and the ids to sample from; made by `Chat.begin`."""

    answer: str
    """The last reply without its reasoning, but with its tool calls as the model wrote them."""

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
        self._opener = opening.opener  # the start of reasoning at its end
        self._completion: Completion | None = None
        self._said = self._reasoning = self.answer = ""
        self._calls = 0

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools offered to the model, in the structure that chat templates expect."""
        return self._opening.shown

    def fork(self) -> Conversation:
        """An independent copy that shares what has been tokenized."""
        forked = object.__new__(Conversation)
        forked.__dict__.update(self.__dict__)  # copy.copy takes 4 us
        forked.messages = self.messages.copy()
        return forked

    def reply(self, completion: Completion, first_call: int | None = None) -> Action:
        """Add the model's turn; if there are tools, parse the tool calls.

        The calls are numbered from `first_call`, by default across the conversation.

        The message in the history also includes the start of reasoning with which the prompt
        ended, since templates look for it.

        Raises RuntimeError if `observe` has not answered the last reply.
        """
        if self._completion is not None:
            raise RuntimeError("reply() was called twice; call observe() after each reply")
        tools, chat = self._opening.tools, self._chat
        self._completion = completion
        self._said = said = chat.tokens.text_of(completion, bool(tools))
        self._reasoning, self.answer = "", said
        if self._opener or _MARKUP.search(said):
            self._reasoning, self.answer = chat.format.split(said, self._opener)
        ids, stopped = completion.token_ids, completion.stop_reason
        if tools:
            first = self._calls if first_call is None else first_call
            found = parse_reply(said, tools, chat.format, first=first, opener=self._opener)
            self._calls += len(found.calls)
            if found.calls:
                reasoning, text = self._called(found)
                return Action(text, found.calls, ids, stopped, found.readable, reasoning)
        self.messages.append(self._message(said))
        return Action(self.answer, (), ids, stopped, True, self._reasoning)

    def so_far(self, token_ids: Sequence[int]) -> str:
        """The answer that the first tokens of a reply begin, without what later ones may change.

        Empty for formats with markup in every reply.
        """
        chat, tools = self._chat, self._opening.tools
        begun = Completion(token_ids, (), chat.tokens.text(token_ids), "length", 0)
        said = chat.tokens.text_of(begun, bool(tools))
        may_reason = not self._opener and any(tag.startswith(said.lstrip()) for tag in TAGS)
        if chat.format.channels or may_reason:
            return ""
        answer = chat.format.split(said, self._opener)[1]
        return _MARKUP.split(answer, maxsplit=1)[0].rstrip() if tools else answer

    def _called(self, found: ParsedReply) -> tuple[str, str]:
        """Add a turn with tool calls to the history. Returns its reasoning and text."""
        template, most = self._chat.template, self._opening.most_calls
        # Calls that the template can't show as calls stay in the text, where it allows that.
        if (found.readable and len(found.calls) <= most) or (most and template.needs_calls):
            message = self._message(found.text)
            message["tool_calls"] = [as_template(call) for call in found.calls[:most]]
        else:
            message = self._message(self._said)
        self.messages.append(message)
        return self._chat.format.split(found.text, self._opener)

    def _message(self, said: str) -> Message:
        form, opener = self._chat.format, self._opener
        if not form.channels:
            if not opener:  # the common case, fast
                return {"role": "assistant", "content": said}
            return self._chat.template.reply_message(said, opener)
        reasoning, answer = form.split(said, opener)
        message = Message(role="assistant", content=answer)
        if reasoning:
            message["reasoning_content"] = reasoning
        return message

    def turn(
        self,
        observation: Sequence[Message] = (),
        seat: str = "",
        reward: float = 0.0,
        *,
        parent: int | None = None,
        messages: Sequence[Message] = (),
    ) -> Turn:
        """The last reply as a turn, before `observe` answers it."""
        said = self._completion
        if said is None:
            raise RuntimeError("there is no reply; call reply() before turn()")
        asked, thoughts = self.prompt_ids, self._reasoning
        answer = None if self.answer == said.text else self.answer
        return Turn(asked, said, observation, seat, parent, messages, reward, answer, thoughts)

    def ended_by(self, completion: Completion) -> tuple[Turn, list[Message]]:
        """A last reply and the whole history with it; the conversation itself is unchanged."""
        ended = self.fork()
        ended.reply(completion)
        return ended.turn(), ended.messages

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
        return chat.tokens.encode_reply(message["content"].removeprefix(self._opener))

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
        following = self._following(completion.token_ids, text)
        if following is None:
            prompt_ids = chat.tokens.start + chat.tokens.encode(text)
        else:
            prompt_ids = [*self.prompt_ids, *completion.token_ids, *following]
        self.messages, self.prompt_ids, self._text = messages, prompt_ids, text
        self._opener = chat.opener_of(text)
        self._completion = None

    def _following(self, sampled: Sequence[int], text: str) -> list[int] | None:
        """The ids that follow the sampled ones; None if `text` doesn't extend the conversation."""
        if not text.startswith(self._text):
            return None
        rest = after_reply(text[len(self._text) :], self._said)
        if rest is None and "tool_calls" in self.messages[-1]:
            rest = self._after_calls(text)
        return None if rest is None else self._chat.tokens.encode_after(sampled, rest)

    def _after_calls(self, text: str) -> str | None:
        """What follows a reply whose tool calls the template writes in its own way.

        The rendering must have the same number of calls, with the same text and reasoning before
        them, so that only the spelling of the calls differs.
        """
        message = self.messages[-1]
        turn, end = text[len(self._text) - len(self._opener) :], 0
        for part in (message.get("reasoning_content", ""), message["content"]):
            start = turn.find(part.strip(), end)
            if start < 0:
                return None
            end = start + len(part.strip())
        calls = self._chat.format.find(turn, end)
        count = len(message["tool_calls"])
        return None if len(calls) < count else turn[calls[count - 1].end :]


@dataclass(frozen=True, slots=True)
class _Opening:
    """What all rollouts of a prompt share."""

    text: str
    opener: str
    prompt_ids: list[int]
    tools: tuple[ToolSpec, ...]
    shown: tuple[Mapping[str, Any], ...]  # the tools in the template's form
    most_calls: int  # how many calls of a reply the template can show
