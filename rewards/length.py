"""A reward for the length of the reply."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from retrain import Reward, RewardCalculator, Trajectory


@dataclass(frozen=True)
class Overlong:
    """0 up to `max - cache`, then a linear fall to -1 at `max`, and -1 above."""

    max: int
    """L_max: the length with the full punishment."""
    cache: int
    """L_cache: how much before `max` the punishment begins."""

    def __post_init__(self) -> None:
        if not 0 < self.cache <= self.max:
            raise ValueError(
                f"got max {self.max} and cache {self.cache}, expected 0 < cache <= max"
            )

    def __call__(self, length: int) -> float:
        return max(-1.0, min(0.0, (self.max - self.cache - length) / self.cache))


@dataclass(frozen=True)
class Cosine:
    """A cosine from the first to the second value of a range, between length 0 and `max`."""

    of: str
    """The name of the reward that says whether the reply is correct: it is more than 0.5 then."""
    max: int
    """L_max: a longer reply counts as one of this length."""
    correct: tuple[float, float] = (1.0, 0.5)
    """The rewards of a correct reply of length 0, and of length `max`."""
    wrong: tuple[float, float] = (-1.0, -0.5)
    """The rewards of a wrong reply of length 0, and of length `max`."""
    exceeded: float | None = None
    """The reward at length `max` or more, correct or not; by default as for `max`."""

    def __post_init__(self) -> None:
        if self.max < 1:
            raise ValueError(f"got max {self.max}, expected at least 1")

    def __call__(self, length: int, correct: bool) -> float:
        if length >= self.max and self.exceeded is not None:
            return self.exceeded
        first, last = self.correct if correct else self.wrong
        share = min(length / self.max, 1.0)
        return last + 0.5 * (first - last) * (1.0 + math.cos(share * math.pi))


class Length(RewardCalculator):
    """The length of the reply, as one of `target`, `overlong` and `cosine`.

    - `target`: max(0, 1 - |length - target| / target), from 0 to 1.
    - `overlong`: the soft overlong punishment of DAPO (Yu et al. 2025, equation 13), from -1 to 0.
    - `cosine`: the cosine reward of Yeo et al. 2025, "Demystifying Long Chain-of-Thought
      Reasoning in LLMs", appendix C.1: with default ranges, a short correct reply gets most and a
      short wrong reply least.

    Args:
        target: The best length.
        overlong: Punish replies near the limit; `max` and `cache` in units.
        cosine: Reward by length and by another reward.
        unit: Tokens that the model sampled in all turns, or characters or words of the completion.
    """

    def __init__(
        self,
        target: int | None = None,
        overlong: Overlong | None = None,
        cosine: Cosine | None = None,
        unit: Literal["tokens", "characters", "words"] = "tokens",
    ) -> None:
        if [target, overlong, cosine].count(None) != 2:
            raise ValueError("expected one of target, overlong and cosine")
        if target is not None and target < 1:
            raise ValueError(f"target is {target}, expected an integer >= 1")
        self.target, self.overlong, self.cosine, self.unit = target, overlong, cosine, unit
        self.after = (cosine.of,) if cosine else ()

    async def calculate(self, trajectory: Trajectory) -> float | Reward:
        length = self.length(trajectory)
        if self.target is not None:
            return max(0.0, 1.0 - abs(length - self.target) / self.target)
        if self.overlong is not None:
            return self.overlong(length)
        assert self.cosine is not None
        correct = trajectory.rewards.get(self.cosine.of)
        if correct is None:  # it does not apply to this rollout
            return Reward(0.0, applies=False)
        return self.cosine(length, correct > 0.5)

    def length(self, trajectory: Trajectory) -> int:
        """The length in the unit."""
        if self.unit == "tokens":
            return trajectory.sampled_tokens
        text = trajectory.completion
        return len(text) if self.unit == "characters" else len(text.split())
