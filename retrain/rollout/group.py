"""Play a group: G rollouts of one prompt, each in its own Environment.

After reset, rollouts with equal prompts share one `sample(n=...)`, so that the prompt is prefilled
once. An environment that fails sets the outcome of its rollout only; a sampler that fails ends the
run. Seeds depend on the ticket, the rollout and the turn, never on timing.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from retrain.chat import Chat, Conversation
from retrain.concurrency.deadlines import adapter_call, user_call
from retrain.config import RunConfig
from retrain.environment import Action, Environment, StepResult
from retrain.errors import AdapterError, UserCodeError, shown
from retrain.rewarding import as_number, fail
from retrain.sampler import Sampler, SamplingParams
from retrain.types import Completion, Group, Message, Outcome, Prompt, Trajectory, Turn

T = TypeVar("T")


class Rollouts:
    """Plays groups, with the sampler, the chat format and the limits of a run.

    `progress` is called after each call of the sampler and of an environment.
    """

    def __init__(
        self,
        config: RunConfig,
        sampler: Sampler,
        chat: Chat,
        context_length: int,
        progress: Callable[[], object] = lambda: None,
    ) -> None:
        self.sampler, self.chat, self.progress = sampler, chat, progress
        self.params = SamplingParams(**dict(config.sampling), stop_token_ids=chat.stop_token_ids)
        self.context_length = min(
            context_length, config.rollout.max_sequence_length or context_length
        )
        self.max_turns = config.rollout.max_turns
        self.deadlines = config.deadlines
        self.seed = config.train.seed

    async def play(self, prompt: Prompt, environments: Sequence[Environment]) -> Group:
        """Play one rollout of `prompt` in each environment.

        Raises AdapterError or DeadlineError when the sampler fails.
        """
        rollouts = [
            _Rollout(self, prompt, environment, index)
            for index, environment in enumerate(environments)
        ]
        await _each([r.reset for r in rollouts], at_once=_overrides(environments, "reset"))
        self._begin(rollouts)
        await self._first_turns([r for r in rollouts if r.alive])
        playing = [r.play for r in rollouts if r.alive]
        await _each(playing, at_once=_overrides(environments, "step"))
        return Group(prompt, [r.trajectory for r in rollouts])

    def _begin(self, rollouts: Sequence[_Rollout]) -> None:
        """Tokenise the opening messages, equal ones once."""
        begun: list[_Rollout] = []
        for rollout in [r for r in rollouts if r.alive]:
            for other in begun:
                if other.opening == rollout.opening and other.tools == rollout.tools:
                    rollout.conversation = other.conversation.fork()
                    break
            else:
                rollout.begin()
            if rollout.alive:
                begun.append(rollout)
                rollout.trajectory.tools = rollout.conversation.tools
                rollout.check_room()

    async def _first_turns(self, rollouts: Sequence[_Rollout]) -> None:
        """Sample all first turns, equal prompts together."""
        together: dict[int, list[_Rollout]] = {}
        for rollout in rollouts:  # equal openings share one list
            together.setdefault(id(rollout.conversation.prompt_ids), []).append(rollout)

        async def sample(members: list[_Rollout]) -> None:
            first = members[0]
            completions = await first.sample(n=len(members))
            for member, completion in zip(members, completions, strict=True):
                member.first = completion
                member.trajectory.seconds["sample"] = first.trajectory.seconds["sample"]

        await _each(
            [lambda m=members: sample(m) for members in together.values()],  # type: ignore[misc]  # mypy can't infer a lambda with a default
            at_once=len(together) > 1,
        )


class _Rollout:
    """One rollout while it is played."""

    __slots__ = ("conversation", "environment", "first", "index", "opening", "shared", "tools",
                 "trajectory")  # fmt: skip

    conversation: Conversation
    first: Completion

    def __init__(
        self, shared: Rollouts, prompt: Prompt, environment: Environment, index: int
    ) -> None:
        self.shared = shared
        self.environment = environment
        self.index = index
        self.trajectory = Trajectory(prompt)
        self.opening: Sequence[Message] = ()
        self.tools = environment.tools
        environment.prompt = prompt

    @property
    def alive(self) -> bool:
        return self.trajectory.outcome == "ok"

    async def reset(self) -> None:
        prompt = self.trajectory.prompt
        self.opening = prompt.messages
        if type(self.environment).reset is not Environment.reset:
            opening = await self._guard("reset", lambda: self.environment.reset(prompt))
            self.opening = [] if opening is None else opening

    def begin(self) -> None:
        try:
            self.conversation = self.shared.chat.begin(self.opening, self.tools)
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self._fail("invalid", f"{self._name('reset')}: {error}")

    def check_room(self) -> None:
        length, limit = len(self.conversation.prompt_ids), self.shared.context_length
        if length >= limit:
            self._fail(
                "invalid",
                f"prompt {self.trajectory.prompt.id} has {length} tokens, expected fewer than "
                f"{limit}, the model's context or rollout.max_sequence_length. Shorten the prompt, "
                "or raise the limit.",
            )

    async def play(self) -> None:
        """Play turn after turn, until the environment or a limit ends the episode."""
        completion: Completion | None = self.first
        trajectory, conversation = self.trajectory, self.conversation
        while completion is not None:
            prompt_ids = conversation.prompt_ids
            action = conversation.reply(completion)
            result = await self._step(action)
            observation = () if result is None else result.observation
            trajectory.turns.append(Turn(prompt_ids, completion, observation))
            completion = None if result is None else await self._answer(result)
        trajectory.messages = conversation.messages

    async def sample(self, n: int = 1) -> list[Completion]:
        """Sample `n` next turns. Raises DeadlineError, AdapterError and what the sampler raises."""
        shared, prompt_ids = self.shared, self.conversation.prompt_ids
        max_tokens = min(shared.params.max_tokens, shared.context_length - len(prompt_ids))
        params = replace(shared.params, max_tokens=max_tokens, seed=self._seed())
        started = time.perf_counter()
        completions = await adapter_call(
            f"the sampler, with prompt {self.trajectory.prompt.id},",
            shared.sampler.sample(prompt_ids, params, n),
            shared.deadlines.sample,
            "sample",
        )
        self._took("sample", started)
        listed = isinstance(completions, list | tuple)
        if listed and len(completions) == n:
            return completions
        got = f"{len(completions)} completions" if listed else type(completions).__name__
        raise AdapterError(
            f"the sampler {type(shared.sampler).__name__}: sample(n={n}) returned {got}, "
            f"expected a list of {n}. Fix the sampler."
        )

    async def _step(self, action: Action) -> StepResult | None:
        """The result of the environment's `step`; None when the episode ends here."""
        trajectory = self.trajectory
        if type(self.environment).step is Environment.step:
            return None
        answer = await self._guard("step", lambda: self.environment.step(action))
        if not self.alive:
            return None
        try:
            result = _checked(answer)
        except (TypeError, ValueError) as error:
            self._fail("infra_error", f"{self._name('step')} {error}")
            return None
        rewards = trajectory.rewards
        rewards["environment"] = rewards.get("environment", 0.0) + result.reward
        trajectory.info.update(result.info)
        return result

    async def _answer(self, result: StepResult) -> Completion | None:
        """Add the observation and sample the next turn; None when the episode is over."""
        trajectory, shared = self.trajectory, self.shared
        if result.terminated or result.truncated:
            return None
        if len(trajectory.turns) >= shared.max_turns:
            trajectory.info["truncated"] = "max_turns"
            return None
        try:
            self.conversation.observe(result.observation)
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self._fail("invalid", f"{self._name('step')}: {error}")
            return None
        if len(self.conversation.prompt_ids) >= shared.context_length:
            trajectory.info["truncated"] = "context"
            return None
        [completion] = await self.sample()
        return completion

    async def _guard(self, stage: str, call: Callable[[], Awaitable[T]]) -> T | None:
        """Await user code within its deadline; a failure sets the outcome of this rollout."""
        limit: float = getattr(self.shared.deadlines, stage)
        started = time.perf_counter()
        try:
            return await user_call(self._name(stage), call, limit, stage)
        except UserCodeError as error:
            fail(self.trajectory, error)
            return None
        finally:
            self._took("environment", started)

    def _took(self, stage: str, started: float) -> None:
        self.shared.progress()
        seconds = self.trajectory.seconds
        seconds[stage] = seconds.get(stage, 0.0) + time.perf_counter() - started

    def _fail(self, outcome: Outcome, error: str) -> None:
        self.trajectory.outcome = outcome
        self.trajectory.info["error"] = error

    def _name(self, stage: str) -> str:
        return f"{type(self.environment).__name__}.{stage}"

    def _seed(self) -> int:
        turn = len(self.trajectory.turns)
        key = f"{self.shared.seed}/{self.trajectory.prompt.id}/{self.index}/{turn}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") & 0x7FFFFFFF


def _checked(answer: Any) -> StepResult:
    """The StepResult that a user's `step` returned; raises TypeError or ValueError."""
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise TypeError(
            f"returned {shown(answer)}, expected StepResult(observation, reward, terminated, "
            "truncated, info)"
        )
    observation, reward, terminated, truncated, info = answer
    value = as_number(reward)
    if value is None:
        raise ValueError(f"returned the reward {shown(reward)}, expected a finite number")
    if not isinstance(info, dict):
        raise TypeError(f"returned the info {shown(info)}, expected a dict")
    ends = bool(terminated), bool(truncated)
    if any(ends) and observation is None:  # as is common with Gym
        observation = ()
    if any(ends) and not isinstance(observation, list | tuple):
        raise TypeError(
            f"returned the observation {shown(observation)}, expected a list of messages"
        )
    return StepResult(observation, value, *ends, info)


def _overrides(environments: Sequence[Environment], hook: str) -> bool:
    return any(getattr(type(e), hook) is not getattr(Environment, hook) for e in environments)


async def _each(calls: Sequence[Callable[[], Awaitable[None]]], *, at_once: bool) -> None:
    """Await all calls: `at_once` in separate tasks, else in turn, since none of them waits."""
    if not at_once or len(calls) == 1:
        for call in calls:
            await call()
        return
    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(call())  # type: ignore[arg-type]  # they are coroutines
