"""Turn rows of the dataset into trajectories, without a model that plays them.

A given reply becomes a turn like a sampled one: the ids of the prompt, then the ids that the model
would have to sample, with the end of the turn. Its log-probs are 0.0 and its version is -1, since
it was not sampled. A row is trained whole or not at all: if it is too long, or the template rejects
it, it fails; a pair fails if one of its answers does.
"""

from __future__ import annotations

from retrain.algorithms.batching import segments
from retrain.chat import Chat, Conversation
from retrain.chat.tools import tools_of
from retrain.errors import UserCodeError
from retrain.prompts.examples import TOOLS, Continuation
from retrain.types import Completion, Group, Message, Prompt, Trajectory, Turn

GIVEN = -1
"""The version of a completion that was not sampled."""


class Playback:
    """Takes the place of a `Slot` where rows of the dataset are trained."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        """Rows of more than `max_length` tokens fail."""
        self._chat = chat
        self._max_length = max_length

    async def play(self, prompt: Prompt) -> Group:
        """One trajectory for each continuation of the row."""
        trajectories = [self._trajectory(prompt, said) for said in prompt.answer]
        failed = next((t for t in trajectories if t.outcome != "ok"), None)
        for trajectory in trajectories:
            if failed is not None and trajectory.outcome == "ok":
                trajectory.outcome, trajectory.info = failed.outcome, dict(failed.info)
        return Group(prompt, trajectories)

    async def close(self) -> None:
        """Nothing to close."""

    def _trajectory(self, prompt: Prompt, said: Continuation) -> Trajectory:
        trajectory = Trajectory(prompt)
        try:
            tools = tools_of(prompt.metadata.get(TOOLS))
            conversation = self._chat.begin(prompt.messages, tools, given=True)
            trajectory.turns = list(self._turns(conversation, said))
            trajectory.messages = conversation.messages
            self._check(trajectory, paired=len(prompt.answer) > 1)
        except (TypeError, ValueError, UserCodeError) as error:
            trajectory.outcome = "invalid"
            trajectory.info["error"] = f"row {prompt.ticket.row} (from 0): {error}"
        return trajectory

    def _turns(self, conversation: Conversation, said: Continuation) -> list[Turn]:
        turns: list[Turn] = []
        heard: list[Message] = []
        for message in said:
            if message["role"] != "assistant":
                heard.append(message)
                continue
            if heard:
                conversation.observe(heard)
                turns[-1] = Turn(turns[-1].prompt_ids, turns[-1].completion, heard)
                heard = []
            ids = conversation.spell(message)
            text = self._chat.tokens.text(ids)
            completion = Completion(ids, [0.0] * len(ids), text, "stop", GIVEN)
            turns.append(Turn(conversation.prompt_ids, completion))
            conversation.reply(completion)
        return turns

    def _check(self, trajectory: Trajectory, *, paired: bool) -> None:
        samples = segments(trajectory, 1.0, "")
        longest = max(len(sample.token_ids) for sample in samples)
        if longest > self._max_length:
            raise ValueError(
                f"it has {longest} tokens, expected at most {self._max_length}, the limit of the "
                "model or algorithm.max_length. Shorten it; rows are never truncated."
            )
        if paired and len(samples) > 1:
            raise ValueError(
                "the chat template rewrites its earlier turns, so an answer isn't a single "
                "sequence. With this template, each answer of a pair may have one assistant turn."
            )
