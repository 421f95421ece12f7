"""The Environment: what a user writes, Gym-shaped and async, one instance per rollout slot.

    class Guess(Environment):
        async def step(self, action: Action) -> StepResult:
            right = action.text.strip() == self.prompt.answer
            return StepResult([], float(right), terminated=True, truncated=False, info={})

An instance plays one rollout at a time, so state may live on `self`. Before `reset`, the pipe sets
`self.prompt`, so that a subclass that only overrides `step` still knows what it was asked.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from retrain.types import Message, Prompt, StopReason


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool offered to the chat template."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    """A JSON schema of the arguments."""

    def as_template(self) -> dict[str, Any]:
        """The form that chat templates take: {"type": "function", "function": {...}}."""
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.description,
                "parameters": dict(self.parameters),
            },
        }


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call that the model made; `error` says why its arguments could not be read."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did in one turn."""

    text: str
    """The reply without special tokens and without the tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: Sequence[int] = ()
    stop_reason: StopReason = "stop"


class StepResult(NamedTuple):
    """Gymnasium's five; a plain tuple of five works as well."""

    observation: Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class Environment(ABC):
    """Where a rollout takes place; the defaults make a single-turn task."""

    tools: Sequence[ToolSpec] = ()
    prompt: Prompt
    """The prompt of the rollout under way, set before `reset`."""

    async def setup(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Once per instance, before its first `reset`: connect, load."""

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """The messages that a rollout of `prompt` starts with."""
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        """Answer the model's turn; by default the episode ends."""
        return StepResult([], 0.0, True, False, {})

    async def close(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Once per instance, when the run ends."""
