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
from functools import partial
from typing import TypeVar

from retrain.chat import Chat, Conversation
from retrain.concurrency.deadlines import adapter_call, user_call
from retrain.config import RunConfig
from retrain.environment import Action, StepResult, ToolSpec
from retrain.errors import AdapterError, UserCodeError, text_of
from retrain.rewarding import fail
from retrain.rollout.answers import UnusableError, opening_of, prepare, result_of, tools_of
from retrain.rollout.instance import Instance, Job
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

    async def play(self, prompt: Prompt, instances: Sequence[Instance]) -> Group:
        """Play one rollout of `prompt` in each instance; one that isn't set up fails.

        Raises AdapterError or DeadlineError when the sampler fails.
        """
        rollouts = [
            _Rollout(self, prompt, instance, index) for index, instance in enumerate(instances)
        ]
        await _each(rollouts, "reset", _Rollout.reset)
        self._begin(rollouts)
        await self._first_turns(rollouts)
        await _each(rollouts, "step", _Rollout.play)
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
            if rollout.alive:
                together.setdefault(id(rollout.conversation.prompt_ids), []).append(rollout)
        if len(together) == 1:  # a failed one keeps its place: the others sample what they would
            [alive] = together.values()
            await self._first_turn(alive[0], rollouts)
            return
        async with asyncio.TaskGroup() as tasks:
            for members in together.values():
                tasks.create_task(self._first_turn(members[0], members))

    async def _first_turn(self, sampling: _Rollout, members: Sequence[_Rollout]) -> None:
        completions = await sampling.sample(n=len(members), index=members[0].index)
        for member, completion in zip(members, completions, strict=True):
            member.first = completion
            member.trajectory.seconds["sample"] = sampling.trajectory.seconds["sample"]


class _Rollout:
    """One rollout while it is played."""

    __slots__ = ("conversation", "first", "index", "instance", "opening", "shared", "tools",
                 "trajectory")  # fmt: skip

    conversation: Conversation
    first: Completion

    def __init__(self, shared: Rollouts, prompt: Prompt, instance: Instance, index: int) -> None:
        self.shared = shared
        self.instance = instance
        self.index = index
        self.trajectory = Trajectory(prompt)
        self.opening: Sequence[Message] = ()
        self.tools: Sequence[ToolSpec] = ()
        if instance.error is not None:
            fail(self.trajectory, instance.error)

    @property
    def alive(self) -> bool:
        return self.trajectory.outcome == "ok"

    def fail(self, error: UserCodeError) -> None:
        """Set the outcome of this rollout, once."""
        self.instance.failed = True
        if self.alive and isinstance(error, UnusableError):
            self._fail("invalid", str(error))
        elif self.alive:
            fail(self.trajectory, error)

    async def reset(self) -> None:
        """Get the opening messages and the tools."""
        prompt, environment = self.trajectory.prompt, self.instance.environment
        self.opening = prompt.messages
        name = self._name("reset")
        try:
            prepare(name, environment, prompt)
            if self.instance.overrides("reset"):
                answer = await self._call("reset", lambda: environment.reset(prompt))
                self.opening = opening_of(name, answer)
            self.tools = tools_of(self.instance.name, environment)
        except UserCodeError as error:
            self.fail(error)

    def begin(self) -> None:
        try:
            self.conversation = self.shared.chat.begin(self.opening, self.tools)
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self._fail("invalid", f"{self._name('reset')}: {text_of(error)}")

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

    async def sample(self, n: int = 1, index: int | None = None) -> list[Completion]:
        """Sample `n` next turns, with the seed of the rollout `index`, by default this one.

        Raises DeadlineError, AdapterError and what the sampler raises.
        """
        shared, prompt_ids = self.shared, self.conversation.prompt_ids
        max_tokens = min(shared.params.max_tokens, shared.context_length - len(prompt_ids))
        seed = self._seed(self.index if index is None else index)
        params = replace(shared.params, max_tokens=max_tokens, seed=seed)
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
        trajectory, environment = self.trajectory, self.instance.environment
        if not self.instance.overrides("step"):
            return None
        try:
            answer = await self._call("step", lambda: environment.step(action))
            result = result_of(self._name("step"), answer)
        except UserCodeError as error:
            self.fail(error)
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
            self._fail("invalid", f"{self._name('step')}: {text_of(error)}")
            return None
        if len(self.conversation.prompt_ids) >= shared.context_length:
            trajectory.info["truncated"] = "context"
            return None
        try:
            [completion] = await self.sample()
        except UserCodeError as error:  # user code cancelled the task meanwhile
            self.fail(error)
            return None
        return completion

    async def _call(self, stage: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await user code within its deadline; raises UserCodeError."""
        limit: float = getattr(self.shared.deadlines, stage)
        started = time.perf_counter()
        try:
            answer = await user_call(self._name(stage), call, limit, stage, self.instance.abandon)
        except UserCodeError:
            self._took("environment", started)
            raise
        self._took("environment", started)
        return answer

    def _took(self, stage: str, started: float) -> None:
        self.shared.progress()
        seconds = self.trajectory.seconds
        # In microseconds: 17 digits of a float take long to write.
        seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - started, 6)

    def _fail(self, outcome: Outcome, error: str) -> None:
        self.trajectory.outcome = outcome
        self.trajectory.info["error"] = error

    def _name(self, stage: str) -> str:
        return f"{self.instance.name}.{stage}"

    def _seed(self, index: int) -> int:
        turn = len(self.trajectory.turns)
        key = f"{self.shared.seed}/{self.trajectory.prompt.id}/{index}/{turn}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") & 0x7FFFFFFF


class _Countdown:
    """A future that is done when `count` jobs are, or with the first error of one."""

    def __init__(self, count: int) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._left = count

    def done(self, error: BaseException | None) -> None:
        self._left -= 1
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        elif not self._left:
            self.future.set_result(None)


async def _each(
    rollouts: Sequence[_Rollout], hook: str, call: Callable[[_Rollout], Awaitable[None]]
) -> None:
    """Do `call` for the rollouts that are alive: in the instance's task if it overrides `hook`.

    The others call no user code and never wait.
    """
    alive = [rollout for rollout in rollouts if rollout.alive]
    away = [rollout for rollout in alive if rollout.instance.overrides(hook)]
    if not away:
        for rollout in alive:
            await call(rollout)
        return
    countdown = _Countdown(len(away))
    for rollout in away:
        rollout.instance.do(Job(partial(call, rollout), rollout.fail, countdown.done))
    for rollout in alive:
        if not rollout.instance.overrides(hook):
            await call(rollout)
    await countdown.future
