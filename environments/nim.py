"""Two players: take 1 to 3 sticks in turn; who takes the last one wins.

The prompt's answer is the number of sticks at the start. A player sees the number of sticks that
are left and answers with the number to take: one character each, which is one token of the model
`tiny`. The winner's reward is 1 and the loser's -1. An illegal move loses.

The player to move wins unless the number of sticks is a multiple of 4.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from retrain import Action, Environment, Message, Prompt, StepResult

MOST = 3
"""Sticks that a move may take."""


class Nim(Environment):
    """A game for the seats `first` and `second`, which take turns."""

    seats = ("first", "second")

    async def reset(self, prompt: Prompt) -> list[Message]:
        left = str(prompt.answer)
        if left not in list("123456789"):
            raise ValueError(f"the prompt's answer is {left!r}, expected 1 to 9 sticks")
        self.left, self.player = int(left), 0
        return [{"role": "user", "content": left}]

    async def step(self, action: Action) -> StepResult:
        mover, other = self.seats[self.player], self.seats[1 - self.player]
        take = taken(action.text, self.left)
        if take is None:
            return StepResult([], -1.0, True, False, {"rewards": {other: 1.0}, "illegal": mover})
        self.left -= take
        if not self.left:
            return StepResult([], 1.0, True, False, {"rewards": {other: -1.0}})
        self.player = 1 - self.player
        board: Message = {"role": "user", "content": str(self.left)}
        return StepResult([board], 0.0, False, False, {"seat": other})


def taken(text: str, left: int) -> int | None:
    """The sticks that a move takes; None if it is illegal."""
    text = text.strip()
    take = int(text) if text in ("1", "2", "3") else 0
    return take if 0 < take <= min(MOST, left) else None


def at_random(messages: Sequence[Message], seed: int) -> str:
    """An opponent that makes legal moves at random."""
    left = int(messages[-1]["content"])
    return str(random.Random(seed).randint(1, min(MOST, left)))
