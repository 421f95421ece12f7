"""An episode of an agent: the environment's `run` calls the model at the endpoint of the run.

The calls are recorded (`calls.py`); an agent may have several seats, some of them of opponents.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from retrain.agents.calls import NOTHING, CallError, Calls, Reply, SampleCall, fitted
from retrain.chat import Chat
from retrain.environment import StepResult, ToolSpec
from retrain.errors import UserCodeError
from retrain.rollout.answers import result_of
from retrain.rollout.endings import as_result
from retrain.rollout.episode import Episode, Shared
from retrain.rollout.instance import Instance
from retrain.rollout.seats import Seats, opposed
from retrain.types import Completion, Message, Prompt, Trajectory

Ask = Callable[[str, Sequence[Message], str], Coroutine[Any, Any, str]]
"""Asks the opponent of a seat; the same key gets the same seed. Raises UserCodeError."""


class AgentRun(Episode):
    """One rollout of an environment with its own `run`."""

    __slots__ = ("seats",)

    own_play = True
    opens = False

    def __init__(
        self, shared: Shared, prompt: Prompt, instance: Instance, index: int, names: tuple[str, ...]
    ) -> None:
        super().__init__(shared, prompt, instance, index)
        self.seats = Seats(names, shared.opponents)

    async def play(self) -> None:
        """Let the agent play, and take what its calls sampled."""
        shared, environment = self.shared, self.instance.environment
        assert shared.door is not None, "the run opens an endpoint for such an environment"
        limits = shared.max_turns, shared.max_tokens
        ask = partial(opposed, self, self.seats)
        calls = SeatedCalls(shared.chat, self._sample, limits, self.seats, ask, shared.params.stop)
        result: StepResult | None = None
        error: UserCodeError | None = None
        async with shared.door.open(calls, environment.seats) as endpoint:
            try:
                answer = await self._played(lambda: environment.run(endpoint))
                result = result_of(self.name("run"), answer)
            except UserCodeError as raised:
                error = raised
        error = calls.opponent_error or error
        try:
            self._take(calls, result)
        except UserCodeError as raised:
            error = error or raised
        self._end(calls, error)

    async def _played(self, run: Callable[[], Awaitable[StepResult]]) -> StepResult:
        """What the agent returns; raises UserCodeError, and what the sampler raises meanwhile."""
        self.broken = asyncio.get_running_loop().create_future()
        playing = asyncio.create_task(self.call("run", run, "agent"))
        try:
            first: list[asyncio.Future[Any]] = [playing, self.broken]
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
            if self.broken.done():
                raise self.broken.result()
            return await playing
        finally:
            playing.cancel()
            await asyncio.wait([playing])

    def trajectories(self) -> list[Trajectory]:
        return self.seats.dealt(self.trajectory)

    def _take(self, calls: Calls, result: StepResult | None) -> None:
        """Take over an agent's calls and its result; raises UserCodeError for wrong rewards."""
        trajectory, seats = self.trajectory, self.seats
        trajectory.turns, seats.histories = calls.turns, calls.histories
        for turn in calls.turns:
            seats.earn(turn.seat, turn.reward)
        for seat in seats.histories:
            seats.earn(seat, calls.rewarded + (0.0 if result is None else result.reward))
        if result is not None:
            info = seats.note(self.name("run"), result.info)
            completion = info.pop("completion", None)
            trajectory.result = None if completion is None else str(completion)
            trajectory.info.update(info)

    def _end(self, calls: SeatedCalls, error: UserCodeError | None) -> None:
        """Tell a result from a fault, for what `error` or a limit has ended."""
        info = self.trajectory.info
        met: Mapping[str, Any] = {}
        if calls.opponent_error is None and calls.truncated:
            met = {"truncated": calls.truncated}  # an agent may well fail without more replies
        elif calls.opponent_error is None and error is not None:
            met = as_result(error, calls.turns, self.instance.environment.on_error)
        info.update(met)
        if error is not None and met:
            info["error"] = str(error)
        elif error is not None:
            self.fail(error)
        if self.alive and not calls.turns:
            self.set_outcome("invalid", f"{self.name('run')}: the agent {_silent(calls)}")

    async def _sample(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        """Sample for an agent's call; see `calls.SampleCall`."""
        shared, options = self.shared, {"seed": self.seed(key), **options}
        params = fitted(shared.params, prompt_ids, shared.context_length, options)
        try:
            return await self.sampled(prompt_ids, params, n)
        except Exception as error:
            if not self.broken.done():
                self.broken.set_result(error)
            raise


def _silent(calls: Calls) -> str:
    """Why an agent has sampled nothing."""
    if calls.truncated:
        return f"reached the limit {calls.truncated} at its first call"
    return (
        "never called the model at `base_url` with `api_key`. A function gets both as arguments; "
        "with `process: true`, and in a command, SDKs find them in OPENAI_BASE_URL and "
        "OPENAI_API_KEY"
    )


class SeatedCalls(Calls):
    """The calls of an agent's rollout, of which opponents answer those to their seats."""

    def __init__(
        self,
        chat: Chat,
        sample: SampleCall,
        limits: tuple[int, int | None],
        seats: Seats,
        ask: Ask,
        stop: Sequence[str] = (),
    ) -> None:
        """`limits` are `max_turns` and `max_tokens`."""
        super().__init__(chat, sample, *limits, stop=stop)
        self._seats, self._ask = seats, ask
        self.opponent_error: UserCodeError | None = None
        """What an opponent raised: the rollout fails with it."""
        self._repeats: Counter[str] = Counter()

    async def chat(
        self,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...] = (),
        n: int = 1,
        seat: str = "",
        options: Mapping[str, Any] = NOTHING,
        continues: bool = False,
    ) -> list[Reply]:
        if seat in self._seats.opponents:
            return await self._opposed(messages, n, seat)
        return await super().chat(messages, tools, n, seat, options, continues)

    async def complete(
        self,
        prompt: str | Sequence[int],
        n: int = 1,
        seat: str = "",
        options: Mapping[str, Any] = NOTHING,
    ) -> list[Reply]:
        if seat not in self._seats.opponents:
            return await super().complete(prompt, n, seat, options)
        if not isinstance(prompt, str):
            raise CallError(
                400, "invalid_request_error", f"prompt: {seat} takes a string, not token ids"
            )
        return await self._opposed([Message(role="user", content=prompt)], n, seat)

    async def _opposed(self, messages: Sequence[Message], n: int, seat: str) -> list[Reply]:
        self._admit(n)
        self._reserved += n  # for good: they count as turns
        said = hashlib.sha256(json.dumps(messages, default=str).encode()).hexdigest()
        replies = []
        for _ in range(n):
            # Parallel calls come in any order, so the seed depends on what is asked.
            key = f"{said}/{self._repeats[said]}"
            self._repeats[said] += 1
            self._seats.replies += 1
            number = self._seats.replies
            try:
                text = await self._while_open(self._ask(seat, messages, key))
            except UserCodeError as error:
                self.opponent_error = self.opponent_error or error
                raise CallError(503, "server_error", str(error)) from error
            completion = Completion((), (), text, "stop", -1)
            replies.append(Reply(-number, text, "", (), completion, 0))
        return replies
