"""`retrain chat RUN_DIR|MODEL`: a conversation in the terminal, with one model or with two.

If the input is no terminal, each line is a message and each reply is printed, with nothing else on
stdout: with --compare that of the base model, then that of the trained one.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from retrain.agents.calls import CallError, Reply
from retrain.cli.chat.arguments import HELP, options_of, require
from retrain.cli.chat.subject import LoadableModel, find_subject
from retrain.cli.chat.voice import Voice, opened
from retrain.cli.process import DONE, drive, say
from retrain.errors import ConfigError, printable
from retrain.supervision.threads import DaemonPool
from retrain.types import Message

NEEDED = ("torch", "transformers", "peft")


@dataclass
class Talk:
    """A conversation with one model."""

    label: str
    """Printed before each reply, if a terminal shows those of two models."""
    voice: Voice
    options: dict[str, Any]
    """Fields of SamplingParams to use instead of the run's."""
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def reset(self) -> None:
        self.messages = [] if self.system is None else [Message(role="system", content=self.system)]

    async def reply(self, text: str) -> Reply:
        """Raises CallError, for example if the conversation fills the context; it is then as
        before."""
        asked = [*self.messages, Message(role="user", content=text)]
        [reply] = await self.voice.calls().chat(asked, options=self.options)
        self.messages = [*asked, Message(role="assistant", content=reply.text)]
        return reply


def main(arguments: argparse.Namespace) -> int:
    """Talk until the end of the input."""
    options = options_of(arguments)
    require(NEEDED, "trl")
    subject = find_subject(arguments.subject)
    if arguments.compare and subject.base is None:
        raise ConfigError(
            f"--compare: got {subject.name}, whose base model is unknown; expected a run directory"
        )
    return drive(_talk(subject, arguments, options))


async def _talk(
    subject: LoadableModel, arguments: argparse.Namespace, options: dict[str, Any]
) -> int:
    subjects = [("trained", subject)]
    if arguments.compare and subject.base is not None:
        subjects.insert(0, ("base", subject.base))
    terminal = sys.stdin.isatty()
    async with AsyncExitStack() as stack:
        talks = []
        for label, one in subjects:
            say(f"loading {one.name}")
            voice = await stack.enter_async_context(
                opened(one, arguments.device, arguments.threads)
            )
            label = f"{label}> " if arguments.compare else ""
            talks.append(Talk(label, voice, options, arguments.system))
            talks[-1].reset()
        if terminal:
            say(HELP)
        pool = DaemonPool(1, "retrain-stdin")
        stack.callback(pool.close)
        while (line := await pool.run(lambda: _line(terminal))) is not None:
            if line in ("/quit", "/exit"):
                break
            if line == "/reset":
                for talk in talks:
                    talk.reset()
            elif line:
                await _answer(talks, line)
    return DONE


async def _answer(talks: Sequence[Talk], line: str) -> None:
    replies = await asyncio.gather(*[talk.reply(line) for talk in talks], return_exceptions=True)
    for talk, reply in zip(talks, replies, strict=True):
        if isinstance(reply, CallError):
            say(f"error: {reply}")
            print(talk.label, flush=True)  # each reply keeps its line
            continue
        if isinstance(reply, BaseException):
            raise reply
        if reply.reasoning:
            say(f"{talk.label}reasoning: {reply.reasoning}")
        print(f"{talk.label}{printable(reply.text)}", flush=True)
        if reply.completion.stop_reason == "length":
            say(f"{talk.label}(cut after {len(reply.completion.token_ids)} tokens)")


def _line(terminal: bool) -> str | None:
    """The next message; None at the end of the input."""
    if not terminal:
        line = sys.stdin.readline()
        return line.strip() if line else None
    with suppress(ImportError):  # edits lines, and remembers them
        import readline  # noqa: F401
    try:
        return input("you> ").strip()
    except EOFError:
        print()
        return None
