"""Whether there is anything to learn from: steps in a row in which no rollout got any credit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from retrain.errors import NoSignalError
from retrain.types import Group


class Signal:
    """Counts the steps in a row in which no rollout got any credit.

    A whole run of them ends training: solved when every reward is the highest that was ever seen,
    an error otherwise.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flat_steps = 0
        self._top = -math.inf
        self.solved = False

    def see(self, group: Group) -> None:
        """Remember the highest reward."""
        self._top = max([self._top, *(t.reward for t in group.scored)])

    def step(self, groups: list[Group], has_credit: bool) -> None:
        """A step was trained. Raises NoSignalError at the limit, unless the task is solved."""
        self._flat_steps = 0 if has_credit else self._flat_steps + 1
        if self._flat_steps < self._limit:
            return
        rewards = [t.reward for group in groups for t in group.scored]
        if min(rewards) < self._top or self._top <= 0:
            raise NoSignalError(
                f"{self._flat_steps} steps in a row had no signal: within each group all rewards "
                f"were equal (mean {sum(rewards) / len(rewards):.3g}), so every advantage was 0. "
                "Make the task easier, the reward finer, or algorithm.group_size larger "
                "(train.stop_after_flat_steps sets the patience)"
            )
        self.solved = True

    def state(self) -> dict[str, Any]:
        return {"flat_steps": self._flat_steps, "top": finite(self._top)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._flat_steps = state["flat_steps"]
        self._top = -math.inf if state["top"] is None else state["top"]


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no word for it."""
    return value if math.isfinite(value) else None
