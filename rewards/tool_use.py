"""Half for making the expected tool call, half for the answer that follows it.

A row says what to expect: `call`, the first turn's text, and `answer`. Both halves are slopes that
a model can climb from nothing. The call earns the share of its pieces in their places: its markup
up to the argument is a piece, its end is another, and so is each character of the argument. An
answer that is given without asking a tool earns nothing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from retrain import Reward, Trajectory, reward

PIECE = re.compile(
    r'<tool_call>{"name": "\w+", "arguments": {"\w+": "|"}}</tool_call>|.', re.DOTALL
)


@reward
def tool_use(trajectory: Trajectory, answer: str, metadata: Mapping[str, Any]) -> Reward:
    """The mean of `call` and `answer`; the row says which call is expected, in its key `call`."""
    made, expected = (
        PIECE.findall(text) for text in (trajectory.turns[0].completion.text, metadata["call"])
    )
    call = in_place(made, expected) / max(len(made), len(expected))
    answered = 0.0
    if len(trajectory.turns) > 1:
        said = trajectory.completion.strip()
        answered = (in_place(said, answer) / len(answer) + (said == answer)) / 2
    return Reward((call + answered) / 2, {"call": call, "answer": answered})


def in_place(said: Sequence[str], wanted: Sequence[str]) -> int:
    """How many items are the same in the same place."""
    return sum(a == b for a, b in zip(said, wanted, strict=False))
