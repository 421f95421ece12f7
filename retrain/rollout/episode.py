"""An episode of one turn, and what all kinds of episodes share.

An environment without its own `step` plays this kind: its first turn is the only one, and no user
code runs after `reset`. Each other kind is a subclass in a file of its own, which `group.kind_of`
chooses. Seeds depend on the ticket, the rollout and the turn, never on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Protocol, TypeVar

from retrain.chat import Chat, Conversation
from retrain.config import RunConfig
from retrain.environment import Endpoint, ToolSpec
from retrain.errors import AdapterError, ConfigError, UserCodeError, text_of
from retrain.rollout.answers import UnusableError, opening_of, tools_of
from retrain.rollout.instance import Instance
from retrain.sampler import Sampler, SamplingParams
from retrain.scoring import fail
from retrain.supervision.boundary import adapter_call
from retrain.types import Completion, Message, Outcome, Prompt, Trajectory

if TYPE_CHECKING:
    from retrain.agents.calls import Calls
    from retrain.rollout.opponents import Opponent

T = TypeVar("T")


class Door(Protocol):
    """Gives the agent of a rollout an endpoint: `retrain.agents.EndpointServer`."""

    def open(self, calls: Calls, seats: Sequence[str]) -> AbstractAsyncContextManager[Endpoint]: ...


class Shared:
    """What the episodes of a run share: the sampler, the chat format and the limits.

    `progress` is called after each call of the sampler and of an environment. `door` is for
    environments that run an agent. `opponents` speak for the seats of these names.
    """

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        chat: Chat,
        context_length: int,
        progress: Callable[[], object] = lambda: None,
        door: Door | None = None,
        opponents: Mapping[str, Opponent] | None = None,
    ) -> None:
        self.sampler, self.chat, self.progress, self.door = sampler, chat, progress, door
        self.params = SamplingParams(**dict(config.sampling), stop_token_ids=chat.stop_token_ids)
        self.context_length = min(
            context_length, config.rollout.max_sequence_length or context_length
        )
        self.max_turns, self.max_tokens = config.rollout.max_turns, config.rollout.max_tokens
        self.deadlines = config.deadlines
        self.seed = config.train.seed
        self.opponents = opponents or {}


class Episode:
    """One rollout of one turn, while it is played.

    A subclass overrides `play`, which runs in a task of the slot. It sets `own_play`, calls the
    environment only through `call`, which has the task and the deadline, samples only through
    `sample`, appends each turn to `trajectory.turns`, and ends a failed rollout with `fail`.
    """

    __slots__ = ("alive", "broken", "conversation", "first", "index", "instance",
                 "opening", "shared", "tools", "trajectory")  # fmt: skip

    own_play: ClassVar[bool] = False
    """Whether `play` calls the environment or samples: the rollouts of a group are then played at
    the same time, each with a conversation of its own."""
    opens = True
    """Whether the model speaks first."""
    broken: asyncio.Future[Exception]
    """The error of the sampler, while an agent still runs: it ends the group."""
    conversation: Conversation
    """Of who speaks."""
    first: Completion
    opening: Sequence[Message]
    tools: Sequence[ToolSpec]
    trajectory: Trajectory
    """The whole rollout."""

    def __init__(
        self,
        shared: Shared,
        prompt: Prompt,
        instance: Instance,
        index: int,
        names: tuple[str, ...] = (),
    ) -> None:
        """`names` are the seats of the environment, of the kinds that have any."""
        self.shared, self.instance, self.index = shared, instance, index
        self.trajectory = Trajectory(prompt, index=index)
        self.alive = True

    # --- the stages, in their order

    async def reset(self) -> None:
        """Get the opening messages and the tools."""
        prompt, environment = self.trajectory.prompt, self.instance.environment
        self.opening = prompt.messages
        try:
            if "reset" in self.instance.overridden:
                answer = await self.call("reset", lambda: environment.reset(prompt))
                self.opening = opening_of(self.name("reset"), answer)
            self.tools = tools_of(self.instance.name, environment)
        except UserCodeError as error:
            self.fail(error)

    def begin(self, same: Conversation | None) -> None:
        """Tokenise the opening messages, unless they are the `same` as another rollout's."""
        if same is not None:
            self.conversation = same.fork() if self.own_play else same
            return
        try:
            self.conversation = self.shared.chat.begin(self.opening, self.tools)
        except ConfigError:  # of chat.tools
            raise
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self.set_outcome("invalid", f"{self.name('reset')}: {text_of(error)}")

    def has_room(self) -> bool:
        """Whether the prompt leaves room in the context; otherwise the rollout fails."""
        length, most = len(self.conversation.prompt_ids), self.shared.context_length
        if length >= most:
            self.set_outcome(
                "invalid",
                f"prompt {self.trajectory.prompt.id} has {length} tokens, expected fewer than "
                f"{most}, the model's context or rollout.max_sequence_length. Shorten the prompt, "
                "or raise the limit.",
            )
        return length < most

    async def sample(self, n: int = 1, index: int | None = None) -> list[Completion]:
        """Sample `n` next turns, with the seed of the rollout `index`, by default this one.

        Raises DeadlineError, AdapterError and what the sampler raises.
        """
        shared, prompt_ids = self.shared, self.conversation.prompt_ids
        params = replace(
            shared.params,
            seed=self.seed(str(len(self.trajectory.turns)), index),
            max_tokens=min(shared.params.max_tokens, shared.context_length - len(prompt_ids)),
        )
        return await self.sampled(prompt_ids, params, n)

    async def play(self) -> None:
        """Play on after the first turn, which ends this kind."""
        trajectory = self.trajectory
        turn, trajectory.messages = self.conversation.ended_by(self.first)
        trajectory.turns.append(turn)

    def trajectories(self) -> list[Trajectory]:
        """The results of the rollout: one for each seat."""
        return [self.trajectory]

    # --- what the stages use

    async def sampled(
        self, prompt_ids: list[int], params: SamplingParams, n: int
    ) -> list[Completion]:
        """What the sampler returns, checked; raises as `sample` does."""
        shared, started = self.shared, time.perf_counter()
        completions = await adapter_call(
            f"the sampler, with prompt {self.trajectory.prompt.id},",
            shared.sampler.sample(prompt_ids, params, n),
            shared.deadlines.sample,
            "sample",
        )
        self.took("sample", started)
        listed = isinstance(completions, list | tuple)
        if listed and len(completions) == n:
            return completions
        got = f"{len(completions)} completions" if listed else type(completions).__name__
        raise AdapterError(
            f"the sampler {type(shared.sampler).__name__}: sample(n={n}) returned {got}, "
            f"expected a list of {n}. Fix the sampler."
        )

    async def call(self, stage: str, call: Callable[[], Awaitable[T]], key: str = "") -> T:
        """Await user code within its deadline; raises UserCodeError."""
        started = time.perf_counter()
        try:
            return await self.instance.call(stage, call, key)
        finally:
            self.took("environment", started)

    def took(self, stage: str, started: float) -> None:
        """Add to the seconds of a stage."""
        self.shared.progress()
        seconds = self.trajectory.seconds
        # In microseconds: 17 digits of a float take long to write.
        seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - started, 6)

    def fail(self, error: UserCodeError) -> None:
        """Set the outcome of this rollout, once."""
        if self.alive and isinstance(error, UnusableError):
            self.set_outcome("invalid", str(error))
        elif self.alive:
            self.alive = False
            fail(self.trajectory, error)

    def set_outcome(self, outcome: Outcome, error: str) -> None:
        """The rollout fails, without a fault of the environment's methods."""
        self.alive = False
        self.trajectory.outcome = outcome
        self.trajectory.info["error"] = error

    def name(self, stage: str) -> str:
        """How messages call a method of the environment."""
        return f"{self.instance.name}.{stage}"

    def seed(self, turn: str, index: int | None = None) -> int:
        """The seed of a turn of this rollout, or of the rollout `index`."""
        rollout = self.index if index is None else index
        key = f"{self.shared.seed}/{self.trajectory.prompt.id}/{rollout}/{turn}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") & 0x7FFFFFFF
