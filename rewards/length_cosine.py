"""A reward by length for correct replies, and another one for wrong replies."""

from __future__ import annotations

import math

from retrain import Reward, RewardCalculator, Trajectory

from .length import Unit, length_of


class LengthCosine(RewardCalculator):
    """The cosine reward of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs".

    It falls or rises on a cosine from the first value of a range, at length 0, to the second one,
    at length `max`. With the default ranges, correct replies should be short, and wrong ones need
    not be: appendix C.1. It is skipped for rollouts to which the reward in `correct_if` does not
    apply.

    Args:
        correct_if: The name of another reward of the run. A reply is correct if that reward is
            above 0.5. Its weight may be 0.
        max: The length at which a reply gets the second value of its range; longer replies get it
            too.
        correct: The rewards of a correct reply at length 0 and at `max`; by default [1, 0.5].
        wrong: The rewards of a wrong reply at length 0 and at `max`; by default [-1, -0.5].
        exceeded: The reward at length `max` and above, correct or not; by default the second value.
        unit: What is counted: tokens that the model sampled in all turns, or characters or words of
            the completion.
    """

    def __init__(
        self,
        correct_if: str,
        max: int,
        correct: tuple[float, float] = (1.0, 0.5),
        wrong: tuple[float, float] = (-1.0, -0.5),
        exceeded: float | None = None,
        unit: Unit = "tokens",
    ) -> None:
        if max < 1:
            raise ValueError(f"max is {max}, expected an integer >= 1")
        self.correct_if, self.max, self.unit = correct_if, max, unit
        self.correct, self.wrong, self.exceeded = correct, wrong, exceeded
        self.after = (correct_if,)

    async def calculate(self, trajectory: Trajectory) -> float | Reward:
        value = trajectory.rewards.get(self.correct_if)
        if value is None:
            return Reward(0.0, applies=False)
        length = length_of(trajectory, self.unit)
        if length >= self.max and self.exceeded is not None:
            return self.exceeded
        first, last = self.correct if value > 0.5 else self.wrong
        share = min(length / self.max, 1.0)
        return last + 0.5 * (first - last) * (1.0 + math.cos(share * math.pi))
