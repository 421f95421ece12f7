"""Supervised fine-tuning: the model imitates demonstrations.

    loss = -1/N sum_t log p(y_t | x, y_<t)        over the N assistant tokens of the batch

Cross-entropy with weight 1 on every token of an assistant's turn, including the token that ends the
turn, and 0 elsewhere (Ouyang et al. 2022, section 3.5, step 1). A row has `prompt` and `answer` (or
`response`, or `completion`), or `messages`, of which all assistant turns are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from retrain.algorithms.base import Algorithm, Source
from retrain.prompts import PromptSource
from retrain.prompts.examples import Demonstrations
from retrain.types import Group


class SFT(Algorithm):
    """Imitates the examples of a dataset; a group is one example.

    Args:
        max_length: Drop rows with more tokens than this; rows are never truncated.
    """

    loss: ClassVar[str] = "cross_entropy"
    min_group_size: ClassVar[int] = 1
    source: ClassVar[Source] = "demonstrations"

    def __init__(self, max_length: int | None = None) -> None:
        self.max_length = max_length

    def rows(self, prompts: PromptSource) -> PromptSource:
        return Demonstrations.of(prompts)

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        return [[1.0] * len(group.trajectories) for group in groups]
