"""The Environment: what a user writes, like Gym's but async, one instance per rollout of a slot.

    class Guess(Environment):
        async def step(self, action: Action) -> StepResult:
            right = action.text.strip() == self.prompt.answer
            return StepResult([], float(right), terminated=True, truncated=False, info={})

An instance plays one rollout at a time, so it may keep state on `self`. `self.prompt` is set before
`reset`, so that a subclass that only overrides `step` can use it.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from retrain.types import Message, Prompt, Row, StopReason


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the chat template offers to the model."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"type": "object", "properties": {}}
    )
    """The JSON schema of the arguments."""

    def as_template(self) -> dict[str, Any]:
        """The structure that chat templates expect: {"type": "function", "function": {...}}."""
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
    """One call of a tool by the model; `error` says why its arguments can't be parsed."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Action:
    """What the model did in one turn."""

    text: str
    """The answer: the reply without special tokens, reasoning and tool calls."""
    tool_calls: tuple[ToolCall, ...] = ()
    token_ids: Sequence[int] = ()
    stop_reason: StopReason = "stop"
    readable: bool = True
    """Whether each tool call has a name and an object of arguments."""
    reasoning: str = ""
    """What the model thought before the answer, such as the text between `<think>` tags."""


class StepResult(NamedTuple):
    """The five values of Gymnasium's `step`; a plain tuple works too."""

    observation: Sequence[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the agent of one rollout calls the model; valid until `Environment.run` returns."""

    base_url: str
    """For OpenAI clients: http://HOST:PORT/r/ID/v1."""
    api_key: str = field(repr=False)
    model: str = "policy"
    """The name of the first seat."""

    @property
    def anthropic_url(self) -> str:
        """The base URL for Anthropic clients, which add /v1 themselves."""
        return self.base_url.removesuffix("/v1")


class Environment(ABC):
    """What a rollout interacts with; the defaults make a single-turn task."""

    tools: Sequence[ToolSpec] = ()
    seats: Sequence[str] = ()
    """The names of the parties that are trained, such as players, if there are several."""
    on_error: Literal["fail", "score"] = "fail"
    """Of an environment with `run`: whether the rollout is scored if `run` raises an exception that
    is neither an outage nor the model's doing. What is the model's doing is scored anyway."""
    prompt: Prompt
    """The prompt of the current rollout, set before `reset`."""

    def prompts(self) -> Iterable[Row | Mapping[str, Any] | str] | int:
        """The environment's own tasks, if it has any: then a config needs no `prompts`.

        Override it to return rows, or the number of tasks if they only differ by `prompt.seed`. A
        sequence is read by index during the run, so it may make its items on demand; an iterator
        is read once, at the start. If the class overrides `reset` or `run`, a row needs no prompt.
        Called on an instance that is not set up.
        """
        return 0

    def check_row(self, row: Row) -> None:  # noqa: B027 - a default, not a forgotten body
        """Raise ValueError for a row that can't be played.

        Override it to report such rows with their places before any model loads. Called for each
        row of the dataset on one instance that is not set up, so it must be fast.
        """

    async def setup(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Once per instance, before its first `reset`: connect, load.

        Raise ConfigError to end the run; with another error, only this rollout fails.
        """

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        """Start a rollout of `prompt`; return its first messages."""
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        """Respond to a turn of the model; by default the episode ends."""
        return StepResult([], 0.0, True, False, {})

    async def run(self, endpoint: Endpoint) -> StepResult:
        """Play a whole rollout with an agent that calls the model at `endpoint`.

        A class that overrides this needs no `reset` and `step`. The observation of the result is
        not used; `info["completion"]` is what rewards get as `completion`, by default the last
        reply. Called after `reset`, within `deadlines.agent`.
        """
        raise NotImplementedError

    async def close(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Once per instance, when the run ends."""
