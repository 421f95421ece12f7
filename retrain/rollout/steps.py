"""An episode of steps: the environment answers each turn, until it or a limit ends the episode."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.chat import Conversation
from retrain.environment import Action, StepResult
from retrain.errors import UserCodeError, text_of
from retrain.rollout.answers import result_of
from retrain.rollout.episode import Episode
from retrain.types import Completion, Message


class Steps(Episode):
    """One rollout of an environment with its own `step`."""

    __slots__ = ()

    own_play = True
    speaker = ""
    """The seat that speaks next."""

    async def play(self) -> None:
        """Play turn after turn."""
        await self.play_from(self.first)
        self.trajectory.messages = self.conversation.messages

    async def play_from(self, completion: Completion | None) -> None:
        """Play on from a sampled turn."""
        while completion is not None:
            conversation, seat = self.conversation, self.speaker
            action = conversation.reply(completion)
            result = await self.step(action)
            observation, reward = ((), 0.0) if result is None else result[:2]
            self.trajectory.turns.append(conversation.turn(observation, seat, reward))
            completion = None if result is None else await self.answer(result)

    async def step(self, action: Action) -> StepResult | None:
        """The result of the environment's `step`; None when the episode ends here."""
        environment = self.instance.environment
        try:
            answer = await self.call("step", lambda: environment.step(action))
            result = result_of(self.name("step"), answer)
            self.earn(result)
        except UserCodeError as error:
            self.fail(error)
            return None
        return result

    def earn(self, result: StepResult) -> None:
        """Take the reward and the info of a step."""
        rewards = self.trajectory.rewards
        rewards["environment"] = rewards.get("environment", 0.0) + result.reward
        self.trajectory.info.update(result.info)

    async def answer(self, result: StepResult) -> Completion | None:
        """The turn that follows a step; None when the episode is over."""
        if result.terminated or result.truncated or self.is_long():
            return None
        return await self.next(result.observation)

    def is_long(self, others: int = 0) -> bool:
        """Whether the turns, with those of `others`, have reached the limit."""
        if len(self.trajectory.turns) + others < self.shared.max_turns:
            return False
        self.trajectory.info["truncated"] = "max_turns"
        return True

    async def next(self, observation: Sequence[Message]) -> Completion | None:
        """Add the observation and sample the next turn; None when the episode ends."""
        try:
            self.conversation = self.heard(observation)
        except Exception as error:  # noqa: BLE001 - the environment's messages are at fault
            self.set_outcome("invalid", f"{self.name('step')}: {text_of(error)}")
            return None
        if len(self.conversation.prompt_ids) >= self.shared.context_length:
            self.trajectory.info["truncated"] = "context"
            return None
        try:
            [completion] = await self.sample()
        except UserCodeError as error:  # user code cancelled the task meanwhile
            self.fail(error)
            return None
        return completion

    def heard(self, observation: Sequence[Message]) -> Conversation:
        """The conversation of who speaks next, after `observation`; raises what `observe` does."""
        self.conversation.observe(observation)
        return self.conversation
