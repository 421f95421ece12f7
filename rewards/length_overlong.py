"""A punishment of replies near the limit of their length, from -1 to 0."""

from __future__ import annotations

from retrain import RewardCalculator, Trajectory

from .length import Unit, length_of


class LengthOverlong(RewardCalculator):
    """The soft overlong punishment of DAPO (Yu et al. 2025, equation 13).

    0 up to the length `max` - `cache`, then a linear fall to -1 at `max`, and -1 above.

    Args:
        max: L_max, the length from which the full punishment applies.
        cache: L_cache: the punishment begins this far before `max`.
        unit: What is counted: tokens that the model sampled in all turns, or characters or words of
            the completion.
    """

    def __init__(self, max: int, cache: int, unit: Unit = "tokens") -> None:
        if not 0 < cache <= max:
            raise ValueError(f"got max {max} and cache {cache}, expected 0 < cache <= max")
        self.max, self.cache, self.unit = max, cache, unit

    async def calculate(self, trajectory: Trajectory) -> float:
        length = length_of(trajectory, self.unit)
        return max(-1.0, min(0.0, (self.max - self.cache - length) / self.cache))
