"""Play a group: G rollouts of one prompt, each in its own Environment.

After reset, rollouts with equal prompts share one `sample(n=...)`, so that the prompt is prefilled
once. An environment that fails sets the outcome of its rollout only; a sampler that fails ends the
run. Seeds depend on the ticket, the rollout and the turn, never on timing.

An environment that overrides `run` plays its whole rollout with an agent that calls the endpoint of
the run (`calls.py`). A rollout with several seats has one conversation and one trajectory per seat
(`seats.py`), and opponents may speak for some of them (`opponents.py`).
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from copy import copy
from functools import partial
from typing import Any, Protocol, TypeVar

from retrain.chat import Chat, Conversation
from retrain.config import RunConfig
from retrain.environment import Action, Endpoint, StepResult, ToolSpec
from retrain.errors import AdapterError, ConfigError, UserCodeError, text_of
from retrain.rewarding import fail
from retrain.rewarding.calls import together
from retrain.rollout.answers import UnusableError, opening_of, prepare, result_of, tools_of
from retrain.rollout.calls import NOTHING, Calls, fitted
from retrain.rollout.endings import as_result
from retrain.rollout.instance import Instance
from retrain.rollout.opponents import Opponent
from retrain.rollout.seats import SeatedCalls, Seats, seats_of
from retrain.sampler import Sampler, SamplingParams
from retrain.supervision.boundary import adapter_call, outcomes
from retrain.types import Completion, Group, Message, Outcome, Prompt, Trajectory

T = TypeVar("T")


class Door(Protocol):
    """Gives the agent of a rollout an endpoint: `retrain.endpoint.EndpointServer`."""

    def open(self, calls: Calls, seats: Sequence[str]) -> AbstractAsyncContextManager[Endpoint]: ...


class Rollouts:
    """Plays groups, with the sampler, the chat format and the limits of a run.

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
        opponents: Mapping[str, Opponent] = NOTHING,
    ) -> None:
        self.sampler, self.chat, self.progress, self.door = sampler, chat, progress, door
        self.params = SamplingParams(**dict(config.sampling), stop_token_ids=chat.stop_token_ids)
        self.context_length = min(
            context_length, config.rollout.max_sequence_length or context_length
        )
        self.max_turns, self.max_tokens = config.rollout.max_turns, config.rollout.max_tokens
        self.deadlines = config.deadlines
        self.seed = config.train.seed
        self.opponents = opponents

    def held_out(self, sampler: Sampler, opponents: Mapping[str, Opponent]) -> Rollouts:
        """The same with the sampler and the opponents of an evaluation."""
        other = copy(self)
        other.sampler, other.opponents = sampler, opponents
        return other

    async def play(self, prompt: Prompt, instances: Sequence[Instance]) -> Group:
        """Play one rollout of `prompt` in each instance; one that isn't set up fails.

        Raises AdapterError or DeadlineError when the sampler fails.
        """
        rollouts = [
            _Rollout(self, prompt, instance, index) for index, instance in enumerate(instances)
        ]
        await _each(rollouts, "reset", _Rollout.reset, _Rollout.show)
        if any("run" in instance.overridden for instance in instances):
            await _each(rollouts, "run", _Rollout.run, lambda rollout: None)
        else:
            await self._first_turns(rollouts, self._begin(rollouts))
            await _each(rollouts, "step", _Rollout.play, _Rollout.end)
        return Group(prompt, [t for r in rollouts for t in r.seats.dealt(r.trajectory)])

    def _begin(self, rollouts: Sequence[_Rollout]) -> list[list[_Rollout]]:
        """Tokenise the opening messages, equal ones once; return the rollouts with equal ones."""
        begun: list[_Rollout] = []
        together: dict[int, list[_Rollout]] = {}
        for rollout in [r for r in rollouts if r.opens]:
            for other in begun:
                if other.opening == rollout.opening and other.tools == rollout.tools:
                    same = other.conversation  # only `step` changes it
                    changes = "step" in rollout.instance.overridden
                    rollout.conversation = same.fork() if changes else same
                    break
            else:
                rollout.begin()
            if rollout.alive:
                begun.append(rollout)
                prompt_ids = rollout.conversation.prompt_ids
                rollout.trajectory.tools = rollout.conversation.tools
                if len(prompt_ids) < self.context_length:  # equal openings share one list
                    together.setdefault(id(prompt_ids), []).append(rollout)
                else:
                    rollout.has_no_room()
        return list(together.values())

    async def _first_turns(
        self, rollouts: Sequence[_Rollout], together: Sequence[Sequence[_Rollout]]
    ) -> None:
        """Sample all first turns, those of equal prompts `together`."""
        if len(together) == 1:  # a failed one keeps its place: the others sample what they would
            await self._first_turn(together[0][0], rollouts)
            return
        async with asyncio.TaskGroup() as tasks:
            for members in together:
                tasks.create_task(self._first_turn(members[0], members))

    async def _first_turn(self, sampling: _Rollout, members: Sequence[_Rollout]) -> None:
        completions = await sampling.sample(n=len(members), index=members[0].index)
        seconds = sampling.trajectory.seconds["sample"]
        for member, completion in zip(members, completions, strict=True):
            member.first = completion
            member.trajectory.seconds["sample"] = seconds


class _Rollout:
    """One rollout while it is played."""

    __slots__ = ("alive", "broken", "conversation", "first", "index", "instance", "opening",
                 "seats", "shared", "tools", "trajectory")  # fmt: skip

    broken: asyncio.Future[Exception]
    """The error of the sampler, while an agent still runs: it ends the group."""
    conversation: Conversation
    """Of the seat that speaks."""
    first: Completion
    opening: Sequence[Message]
    tools: Sequence[ToolSpec]
    trajectory: Trajectory
    """The whole rollout; `Seats.dealt` makes one of each seat."""

    def __init__(self, shared: Rollouts, prompt: Prompt, instance: Instance, index: int) -> None:
        self.shared = shared
        self.instance = instance
        self.index = index
        if index:  # dataclasses.replace takes three times as long
            own = prompt.id, prompt.messages, prompt.answer, prompt.metadata, prompt.seed
            prompt = Prompt(*own, index, prompt.plain)
        self.trajectory = Trajectory(prompt, index=index)
        self.seats = NO_SEATS
        self.alive = instance.error is None
        if instance.error is not None:
            fail(self.trajectory, instance.error)

    def fail(self, error: UserCodeError) -> None:
        """Set the outcome of this rollout, once."""
        if self.alive and isinstance(error, UnusableError):
            self._fail("invalid", str(error))
        elif self.alive:
            self.alive = False
            fail(self.trajectory, error)

    @property
    def opens(self) -> bool:
        """Whether the model speaks first."""
        seats = self.seats
        return self.alive and (not seats.opponents or seats.opponent is None)

    async def reset(self) -> None:
        """Get the opening messages and the tools."""
        prompt, environment = self.trajectory.prompt, self.instance.environment
        name = self._name("reset")
        try:
            prepare(self.instance.name, environment, prompt)
            self._seat()
            answer = await self._call("reset", lambda: environment.reset(prompt))
            self.opening = opening_of(name, answer)
            self.tools = tools_of(self.instance.name, environment)
        except UserCodeError as error:
            self.fail(error)

    def show(self) -> None:
        """`reset` of an environment without its own: the prompt's messages."""
        prompt, instance = self.trajectory.prompt, self.instance
        environment = instance.environment
        self.opening = prompt.messages
        try:
            prepare(instance.name, environment, prompt)
            self._seat()
            self.tools = tools_of(instance.name, environment)
        except UserCodeError as error:
            self.fail(error)

    def _seat(self) -> None:
        """Take the environment's seats; raises UserCodeError."""
        names = seats_of(self.instance.name, self.instance.environment)
        if not names:
            return
        if self.instance.overridden.isdisjoint(("step", "run")):
            raise UserCodeError(f"{self.instance.name} has seats, so it must override step or run")
        self.seats = Seats(names, self.shared.opponents)

    def begin(self) -> None:
        try:
            self.conversation = self.shared.chat.begin(self.opening, self.tools)
        except ConfigError:  # of chat.tools
            raise
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self._fail("invalid", f"{self._name('reset')}: {text_of(error)}")

    def has_no_room(self) -> None:
        """The prompt fills the context: the rollout fails."""
        self._fail(
            "invalid",
            f"prompt {self.trajectory.prompt.id} has {len(self.conversation.prompt_ids)} tokens, "
            f"expected fewer than {self.shared.context_length}, the model's context or "
            "rollout.max_sequence_length. Shorten the prompt, or raise the limit.",
        )

    async def play(self) -> None:
        """Play turn after turn, until the environment or a limit ends the episode."""
        turns, seats = self.trajectory.turns, self.seats
        completion: Completion | None
        if seats.opponent is not None:
            completion = await self._answer(StepResult(self.opening, 0.0, False, False, {}))
        else:
            completion = self.first
            if seats.names:
                seats.conversations[seats.speaker] = self.conversation
        while completion is not None:
            conversation, seat = self.conversation, seats.speaker
            action = conversation.reply(completion)
            result = await self._step(action)
            observation, reward = ((), 0.0) if result is None else result[:2]
            turns.append(conversation.turn(observation, seat, reward))
            completion = None if result is None else await self._answer(result)
        if not seats.names:
            self.trajectory.messages = self.conversation.messages

    async def run(self) -> None:
        """Let the agent play, and take what its calls sampled."""
        shared, environment = self.shared, self.instance.environment
        assert shared.door is not None, "the run opens an endpoint for such an environment"
        limits = shared.max_turns, shared.max_tokens
        if not self.seats.names:
            self.seats = Seats()
        stop = shared.params.stop
        calls = SeatedCalls(shared.chat, self._sample_for, limits, self.seats, self._ask, stop)
        result: StepResult | None = None
        error: UserCodeError | None = None
        async with shared.door.open(calls, environment.seats) as endpoint:
            try:
                answer = await self._agent(lambda: environment.run(endpoint))
                result = result_of(self._name("run"), answer)
            except UserCodeError as raised:
                error = raised
        error = calls.opponent_error or error
        try:
            self._take(calls, result)
        except UserCodeError as raised:
            error = error or raised
        met: Mapping[str, Any] = {}
        if calls.opponent_error is None:
            if calls.truncated:  # an agent may well fail when it gets no more replies
                met = {"truncated": calls.truncated}
            elif error is not None:
                met = as_result(error, calls.turns, environment.on_error)
        self.trajectory.info.update(met)
        if error is not None and met:
            self.trajectory.info["error"] = str(error)
        elif error is not None:
            self.fail(error)
        if self.alive and not calls.turns:
            why = (
                f"reached the limit {calls.truncated} at its first call" if calls.truncated else ""
            )
            why = why or (
                "never called the model at `base_url` with `api_key`. A function gets both as "
                "arguments; with `process: true`, and in a command, SDKs find them in "
                "OPENAI_BASE_URL and OPENAI_API_KEY"
            )
            self._fail("invalid", f"{self._name('run')}: the agent {why}")

    async def _agent(self, run: Callable[[], Awaitable[StepResult]]) -> StepResult:
        """What the agent returns; raises UserCodeError, and what the sampler raises meanwhile."""
        self.broken = asyncio.get_running_loop().create_future()
        playing = asyncio.create_task(self._call("run", run, "agent"))
        try:
            first: list[asyncio.Future[Any]] = [playing, self.broken]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                raise self.broken.result()
            return await playing
        finally:
            playing.cancel()
            await asyncio.wait([playing])

    def _take(self, calls: Calls, result: StepResult | None) -> None:
        """Take over an agent's calls and its result; raises UserCodeError for wrong rewards."""
        trajectory, seats = self.trajectory, self.seats
        trajectory.turns, seats.histories = calls.turns, calls.histories
        for turn in calls.turns:
            seats.earn(turn.seat, turn.reward)
        for seat in seats.histories:
            seats.earn(seat, calls.rewarded + (0.0 if result is None else result.reward))
        if result is not None:
            info = seats.note(self._name("run"), result.info)
            completion = info.pop("completion", None)
            trajectory.result = None if completion is None else str(completion)
            trajectory.info.update(info)

    async def _sample_for(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        """Sample for an agent's call; see `calls.Sample`."""
        params = self._params(prompt_ids, {"seed": self._seed(key), **options})
        try:
            return await self._sampled(prompt_ids, params, n)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_result(error)
            raise

    def end(self) -> None:
        """`play` of an environment without its own `step`: the first turn is the only one."""
        trajectory, conversation = self.trajectory, self.conversation
        turn, trajectory.messages = conversation.ended_by(self.first)
        trajectory.turns.append(turn)

    async def sample(self, n: int = 1, index: int | None = None) -> list[Completion]:
        """Sample `n` next turns, with the seed of the rollout `index`, by default this one.

        Raises DeadlineError, AdapterError and what the sampler raises.
        """
        seed = self._seed(str(len(self.trajectory.turns)), index)
        prompt_ids = self.conversation.prompt_ids
        return await self._sampled(prompt_ids, self._params(prompt_ids, {"seed": seed}), n)

    def _params(self, prompt_ids: Sequence[int], options: Mapping[str, Any]) -> SamplingParams:
        return fitted(self.shared.params, prompt_ids, self.shared.context_length, options)

    async def _sampled(
        self, prompt_ids: list[int], params: SamplingParams, n: int
    ) -> list[Completion]:
        shared = self.shared
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
        trajectory, environment, seats = self.trajectory, self.instance.environment, self.seats
        try:
            answer = await self._call("step", lambda: environment.step(action))
            result = result_of(self._name("step"), answer)
            if seats.names:
                seats.earn(seats.speaker, result.reward)
            else:
                rewards = trajectory.rewards
                rewards["environment"] = rewards.get("environment", 0.0) + result.reward
            trajectory.info.update(seats.note(self._name("step"), result.info))
        except UserCodeError as error:
            self.fail(error)
            return None
        return result

    async def _answer(self, result: StepResult) -> Completion | None:
        """Let opponents speak until a trained seat is next; None when the episode is over."""
        trajectory, seats = self.trajectory, self.seats
        answered: StepResult | None = result
        while answered is not None and not (answered.terminated or answered.truncated):
            if len(trajectory.turns) + seats.replies >= self.shared.max_turns:
                trajectory.info["truncated"] = "max_turns"
                return None
            if seats.opponent is None:
                return await self._next(answered.observation)
            try:
                text = await seats.opposed(self._ask, answered.observation)
            except UserCodeError as error:
                self.fail(error)
                return None
            answered = await self._step(Action(text))
        return None

    async def _ask(self, seat: str, messages: Sequence[Message], key: str) -> str:
        """The reply of a seat's opponent, within `deadlines.step`; raises UserCodeError."""
        opponent, seed = self.seats.opponents[seat], self._seed(f"{seat}/{key}")
        name, limit = f"opponents.{seat} ({opponent.name})", self.shared.deadlines.step
        started = time.perf_counter()
        [answer] = await outcomes(name, partial(opponent.reply, messages), [seed], limit, "step")
        self._took("environment", started)
        if isinstance(answer, UserCodeError):
            raise answer
        return answer

    async def _next(self, observation: Sequence[Message]) -> Completion | None:
        """Add the observation and sample the next turn; None when the episode ends."""
        trajectory, shared, seats = self.trajectory, self.shared, self.seats
        try:
            if seats.names:
                self.conversation = seats.heard(shared.chat, observation, self.tools)
            else:
                self.conversation.observe(observation)
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self._fail("invalid", f"{self._name('step')}: {text_of(error)}")
            return None
        if len(self.conversation.prompt_ids) >= shared.context_length:
            trajectory.info["truncated"] = "context"
            return None
        [completion] = await self.sample()
        return completion

    async def _call(self, stage: str, call: Callable[[], Awaitable[T]], key: str = "") -> T:
        """Await user code within its deadline; raises UserCodeError."""
        started = time.perf_counter()
        try:
            return await self.instance.call(stage, call, key)
        finally:
            self._took("environment", started)

    def _took(self, stage: str, started: float) -> None:
        self.shared.progress()
        seconds = self.trajectory.seconds
        # In microseconds: 17 digits of a float take long to write.
        seconds[stage] = round(seconds.get(stage, 0.0) + time.perf_counter() - started, 6)

    def _fail(self, outcome: Outcome, error: str) -> None:
        self.alive = False
        self.trajectory.outcome = outcome
        self.trajectory.info["error"] = error

    def _name(self, stage: str) -> str:
        return f"{self.instance.name}.{stage}"

    def _seed(self, turn: str, index: int | None = None) -> int:
        rollout = self.index if index is None else index
        key = f"{self.shared.seed}/{self.trajectory.prompt.id}/{rollout}/{turn}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") & 0x7FFFFFFF


NO_SEATS = Seats()
"""Shared by all rollouts without seats, which never change it."""


async def _each(
    rollouts: Sequence[_Rollout],
    hook: str,
    call: Callable[[_Rollout], Coroutine[Any, Any, None]],
    otherwise: Callable[[_Rollout], None],
) -> None:
    """Do `call` for the rollouts whose instances override `hook`, and `otherwise` for others."""
    alive = [rollout for rollout in rollouts if rollout.alive]
    for rollout in alive:
        if hook not in rollout.instance.overridden:
            otherwise(rollout)
    try:
        await together([call(r) for r in alive if hook in r.instance.overridden])
    except ExceptionGroup as group:  # of the sampler: those of the others are alike
        raise group.exceptions[0] from None
