"""The face of an algorithm: who gets credit. Pure: no I/O, no torch, no state between batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

from retrain.types import Group

Credit = float | Sequence[float]
"""A trajectory's advantage: one number, or one a sampled token (turn after turn)."""


class Algorithm(ABC):
    """Turns the rewards of a whole batch into advantages.

    The constructor's arguments are the algorithm's keys in the YAML.
    """

    loss: ClassVar[str] = "dapo"
    """What the adapter executes unless `algorithm.loss` says otherwise."""
    min_group_size: ClassVar[int] = 2
    """Smaller groups carry no signal, and are refused at start-up."""

    @abstractmethod
    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[Credit]]:
        """The credit of each trajectory of each group, in order.

        The groups hold scored trajectories alone. Raises ValueError on a reward that is not
        finite, naming the group and the trajectory.
        """
