"""The face of an algorithm: who gets credit. Pure: no I/O, no torch, no state between batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retrain.prompts import PromptSource
from retrain.types import Group

Credit = float | Sequence[float]
"""A trajectory's advantage: one number, or one a sampled token (turn after turn)."""

Source = Literal["rollouts", "demonstrations", "pairs"]


class Algorithm(ABC):
    """Turns the rewards of a whole batch into advantages.

    The constructor's arguments are the algorithm's keys in the YAML.
    """

    loss: ClassVar[str] = "dapo"
    """What the adapter executes unless `algorithm.loss` says otherwise."""
    min_group_size: ClassVar[int] = 2
    """Smaller groups carry no signal, and are refused at start-up."""
    source: ClassVar[Source] = "rollouts"
    """What it trains on: episodes that the model plays, or the data set's rows as they stand. Rows
    need no environment, no reward and no sampler, and a group holds what one row shows."""
    compares: ClassVar[Literal["group", "batch"]] = "group"
    """Where its baseline comes from: a group with equal rewards teaches nothing, unless the whole
    batch is compared."""
    max_length: int | None = None
    """Rows of more tokens are left out and counted; None: the model's context decides."""

    @property
    def loss_config(self) -> Mapping[str, Any]:  # the loss's own keys
        """Keys of the loss that the algorithm itself sets."""
        return {}

    def rows(self, prompts: PromptSource) -> PromptSource:
        """The rows in the form that it trains on; calling it again changes nothing.

        Raises PromptError on rows that can't be used.
        """
        return prompts

    @abstractmethod
    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[Credit]]:
        """The credit of each trajectory of each group, in order.

        The groups hold scored trajectories alone. Raises ValueError on a reward that is not
        finite, naming the group and the trajectory.
        """
