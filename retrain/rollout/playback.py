"""Rows of the data set as trajectories: what a rollout is made of, without a model that plays it.

A given reply becomes a turn like a sampled one: the prompt's ids, then the ids that the model would
have had to sample, the end of its turn included. Its log-probs are 0.0 and its version is -1, since
nobody sampled it. A row is trained whole or not at all: one that is too long, or that the template
refuses, fails with its cause, and so does a pair whose one answer does.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrain.batching import segments
from retrain.chat import Chat, Conversation
from retrain.chat.tools import tools_of
from retrain.errors import UserCodeError
from retrain.prompts.examples import TOOLS, Continuation
from retrain.types import Completion, Group, Message, Prompt, Trajectory, Turn

GIVEN = -1
"""The version of a completion that no weights sampled."""


class Playback:
    """Plays the rows of an example source; stands where a `slots.Slot` does."""

    def __init__(self, chat: Chat, max_length: int) -> None:
        """Rows of more than `max_length` tokens fail."""
        self._chat = chat
        self._max_length = max_length

    async def play(self, prompt: Prompt) -> Group:
        """One trajectory for each continuation that the row holds."""
        trajectories = [self._trajectory(prompt, said) for said in prompt.answer]
        failed = next((t for t in trajectories if t.outcome != "ok"), None)
        for trajectory in trajectories:
            if failed is not None and trajectory.outcome == "ok":
                trajectory.outcome, trajectory.info = failed.outcome, dict(failed.info)
        return Group(prompt, trajectories)

    async def close(self) -> None:
        """Nothing is held."""

    def _trajectory(self, prompt: Prompt, said: Continuation) -> Trajectory:
        trajectory = Trajectory(prompt)
        try:
            tools = tools_of(prompt.metadata.get(TOOLS))
            conversation = self._chat.begin(prompt.messages, tools)
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
            completion = self._completion(conversation.spell(message))
            turns.append(Turn(conversation.prompt_ids, completion))
            conversation.reply(completion)
        return turns

    def _completion(self, token_ids: Sequence[int]) -> Completion:
        text = self._chat.tokens.text(token_ids)
        return Completion(token_ids, [0.0] * len(token_ids), text, "stop", GIVEN)

    def _check(self, trajectory: Trajectory, *, paired: bool) -> None:
        samples = segments(trajectory, 1.0, "")
        longest = max(len(sample.token_ids) for sample in samples)
        if longest > self._max_length:
            raise ValueError(
                f"it has {longest} tokens, more than the {self._max_length} that the model or "
                "algorithm.max_length admits: shorten it (rows are never cut)"
            )
        if paired and len(samples) > 1:
            raise ValueError(
                "the chat template rewrites its earlier turns, so that an answer is no single "
                "sequence: a pair may have one assistant turn an answer with this template"
            )
