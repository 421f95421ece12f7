"""End a run that has nothing left to learn: too many steps in a row gave no rollout credit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from retrain.algorithms.functional import is_flat
from retrain.errors import NoSignalError
from retrain.types import Group


class Signal:
    """Counts the steps in a row in which no rollout got credit.

    At `limit` such steps training ends: as solved when all rewards equal the highest one of the
    run, else with an error. A highest reward of 0 or less only counts as solved if a lower one was
    seen: penalties end at 0, but a reward that is always 0 is no success.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flat_steps = 0
        self._top, self._bottom = -math.inf, math.inf
        self.solved = False

    def see(self, group: Group) -> None:
        """Remember the highest and the lowest reward."""
        rewards = [t.reward for t in group.scored]
        self._top, self._bottom = max([self._top, *rewards]), min([self._bottom, *rewards])

    def step(self, groups: list[Group], has_credit: bool) -> None:
        """Count a trained step. Raises NoSignalError at the limit, unless the task is solved."""
        self._flat_steps = 0 if has_credit else self._flat_steps + 1
        if self._flat_steps < self._limit:
            return
        rewards = [t.reward for group in groups for t in group.scored]
        at_top = is_flat([min(rewards), self._top])
        if not at_top or (self._top <= 0 and is_flat([self._bottom, self._top])):
            raise NoSignalError(
                f"{self._flat_steps} steps in a row had no signal: within each group all rewards "
                f"were equal (mean {sum(rewards) / len(rewards):.3g}), so every advantage was 0. "
                "Make the task easier, the reward finer, or algorithm.group_size larger; "
                "train.stop_after_flat_steps sets this limit."
            )
        self.solved = True

    def state(self) -> dict[str, Any]:
        return {"flat_steps": self._flat_steps, "top": self._top, "bottom": self._bottom}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["flat_steps"] < self._limit:  # else the run ended because of them
            self._flat_steps = state["flat_steps"]
        self._top, self._bottom = state["top"], state["bottom"]
