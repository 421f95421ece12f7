"""A chat template: how it renders messages, and how it ends a turn.

All facts about a template are found by rendering with it, so any template works. A template is
foreign code: whatever it raises becomes a UserCodeError with its message, since it rejects the
messages of the environment or the dataset.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final, cast

from retrain.chat.adapting import explained, in_reasoning, system_in_user, with_text_arguments
from retrain.chat.formats.base import Format
from retrain.chat.reasoning import closing
from retrain.errors import ConfigError, UserCodeError, shown
from retrain.sampler import Tokenizer
from retrain.types import Message

logger = logging.getLogger(__name__)
NOT_SHOWN: Final = (
    "the chat template doesn't show tools to the model, so it will not know them: set chat.tools "
    "to {format: hermes, show: system}, or describe them in the environment's messages"
)

_PROBE: Final = "retrainprobe"
_ASK: Final = Message(role="user", content="Hi")
_SAY: Final = Message(role="assistant", content=_PROBE)
PROBE_CALL: Final = {"name": "probe", "arguments": {"probe": _PROBE}}
_RESERVED: Final = frozenset(
    {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"}
)


class Template:
    """Renders messages as text; if `joins`, there is no template and texts are concatenated."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, arguments: Mapping[str, Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        self.joins = template == "none"
        own = "" if self.joins else tokenizer.chat_template
        self.source = str(own) if template == "auto" else template
        """The Jinja template's text."""
        self.form: Format | None = None
        """The format in which a system message shows the tools; None if the template does."""
        self._options = dict(arguments or {})
        self._heard: set[str] = set()
        self._check_options(template)
        if template not in {"auto", "none"}:
            self._options["chat_template"] = template
        try:
            self.render([_ASK])
        except UserCodeError as error:
            raise ConfigError(
                f"chat.template: can't render a user message: {error.__cause__}"
            ) from error

    def _check_options(self, template: str) -> None:
        if reserved := ", ".join(sorted(_RESERVED & self._options.keys())):
            raise ConfigError(f"chat.arguments: can't set {reserved}, which the run sets")
        if template == "none" and self._options:
            raise ConfigError("chat.arguments has no effect with chat.template: none; remove it")
        if template == "auto" and not self._tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template. Set `chat: none` for a base model "
                "(messages are concatenated), or `chat: {template: FILE}` with a Jinja file"
            )
        if template not in {"auto", "none"} and "{{" not in template and "{%" not in template:
            raise ConfigError(
                f"chat.template: got {shown(template)}, which has no {{{{ }}}} or {{% %}}; "
                "expected auto, none or a Jinja file"
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = True,
    ) -> str:
        """The text of a conversation; `generation` adds the start of the model's next turn.

        Raises UserCodeError with the template's message.
        """
        if self.joins:
            return "".join([message["content"] for message in messages])
        if self.form is not None:
            messages, tools = explained(messages, tools, self.form), ()
        return self._rendered(self._adapted(messages), tools, generation=generation)

    def render_open(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str:
        """The text of a conversation up to the end of the content of its last message.

        Raises UserCodeError with the template's message, or if it drops that content.
        """
        last = Message(**{**messages[-1], "content": messages[-1]["content"] + _PROBE})
        text = self.render([*messages[:-1], last], tools, generation=False)
        if _PROBE not in text:
            raise UserCodeError("the chat template drops the last message: no reply can follow it")
        return text.rpartition(_PROBE)[0]

    def _adapted(self, messages: Sequence[Message]) -> list[Message]:
        """The messages in the form that this template takes."""
        if messages and messages[0]["role"] == "system" and not self._takes_system:
            messages = system_in_user(messages)
        return [self._written(m) if "tool_calls" in m else m for m in messages]

    def _written(self, message: Message) -> Message:
        if not message["tool_calls"]:
            return message
        if self.calls_as_text:
            message = with_text_arguments(message)
        both = "reasoning_content" in message and message["content"]
        return message if not both or self._takes_preamble else in_reasoning(message)

    def _rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = False,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # foreign code: see the module's docstring
            roles = ", ".join(message["role"] for message in messages)
            raise UserCodeError(
                f"the chat template rejects messages with the roles {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return text

    def require_heard(
        self, messages: Sequence[Message], text: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise UserCodeError if the template drops all messages of a role from `text`.

        Templates silently drop roles that they don't know. Each role is checked once. Dropping
        text of the assistant is no error, since templates rewrite history.
        """
        for role in {message["role"] for message in messages} - self._heard - {"assistant"}:
            changed = [
                Message(**{**m, "content": m["content"] + _PROBE}) if m["role"] == role else m
                for m in messages
            ]
            if not self.joins and self.render(changed, tools) == text:
                raise UserCodeError(
                    f"the chat template ignores messages of the role {role!r}, so the model would "
                    "never see them. Use another role, or set chat.template to a Jinja file"
                )
            self._heard.add(role)

    def reply_message(self, said: str, opener: str) -> Message:
        """The message of a reply to a prompt that ends with `opener`, the start of reasoning.

        The opener belongs to the turn although it was not sampled: without it a template would
        take the reasoning for the answer. Reasoning that was cut off is closed.
        """
        close = closing(opener)
        reasoning, end, answer = said.partition(close)
        if self._separates_reasoning:
            return Message(
                role="assistant",
                content=answer.lstrip("\n"),
                reasoning_content=reasoning.strip("\n"),
            )
        closed = opener + said + ("" if end else f"\n{close}\n\n")
        return Message(role="assistant", content=closed)

    @cached_property
    def _separates_reasoning(self) -> bool:
        """Whether the template takes reasoning from a separate field and ignores its tags."""
        tagged = Message(role="assistant", content=f"<think>\n{_PROBE}\n</think>\n\nHi")
        apart = Message(role="assistant", content="Hi", reasoning_content=_PROBE)
        return (
            _PROBE in self._tried([_ASK, apart])
            and self._tried([_ASK, tagged]).count("</think>") > 1
        )

    @cached_property
    def _takes_system(self) -> bool:
        """Whether system messages reach the model; logs a warning if not."""
        takes = _PROBE in self._plain([Message(role="system", content=_PROBE), _ASK])
        if not takes:
            logger.warning(
                "the chat template takes no system message: it is prepended to the first user "
                "message"
            )
        return takes

    @cached_property
    def calls_as_text(self) -> bool:
        """Whether the template takes the arguments of tool calls as JSON text, not as objects."""
        as_object, as_text = (self.with_calls(1, text=text) for text in (False, True))
        if _PROBE in as_object and "'probe': 'retrainprobe'" not in as_object:
            return False
        return _PROBE in as_text

    def with_calls(self, count: int, *, text: bool, content: str | None = "") -> str:
        """What the template writes for a reply with `count` calls; empty if it rejects it."""
        calls = [
            {"id": f"call{number:05d}", "type": "function", "function": PROBE_CALL}
            for number in range(count)
        ]
        reply = cast(Message, {"role": "assistant", "content": content, "tool_calls": calls})
        whole = self._plain([_ASK, with_text_arguments(reply) if text else reply])
        asked = self._plain([_ASK], generation=True)
        pairs = zip(whole, asked, strict=False)
        return whole[next((i for i, (a, b) in enumerate(pairs) if a != b), len(asked)) :]

    @cached_property
    def shows_calls(self) -> bool:
        """Whether an assistant message's `tool_calls` reach the model."""
        return self.form is not None or _PROBE in self.with_calls(1, text=self.calls_as_text)

    @cached_property
    def needs_calls(self) -> bool:
        """Whether a tool's answer is rejected unless the message before has tool calls."""
        answer = Message(role="tool", content=_PROBE, tool_call_id="call00000")
        return not self._plain([_ASK, _SAY, answer])

    @cached_property
    def _takes_preamble(self) -> bool:
        """Whether a message may have reasoning, text and tool calls."""
        call = {"id": "call00000", "type": "function", "function": PROBE_CALL}
        reply = Message(role="assistant", content=_PROBE, tool_calls=[call])
        reply = with_text_arguments(reply) if self.calls_as_text else reply
        return bool(self._plain([_ASK, Message(**{**reply, "reasoning_content": "Hm"})]))

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the tools reach the model; logs a warning if not."""
        shown = self.probe_tools()
        if not shown:
            logger.warning(NOT_SHOWN)
        return shown

    def probe_tools(self) -> bool:
        """Whether the tools reach the model."""
        parameters = {"type": "object", "properties": {}}
        function = {"name": _PROBE, "description": "A probe.", "parameters": parameters}
        return _PROBE in self._tried([_ASK], [{"type": "function", "function": function}])

    def closers(self) -> list[str]:
        """The texts that may follow a reply, and so end a turn, the most specific first.

        A template without an end-of-turn marker ends a turn with the next turn's role marker.
        """
        last = self._after_reply([], generation=False)
        if last.strip():
            return [last]
        others = [Message(role=role, content="Hi") for role in ("user", "tool")]
        return [self._after_reply([other], generation=True) for other in others]

    def _after_reply(self, following: Sequence[Message], *, generation: bool) -> str:
        text = self._tried([_ASK, _SAY, *following], generation=generation)
        return text.rpartition(_PROBE)[2] if _PROBE in text else ""

    def _tried(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = False,
    ) -> str:
        """The text of a conversation; empty if the template rejects it."""
        try:
            return self.render(messages, tools, generation=generation)
        except UserCodeError:
            return ""

    def _plain(self, messages: Sequence[Message], *, generation: bool = False) -> str:
        """The text of messages that are not adapted; empty if the template rejects them."""
        try:
            return "" if self.joins else self._rendered(messages, generation=generation)
        except UserCodeError:
            return ""


def after_reply(rest: str, reply: str) -> str | None:
    """What follows `reply` in `rest`, or None if `rest` doesn't begin with it.

    A template may trim whitespace at the ends of the reply; any other difference is a rewriting.
    """
    if rest.startswith(reply):
        return rest[len(reply) :]
    core = reply.strip()
    trimmed = rest.lstrip()
    before = rest[: len(rest) - len(trimmed)]
    reply_before = reply[: len(reply) - len(reply.lstrip())]
    if not trimmed.startswith(core) or not reply_before.endswith(before):
        return None
    tail, reply_tail = trimmed[len(core) :], reply[len(reply.rstrip()) :]
    shared = 0
    while shared < min(len(tail), len(reply_tail)) and tail[shared] == reply_tail[shared]:
        shared += 1
    return tail[shared:]
