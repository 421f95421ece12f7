"""What the numbers of several steps show together: that nothing is learned, or a mismatch.

Steps that give no rollout credit are warned of at the start, and end a run at their limit.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.algorithms.functional import is_flat
from retrain.config import RunConfig
from retrain.errors import NoSignalError
from retrain.types import Group, Metrics

EARLY = 3
"""The first steps, in which rewards that are all 0 say that the task is too hard."""
STEPS = 5
"""Consecutive steps above the bar."""
FRESH = 0.01
"""The bar where no token was stale: exact arithmetic gives 0, and a good bf16 pair about 0.001."""
STALE = 0.1
"""The bar otherwise, since weights changed in between."""
logger = logging.getLogger(__name__)


def without_signal(group: Group) -> bool:
    """Whether no scored rollout can differ from others: each seat's rewards are equal.

    A seat with a single scored rollout has nothing to compare it with; a group of only such seats
    counts as one with signal.
    """
    compared = [rewards for rewards in _by_seat([group]).values() if len(rewards) > 1]
    return bool(compared) and all(map(is_flat, compared))


class Signal:
    """Counts the steps in a row in which no rollout got credit.

    At `limit` such steps training ends: as solved when all rewards equal the highest one of the
    run, else with an error. A highest reward of 0 or less only counts as solved if a lower one was
    seen: penalties end at 0, but a reward that is always 0 is no success. All this holds for each
    seat by itself.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flat_steps = 0
        self._range: dict[str, tuple[float, float]] = {}
        """The lowest and the highest reward of each seat."""
        self.solved = False
        self._in_vain = 0
        """Scored rollouts of the first steps, none of which had a reward above 0."""

    def see(self, group: Group) -> None:
        for seat, rewards in _by_seat([group]).items():
            low, high = self._range.get(seat, (math.inf, -math.inf))
            self._range[seat] = min(low, *rewards), max(high, *rewards)

    def step(self, groups: list[Group], has_credit: bool) -> None:
        """Count a trained step. Raises NoSignalError at the limit, unless the task is solved."""
        self._flat_steps = 0 if has_credit else self._flat_steps + 1
        if self._flat_steps < self._limit:
            return
        seats = _by_seat(groups)
        if not all(self._at_top(seat, min(rewards)) for seat, rewards in seats.items()):
            rewards = [reward for own in seats.values() for reward in own]
            raise NoSignalError(
                f"{self._flat_steps} steps in a row had no signal: within each group all rewards "
                f"were equal (mean {sum(rewards) / len(rewards):.3g}), so every advantage was 0. "
                "Make the task easier, the reward finer, or algorithm.group_size larger; "
                "train.stop_after_flat_steps sets this limit."
            )
        self.solved = True

    def begin(self, number: int, groups: Sequence[Group], has_credit: bool) -> None:
        """See the trained step `number`: warn in the first ones if no rollout earned anything."""
        rewards = [reward for own in _by_seat(groups).values() for reward in own]
        in_vain = number == 1 or self._in_vain > 0
        earned = has_credit or any(reward > 0 for reward in rewards)
        if number > EARLY or earned or not in_vain:
            self._in_vain = 0
            return
        self._in_vain += len(rewards)
        if number in (1, EARLY):
            logger.warning(
                "%s: 0 of %d rollouts earned anything, so there is nothing to learn yet. If this "
                "goes on: use easier prompts or rewards that give partial credit, or raise "
                "algorithm.group_size, sampling.temperature or sampling.max_tokens",
                "step 1" if number == 1 else f"steps 1 to {number}",
                self._in_vain,
            )

    def _at_top(self, seat: str, lowest: float) -> bool:
        bottom, top = self._range.get(seat, (lowest, lowest))
        return is_flat([lowest, top]) and not (top <= 0 and is_flat([bottom, top]))

    def state(self) -> dict[str, Any]:
        return {"flat_steps": self._flat_steps, "range": self._range}

    def restore(self, state: Mapping[str, Any]) -> None:
        if state["flat_steps"] < self._limit:  # else the run ended because of them
            self._flat_steps = state["flat_steps"]
        self._range = {seat: (low, high) for seat, (low, high) in state["range"].items()}


class MismatchWatch:
    """Warns once if sampler and trainer disagree for several steps about their tokens.

    Both compute the log-probs of the same tokens: another precision, kernel or engine gives others.
    The loss then corrects for a difference that no weights have, or trusts what was never sampled.
    """

    def __init__(self, config: RunConfig) -> None:
        shaped = config.sampling.top_p < 1 or config.sampling.top_k > 0
        corrected = config.algorithm.mismatch is not None
        self._done = shaped or corrected  # a difference that was warned of, or is corrected
        self._steps = 0

    def see(self, row: Metrics) -> None:
        """Count a step, and warn at the last of `STEPS`."""
        if self._done:
            return
        fresh = row.get("staleness/max", 0.0) == 0
        gap, bar = row.get("kl/sampler_trainer", 0.0), FRESH if fresh else STALE
        self._steps = self._steps + 1 if gap > bar else 0  # NaN is no gap
        if self._steps < STEPS:
            return
        self._done = True
        logger.warning(
            "kl/sampler_trainer was above %g for %d steps (now %.3g)%s: sampler and trainer give "
            "the same tokens different log-probs, and training may become unstable. Set "
            "algorithm.mismatch to correct it; %s",
            bar,
            STEPS,
            gap,
            " though no token was stale" if fresh else "",
            "or use the same precision in both"
            if fresh
            else "or lower staleness.max or the learning rate",
        )


def _by_seat(groups: Sequence[Group]) -> dict[str, list[float]]:
    """The rewards of the scored trajectories of each seat."""
    rewards: dict[str, list[float]] = {}
    for group in groups:
        for trajectory in group.trajectories:
            if trajectory.outcome == "ok":
                rewards.setdefault(trajectory.seat, []).append(trajectory.reward)
    return rewards
