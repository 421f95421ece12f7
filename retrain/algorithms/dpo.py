"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, eq. 7)

    loss = -1/P sum over the P pairs of
           log sigmoid( beta [ log p(w|x)/ref(w|x) - log p(l|x)/ref(l|x) ] )

with w the chosen and l the rejected answer to x, log-probs summed over an answer's tokens, and ref
the weights that the run started from, so the loss of the first step is ln 2. An advantage is
positive for the chosen and negative for the rejected answer; its size is the pair's weight 1/P.

A row has `prompt`, `chosen` and `rejected`. For a dataset with scores of single responses
(HelpSteer2), `pair_by` names the score: each prompt's best response is paired with its worst.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar

from retrain.algorithms.base import Algorithm, Source
from retrain.prompts import PromptSource
from retrain.prompts.examples import Pairs
from retrain.types import Group


class DPO(Algorithm):
    """Learns from preferences; a group is a chosen answer and a rejected one.

    Args:
        beta: How strongly the model is kept close to the reference model.
        pair_by: A column of scores: pair the best and the worst response to each prompt.
        max_length: Drop a pair if its prompt and one of its answers have more tokens than this.
    """

    loss: ClassVar[str] = "dpo"
    source: ClassVar[Source] = "pairs"

    def __init__(
        self, beta: float = 0.1, pair_by: str | None = None, max_length: int | None = None
    ) -> None:
        if not (math.isfinite(beta) and beta > 0):
            raise ValueError(f"beta: got {beta}, expected a number > 0")
        self.loss_config = {"beta": beta}
        self.pair_by = pair_by
        self.max_length = max_length

    def rows(self, prompts: PromptSource) -> PromptSource:
        return Pairs.of(prompts, self.pair_by)

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        for group in groups:
            if len(group.trajectories) != 2:
                raise ValueError(
                    f"group {group.prompt.id} has {len(group.trajectories)} answers, expected a "
                    "pair: the chosen and the rejected one"
                )
        weight = 1.0 / max(1, len(groups))
        return [[weight, -weight] for _ in groups]
