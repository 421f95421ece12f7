"""The seats of one rollout: who speaks next, what each has heard, and what each has earned.

The seats of an environment are the parties that it names, such as players. Each has a conversation
of its own, which its first observation opens, and a trajectory of its own. Opponents may speak for
some of them (`opponents.py`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from retrain.chat import Conversation
from retrain.environment import Action, StepResult
from retrain.errors import UserCodeError, shown
from retrain.rollout.episode import Episode, Shared
from retrain.rollout.instance import Instance
from retrain.rollout.opponents import Opponent
from retrain.rollout.steps import Steps
from retrain.scoring import as_number
from retrain.supervision.boundary import boundary, outcomes
from retrain.types import Completion, Message, Prompt, Trajectory

Tools = Sequence[Mapping[str, Any]]


class Seats:
    """The parties of a rollout while it is played."""

    def __init__(self, names: tuple[str, ...], opponents: Mapping[str, Opponent]) -> None:
        self.names = names
        self.opponents = {name: opponents[name] for name in names if name in opponents}
        self.trained = [name for name in names if name not in opponents] or [""]
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
        if self.names:
            with boundary(owner):
                self._note(owner, info)
        return info

    def _note(self, owner: str, info: dict[str, Any]) -> None:
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

    def dealt(self, whole: Trajectory) -> list[Trajectory]:
        """The trajectory of each trained seat that has spoken.

        If the rollout has failed, or no trained seat has spoken, it is one of each trained seat.
        """
        self.histories |= {s: (c.messages, c.tools) for s, c in self.conversations.items()}
        spoken = {turn.seat for turn in whole.turns} if whole.outcome == "ok" else set()
        heard = [name for name in self.trained if name in spoken]
        return [self._of(seat, whole) for seat in heard or self.trained]

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


class SeatedSteps(Steps):
    """An episode of steps in which several seats speak."""

    __slots__ = ("seats",)

    def __init__(
        self, shared: Shared, prompt: Prompt, instance: Instance, index: int, names: tuple[str, ...]
    ) -> None:
        super().__init__(shared, prompt, instance, index)
        self.seats = Seats(names, shared.opponents)

    @property
    def opens(self) -> bool:  # type: ignore[override]
        return self.seats.opponent is None

    @property
    def speaker(self) -> str:  # type: ignore[override]
        return self.seats.speaker

    async def play(self) -> None:
        seats = self.seats
        if seats.opponent is not None:
            await self.play_from(await self.answer(StepResult(self.opening, 0.0, False, False, {})))
        else:
            seats.conversations[seats.speaker] = self.conversation
            await self.play_from(self.first)

    def trajectories(self) -> list[Trajectory]:
        return self.seats.dealt(self.trajectory)

    def earn(self, result: StepResult) -> None:
        self.seats.earn(self.seats.speaker, result.reward)
        self.trajectory.info.update(self.seats.note(self.name("step"), result.info))

    async def answer(self, result: StepResult) -> Completion | None:
        """Let opponents speak until a trained seat is next; None when the episode is over."""
        seats = self.seats
        answered: StepResult | None = result
        while answered is not None and not (answered.terminated or answered.truncated):
            if self.is_long(seats.replies):
                return None
            if seats.opponent is None:
                return await self.next(answered.observation)
            try:
                text = await self._opposed(answered.observation)
            except UserCodeError as error:
                self.fail(error)
                return None
            answered = await self.step(Action(text))
        return None

    def heard(self, observation: Sequence[Message]) -> Conversation:
        conversations, seat = self.seats.conversations, self.seats.speaker
        if seat in conversations:
            conversations[seat].observe(observation)
        else:
            conversations[seat] = self.shared.chat.begin(observation, self.tools)
        return conversations[seat]

    async def _opposed(self, observation: Sequence[Message]) -> str:
        """What the opponent who speaks next replies to `observation`; raises UserCodeError."""
        seats = self.seats
        before, tools = seats.histories.get(seats.speaker, ((), ()))
        asked = [*before, *observation]
        text = await opposed(self, seats, seats.speaker, asked, str(seats.replies))
        said = Message(role="assistant", content=text)
        seats.histories[seats.speaker] = [*asked, said], tools
        seats.replies += 1
        return text


async def opposed(
    episode: Episode, seats: Seats, seat: str, messages: Sequence[Message], key: str
) -> str:
    """The reply of a seat's opponent, within `deadlines.step`; the same `key` has the same seed.

    Raises UserCodeError.
    """
    opponent, seed = seats.opponents[seat], episode.seed(f"{seat}/{key}")
    name, limit = f"opponents.{seat} ({opponent.name})", episode.shared.deadlines.step
    started = time.perf_counter()
    [answer] = await outcomes(name, partial(opponent.reply, messages), [seed], limit, "step")
    episode.took("environment", started)
    if isinstance(answer, UserCodeError):
        raise answer
    return answer
