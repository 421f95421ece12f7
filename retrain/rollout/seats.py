"""The seats of one rollout: who speaks next, what each has heard, and what each has earned.

The seats of an environment are the parties that it names, such as players. Each has a conversation
of its own, which its first observation opens. A rollout without seats has one, named "".
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

from retrain.chat import Chat, Conversation
from retrain.environment import Environment, ToolSpec
from retrain.errors import UserCodeError, shown
from retrain.rewarding import as_number
from retrain.rollout.calls import NOTHING, CallError, Calls, Reply, Sample
from retrain.rollout.opponents import Opponent
from retrain.supervision.boundary import boundary
from retrain.types import Completion, Message, Trajectory

Tools = Sequence[Mapping[str, Any]]
Ask = Callable[[str, Sequence[Message], str], Coroutine[Any, Any, str]]
"""Asks the opponent of a seat; the same key gets the same seed. Raises UserCodeError."""


def seats_of(owner: str, environment: Environment) -> tuple[str, ...]:
    """The names of an environment's seats; raises UserCodeError that names `owner`."""
    with boundary(owner):
        seats = environment.seats
        if seats is Environment.seats:
            return ()
        listed = isinstance(seats, list | tuple) and all(isinstance(s, str) and s for s in seats)
        if not listed or len(set(seats)) < len(seats):
            raise UserCodeError(f"{owner}: got the seats {shown(seats)}, expected different names")
        return tuple(seats)


class Seats:
    """The parties of a rollout while it is played."""

    __slots__ = ("conversations", "earned", "histories", "names", "opponents", "replies", "speaker")

    def __init__(
        self, names: tuple[str, ...] = (), opponents: Mapping[str, Opponent] = NOTHING
    ) -> None:
        self.names = names
        self.opponents = {name: opponents[name] for name in names if name in opponents}
        self.speaker = names[0] if names else ""
        """Who speaks next."""
        self.conversations: dict[str, Conversation] = {}
        """Of the trained seats that have heard something."""
        self.histories: dict[str, tuple[Sequence[Message], Tools]] = {}
        """The messages and tools of each seat that an agent called, or an opponent spoke for."""
        self.earned: dict[str, float] = {}
        """The environment's reward of each seat."""
        self.replies = 0
        """How often opponents have spoken."""

    @property
    def opponent(self) -> Opponent | None:
        """Who speaks next, if that is an opponent."""
        return self.opponents.get(self.speaker)

    def earn(self, seat: str, reward: float) -> None:
        self.earned[seat] = self.earned.get(seat, 0.0) + reward

    def note(self, owner: str, info: dict[str, Any]) -> dict[str, Any]:
        """Take `seat`, who speaks next, and `rewards`, which are added, out of `info`.

        Raises UserCodeError that names `owner`.
        """
        if not self.names:
            return info
        with boundary(owner):
            return self._noted(owner, info)

    def _noted(self, owner: str, info: dict[str, Any]) -> dict[str, Any]:
        self.speaker = info.pop("seat", self.speaker)
        rewards = info.pop("rewards", None) or {}
        if not isinstance(rewards, Mapping):
            raise UserCodeError(
                f"{owner} returned info['rewards'] {shown(rewards)}, expected one reward per seat"
            )
        for seat in (self.speaker, *rewards):
            if seat not in self.names:
                raise UserCodeError(
                    f"{owner} returned the seat {shown(seat)}, expected one of "
                    f"{', '.join(self.names)}"
                )
        for seat, reward in rewards.items():
            value = as_number(reward)
            if value is None:
                raise UserCodeError(
                    f"{owner} returned the reward {shown(reward)} of {seat}, expected a finite "
                    "number"
                )
            self.earn(seat, value)
        return info

    def heard(
        self, chat: Chat, observation: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> Conversation:
        """The conversation of who speaks next, after `observation`; raises what `observe` does."""
        conversation = self.conversations.get(self.speaker)
        if conversation is None:
            conversation = self.conversations[self.speaker] = chat.begin(observation, tools)
        else:
            conversation.observe(observation)
        return conversation

    async def opposed(self, ask: Ask, observation: Sequence[Message]) -> str:
        """What the opponent who speaks next replies to `observation`; raises UserCodeError."""
        before, tools = self.histories.get(self.speaker, ((), ()))
        asked = [*before, *observation]
        text = await ask(self.speaker, asked, str(self.replies))
        self.histories[self.speaker] = [*asked, Message(role="assistant", content=text)], tools
        self.replies += 1
        return text

    def dealt(self, whole: Trajectory) -> list[Trajectory]:
        """The trajectory of each trained seat that has spoken.

        If the rollout has failed, or no trained seat has spoken, it is one of each trained seat.
        """
        if not self.names and not self.histories:
            return [whole]
        for seat, conversation in self.conversations.items():
            self.histories[seat] = conversation.messages, conversation.tools
        spoken = {turn.seat for turn in whole.turns}
        trained = [name for name in self.names if name not in self.opponents] or [""]
        heard = [name for name in trained if name in spoken and whole.outcome == "ok"]
        return [self._of(seat, whole) for seat in heard or trained]

    def _of(self, seat: str, whole: Trajectory) -> Trajectory:
        numbers = [number for number, turn in enumerate(whole.turns) if turn.seat == seat]
        place = {number: index for index, number in enumerate(numbers)}
        turns = [whole.turns[number] for number in numbers]
        messages, tools = self.histories.get(seat, ((), ()))
        return replace(
            whole,
            seat=seat,
            turns=[t if t.parent is None else t._replace(parent=place[t.parent]) for t in turns],
            rewards={"environment": self.earned.get(seat, 0.0)},
            info=dict(whole.info),
            messages=messages,
            tools=tools,
            seconds=dict(whole.seconds),
        )


class SeatedCalls(Calls):
    """The calls of an agent's rollout, of which opponents answer those to their seats."""

    def __init__(
        self,
        chat: Chat,
        sample: Sample,
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
