"""Rollouts with fixed replies in place of a model, and what a check found in them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.chat import Chat
from retrain.chat.formats.hermes import CLOSE, OPEN, Hermes
from retrain.config import EndpointConfig, RunConfig
from retrain.environment import ToolSpec
from retrain.errors import UserCodeError, blame, shown
from retrain.rollout import Rollouts
from retrain.sampler import SamplingParams, Tokenizer
from retrain.supervision.watch import ADVICE, Watch
from retrain.types import Completion

if TYPE_CHECKING:
    from retrain.agents.server import EndpointServer

Say = Callable[[str], object]
"""Prints immediately what takes long."""
SLOW_SECONDS = 2.0
"""After so many seconds a wait is announced, and a call counts as slow."""
BLOCKED = 0.25
"""Seconds that user code may block the event loop."""
TEXTS = ("hello", "", "42", "x" * 2000)
"""Replies without a call of a tool."""
_EXAMPLES = {"number": 1, "integer": 1, "boolean": True, "array": [], "object": {}, "null": None}
"""A value of each JSON type; "1" for the others."""


@dataclass(frozen=True)
class Finding:
    """One check: passed, maybe with a warning, or failed; and what to do."""

    good: bool
    what: str
    advice: str = ""
    warning: bool = False

    def __str__(self) -> str:
        advice = "".join(f"\n      {line}" for line in self.advice.splitlines())
        word = "FAIL" if not self.good else "warn" if self.warning else "ok  "
        return f"{word}  {self.what}{advice}"


def found(good: bool, what: str, lines: Sequence[str] = (), *, warning: bool = False) -> Finding:
    """A check with lines of advice, or of what was found."""
    return Finding(good, what, "\n".join(lines), warning)


async def tried(what: str, check: Awaitable[None]) -> Finding:
    """The finding of a check that raises if it fails."""
    try:
        await check
    except UserCodeError as error:
        return Finding(False, what, str(error))
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        return Finding(False, what, str(blame("it", error)))
    return Finding(True, what)


@contextmanager
def waiting(say: Say, what: str) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, say, f"waiting for {what}")
    try:
        yield
    finally:
        timer.cancel()


class Blocks:
    """What blocks the event loop while the checks run."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self.seconds = 0.0

    @property
    def too_long(self) -> bool:
        """Whether it is found, and takes so long that the other checks can wait."""
        return self.seconds > SLOW_SECONDS

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watch the event loop."""
        with Watch(slow=BLOCKED, found=self._found):
            yield

    def _found(self, place: str, seconds: float, calls: int) -> None:
        if (each := seconds / calls) > BLOCKED:
            self._longest[place] = max(each, self._longest.get(place, 0.0))
            self.seconds += seconds

    def finding(self) -> Finding:
        """Whether nothing blocked it."""
        lines = [f"{place} blocked it for {time:.1f} s" for place, time in self._longest.items()]
        if not lines:
            return Finding(True, "nothing blocks the event loop")
        if self.too_long:
            lines.append("The checks ended early because this makes them slow.")
        return found(False, "the event loop is blocked", [*lines, ADVICE])


@dataclass(frozen=True)
class Call:
    """A tool and the arguments to call it with."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name} called with {shown(self.arguments)}"

    @property
    def reply(self) -> str:
        """What the model says to call it."""
        return OPEN + json.dumps({"name": self.name, "arguments": self.arguments}) + CLOSE


def examples(tools: Sequence[ToolSpec]) -> list[Call]:
    """A call of each tool, with made-up arguments of the types in its schema."""
    found = []
    for tool in tools:
        properties = tool.parameters.get("properties", {})
        required = tool.parameters.get("required", ())
        made = {n: _EXAMPLES.get(str(properties.get(n, {}).get("type")), "1") for n in required}
        found.append(Call(tool.name, made))
    return found


def wrong_calls(tools: Sequence[ToolSpec]) -> list[str]:
    """Replies with calls that reach no tool: of none, without arguments, and no JSON."""
    lacking = [Call(call.name, {}).reply for call in examples(tools) if call.arguments]
    return [Call("no_such_tool", {}).reply, *lacking, f"{OPEN}this is not JSON{CLOSE}"]


@asynccontextmanager
async def doorway(config: RunConfig, needed: bool = True) -> AsyncIterator[EndpointServer | None]:
    """The endpoint of a config for agents, but on a free port of the loopback interface."""
    if not needed:
        yield None
        return
    from retrain.agents.server import EndpointServer

    letters = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
    own = config.endpoint
    local = EndpointConfig(honour=own.honour, reward=own.reward)
    async with EndpointServer(local, letters.decode).serving() as door:
        yield door


def scripted(config: RunConfig, script: Script, door: EndpointServer | None = None) -> Rollouts:
    """Rollouts whose model is a script, with one token per character and no limit of context."""
    letters = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
    chat = Chat(letters, template="none", tools=Hermes())
    chat.template.shows_tools = False  # probed, it would warn of a template that no model has
    return Rollouts(config, script, chat, sys.maxsize, door=door)


class Script:
    """A sampler that always says the same, but makes the call of a tool only once per rollout."""

    reply = ""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        called = OPEN in self.reply and self.reply in "".join(map(chr, prompt_ids))
        reply = "done" if called else self.reply
        ids = [ord(letter) for letter in reply]
        return [Completion(ids, [0.0] * len(ids), reply, "stop", 0)] * n


class Letters(Tokenizer):
    """One token per character."""

    eos_token_id = None
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))
