"""A chat template as text: what it makes of messages, and what it says at a turn's end.

Everything that is learnt about a template is learnt by rendering with it, so any template will do.
A template is foreign code: whatever it raises becomes one UserCodeError with its complaint, since
it is the environment's (or the data's) messages that it refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Final

from retrain.errors import ConfigError, UserCodeError, shown
from retrain.sampler import Tokenizer
from retrain.types import Message

logger = logging.getLogger(__name__)

_PROBE: Final = "retrainprobe"
_ASK: Final = Message(role="user", content="Hi")
_SAY: Final = Message(role="assistant", content=_PROBE)
_RESERVED: Final = frozenset(
    {"conversation", "tools", "chat_template", "add_generation_prompt", "tokenize"}
)


class Template:
    """Messages to text; `joins` says that there is no template and texts are joined as they are."""

    def __init__(
        self, tokenizer: Tokenizer, template: str, arguments: Mapping[str, Any] | None
    ) -> None:
        self._tokenizer = tokenizer
        self.joins = template == "none"
        self._options = dict(arguments or {})
        self._heard: set[str] = set()
        self._check_options(template)
        if template not in {"auto", "none"}:
            self._options["chat_template"] = template
        try:
            self.render([_ASK])
        except UserCodeError as error:
            raise ConfigError(f"chat.template can't be used: {error.__cause__}") from error

    def _check_options(self, template: str) -> None:
        reserved = sorted(_RESERVED & self._options.keys())
        if reserved:
            raise ConfigError(f"chat.arguments can't set {', '.join(reserved)}: the run sets it")
        if template == "none" and self._options:
            raise ConfigError("chat.arguments are variables of a template, but chat.template: none")
        if template == "auto" and not self._tokenizer.chat_template:
            raise ConfigError(
                "the model's tokenizer has no chat template: write `chat: none` for a base model "
                "(texts are joined as they are) or `chat: {template: FILE}` with a Jinja file"
            )
        if template not in {"auto", "none"} and "{{" not in template and "{%" not in template:
            raise ConfigError(
                f"chat.template {shown(template)} is no Jinja text, it has no {{{{ }}}} or "
                "{% %}: expected auto, none or a Jinja file"
            )

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        generation: bool = True,
    ) -> str:
        """The text of a conversation, with the start of the model's next turn if `generation`.

        Raises UserCodeError with the template's complaint.
        """
        if self.joins:
            return "".join([message["content"] for message in messages])
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) or None,
                add_generation_prompt=generation,
                tokenize=False,
                **self._options,
            )
        except Exception as error:  # foreign code, see the module's docstring
            roles = ", ".join(message["role"] for message in messages)
            raise UserCodeError(
                f"the chat template refuses messages with the roles {roles}: "
                f"{type(error).__name__}: {error}"
            ) from error
        return text

    def require_heard(
        self, messages: Sequence[Message], text: str, tools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Raise UserCodeError when the template shows nothing of a role's messages in `text`.

        Templates drop roles that they don't know without a word. One look at a role is enough;
        what a template drops of the assistant's is a rewriting of history, and no error.
        """
        for role in {message["role"] for message in messages} - self._heard - {"assistant"}:
            changed = [
                Message(**{**m, "content": m["content"] + _PROBE}) if m["role"] == role else m
                for m in messages
            ]
            if not self.joins and self.render(changed, tools) == text:
                raise UserCodeError(
                    f"the chat template ignores messages of the role {role!r}: the model would "
                    "never see them; use another role, or set chat.template to a Jinja file"
                )
            self._heard.add(role)

    def reply_message(self, said: str, opener: str) -> Message:
        """The message of a reply to a prompt that ends with `opener`, the start of reasoning.

        The opener is a part of the turn, though not of what was sampled: without it a template
        would take the reasoning for the answer. Reasoning that was cut off is closed.
        """
        if not opener or self.joins:
            return Message(role="assistant", content=said)
        reasoning, end, answer = said.partition("</think>")
        if self._takes_reasoning_apart:
            return Message(
                role="assistant",
                content=answer.lstrip("\n"),
                reasoning_content=reasoning.strip("\n"),
            )
        return Message(role="assistant", content=opener + said + ("" if end else "\n</think>\n\n"))

    @cached_property
    def _takes_reasoning_apart(self) -> bool:
        """Whether reasoning must come in a field of its own and isn't known by its tags."""
        tagged = Message(role="assistant", content=f"<think>\n{_PROBE}\n</think>\n\nHi")
        apart = Message(role="assistant", content="Hi", reasoning_content=_PROBE)
        try:
            if _PROBE not in self.render([_ASK, apart], generation=False):
                return False
            return self.render([_ASK, tagged], generation=False).count("</think>") > 1
        except UserCodeError:
            return False

    @cached_property
    def shows_calls(self) -> bool:
        """Whether an assistant message's `tool_calls` reach the model."""
        function = {"name": "probe", "arguments": {"probe": _PROBE}}
        call = {"id": "call00000", "type": "function", "function": function}
        reply = Message(role="assistant", content="", tool_calls=[call])
        try:
            return _PROBE in self.render([_ASK, reply], generation=False)
        except UserCodeError:
            return False

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the tools on offer reach the model; if not, that is logged."""
        parameters = {"type": "object", "properties": {}}
        function = {"name": _PROBE, "description": "A probe.", "parameters": parameters}
        try:
            shown = _PROBE in self.render([_ASK], [{"type": "function", "function": function}])
        except UserCodeError:
            shown = False
        if not shown:
            logger.warning(
                "the chat template doesn't show tools to the model: the environment's own messages "
                "have to describe them"
            )
        return shown

    def closers(self) -> list[str]:
        """The texts that may follow a reply and so end a turn, the most telling first.

        Templates that close no turn end it with the next one's role marker.
        """
        last = self._after_reply([], generation=False)
        if last.strip():
            return [last]
        others = [Message(role=role, content="Hi") for role in ("user", "tool")]
        return [self._after_reply([other], generation=True) for other in others]

    def _after_reply(self, following: Sequence[Message], *, generation: bool) -> str:
        try:
            text = self.render([_ASK, _SAY, *following], generation=generation)
        except UserCodeError:  # this template knows no such role
            return ""
        return text.rpartition(_PROBE)[2] if _PROBE in text else ""


def reasoning_opener(text: str) -> str:
    """The end of a prompt that has the model begin inside its reasoning, else ""."""
    end = text[-32:]
    start = end.rfind("<think>")
    return "" if start < 0 or end[start + len("<think>") :].strip() else end[start:]


def after_reply(rest: str, reply: str) -> str | None:
    """What follows `reply` in `rest`, or None when `rest` doesn't begin with it.

    A template may trim the reply's ends: that is no rewriting. Whitespace that the reply has and
    `rest` lacks is passed over; anything else that differs is a rewriting.
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
