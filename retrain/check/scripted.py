"""Rollouts with fixed replies in place of a model: texts, and right and wrong calls of tools."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.chat import Chat
from retrain.chat.formats.hermes import CLOSE, OPEN, Hermes
from retrain.config import EndpointConfig, RunConfig
from retrain.environment import ToolSpec
from retrain.errors import shown
from retrain.rollout import Rollouts
from retrain.sampler import SamplingParams, Tokenizer
from retrain.types import Completion

if TYPE_CHECKING:
    from retrain.agents.server import EndpointServer

TEXTS = ("hello", "", "42", "x" * 2000)
"""Replies without a call of a tool."""
_EXAMPLES = {"number": 1, "integer": 1, "boolean": True, "array": [], "object": {}, "null": None}
"""A value of each JSON type; "1" for the others."""


@dataclass(frozen=True)
class Example:
    """A tool and made-up arguments to call it with."""

    name: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.name} called with {shown(self.arguments)}"

    @property
    def reply(self) -> str:
        """What the model says to call it."""
        return OPEN + json.dumps({"name": self.name, "arguments": self.arguments}) + CLOSE


def examples(tools: Sequence[ToolSpec]) -> list[Example]:
    """A call of each tool, with made-up arguments of the types in its schema."""
    found = []
    for tool in tools:
        properties = tool.parameters.get("properties", {})
        required = tool.parameters.get("required", ())
        made = {n: _EXAMPLES.get(str(properties.get(n, {}).get("type")), "1") for n in required}
        found.append(Example(tool.name, made))
    return found


def wrong_calls(tools: Sequence[ToolSpec]) -> list[str]:
    """Replies with calls that reach no tool: of none, without arguments, and no JSON."""
    lacking = [Example(call.name, {}).reply for call in examples(tools) if call.arguments]
    return [Example("no_such_tool", {}).reply, *lacking, f"{OPEN}this is not JSON{CLOSE}"]


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


def scripted(
    config: RunConfig, sampler: FixedSampler, door: EndpointServer | None = None
) -> Rollouts:
    """Rollouts whose model is the sampler, with one token per character and no limit of context."""
    letters = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
    chat = Chat(letters, template="none", tools=Hermes())
    chat.template.shows_tools = False  # probed, it would warn of a template that no model has
    return Rollouts(config, sampler, chat, sys.maxsize, door=door)


class FixedSampler:
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
