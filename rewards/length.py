"""1 for a reply of the wanted length, less for a shorter or longer one."""

from __future__ import annotations

from typing import Literal

from retrain import RewardCalculator, Trajectory

Unit = Literal["tokens", "characters", "words"]


class Length(RewardCalculator):
    """max(0, 1 - |length - target| / target): 1 at the target, 0 at twice the target.

    For a limit instead of a target, use `length_overlong` or `length_cosine`.

    Args:
        target: The best length.
        unit: What is counted: tokens that the model sampled in all turns, or characters or words of
            the completion.
    """

    def __init__(self, target: int, unit: Unit = "tokens") -> None:
        if target < 1:
            raise ValueError(f"target is {target}, expected an integer >= 1")
        self.target, self.unit = target, unit

    async def calculate(self, trajectory: Trajectory) -> float:
        length = length_of(trajectory, self.unit)
        return max(0.0, 1.0 - abs(length - self.target) / self.target)


def length_of(trajectory: Trajectory, unit: Unit) -> int:
    if unit == "tokens":
        return trajectory.sampled_tokens
    text = trajectory.completion
    return len(text) if unit == "characters" else len(text.split())
