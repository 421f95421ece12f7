"""What the tests of tools share: replies with calls, and groups that a scripted model plays."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from retrain import Action, Environment, Prompt, ToolCall
from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.check.scripted import Letters
from retrain.config import parse_config
from retrain.environment.tools import ToolEnvironment
from retrain.rollout import Rollouts, Slot
from retrain.sampler import SamplingParams
from retrain.scoring import Scorer
from retrain.types import Completion, Group

ROOT = Path(__file__).resolve().parent.parent
LETTERS = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
PROMPT = Prompt("0.0.0", ({"role": "user", "content": "a="},), answer="7", metadata={"n": 3})


def reply(*calls: tuple[str, dict[str, Any]]) -> Action:
    """A turn with these calls."""
    made = [ToolCall(name, given, f"call{i}") for i, (name, given) in enumerate(calls)]
    return Action("", tuple(made))


def written(name: str, **arguments: Any) -> str:
    """A call as the model writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def answers(environment: ToolEnvironment, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """The results of a turn with these calls, which are in their order."""
    result = await environment.step(reply(*calls))
    assert [m["tool_call_id"] for m in result.observation] == [
        f"call{i}" for i in range(len(calls))
    ]
    return [message["content"] for message in result.observation]


async def played(
    make: Callable[[], Environment], *scripts: Sequence[str], rounds: int = 1, **sections: Any
) -> list[Group]:
    """Groups in which each rollout says the replies of its script, one per turn."""
    config = parse_config({"prompts": ["a="], **sections})
    chat = Chat(LETTERS, template="none", tools=Hermes())
    rollouts = Rollouts(config, _Model(scripts), chat, 100_000)
    slot = Slot(len(scripts), make, rollouts, Scorer([]))
    try:
        return [await slot.play(PROMPT) for _ in range(rounds)]
    finally:
        await slot.close()


class _Model:
    """Says the next reply of a script, which is the one whose first reply is in the prompt."""

    def __init__(self, scripts: Sequence[Sequence[str]]) -> None:
        self.scripts = scripts

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        heard = LETTERS.decode(prompt_ids)
        begun = [script for script in self.scripts if script[0] in heard]
        if not begun:
            return [_said(script[0]) for script in self.scripts]
        return [_said(next(line for line in begun[0] if line not in heard))]


def _said(text: str) -> Completion:
    ids = [ord(letter) for letter in text]
    return Completion(ids, [-0.5] * len(ids), text, "stop", 0)
