"""The interface of an algorithm. Pure: no I/O, no torch, no state between batches."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from retrain.prompts import PromptSource
from retrain.types import Group

Credit = float | Sequence[float]
"""A trajectory's advantage: one number, or one per sampled token, turn after turn."""

Source = Literal["rollouts", "demonstrations", "pairs"]


class Algorithm(ABC):
    """Turns the rewards of a whole batch into advantages.

    The constructor's arguments are the algorithm's keys in the YAML.
    """

    loss: ClassVar[str] = "dapo"
    """The loss that the adapter executes unless `algorithm.loss` names another."""
    min_group_size: ClassVar[int] = 2
    """A smaller `algorithm.group_size` is an error at the start: it carries no signal."""
    source: ClassVar[Source] = "rollouts"
    """What it trains on: rollouts of the model, or the answers in the rows of the dataset. Rows
    need no environment, no reward and no sampler, and a group holds the answers of one row."""
    compares: Literal["group", "batch"] = "group"
    """`group`: it learns nothing from a group whose rollouts have equal rewards. `batch`: it does,
    because its baseline is the batch's, or the credit is that of turns."""
    loss_config: Mapping[str, Any] = {}
    """The keys of the loss that the algorithm sets itself."""
    max_length: int | None = None
    """Rows with more tokens are dropped and counted; None: the model's context is the limit."""

    def rows(self, prompts: PromptSource) -> PromptSource:
        """The rows in the form that it trains on; idempotent.

        Raises PromptError on rows that can't be used.
        """
        return prompts

    @abstractmethod
    def advantages(self, groups: Sequence[Group]) -> Sequence[Sequence[Credit]]:
        """The credit of each trajectory of each group, in order.

        The groups hold only scored trajectories. Raises ValueError with the group and the
        trajectory when a reward is not finite.
        """
