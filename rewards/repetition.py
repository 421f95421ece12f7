"""A punishment of repeated n-grams, from -1 to 0."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal

from retrain import RewardCalculator, Trajectory


class Repetition(RewardCalculator):
    """-(1 - distinct n-grams / n-grams): 0 without repetition, near -1 if all is repeated.

    As in appendix C.2 of Yeo et al. 2025, "Demystifying Long Chain-of-Thought Reasoning in LLMs",
    in the form of TRL's repetition penalty. A reply shorter than an n-gram gets 0. Set the size of
    the penalty with `weight`.

    Args:
        ngram: The length of an n-gram.
        unit: What is counted: tokens that the model sampled, or words of the completion in lower
            case.
    """

    def __init__(self, ngram: int = 3, unit: Literal["tokens", "words"] = "tokens") -> None:
        if ngram < 1:
            raise ValueError(f"ngram is {ngram}, expected an integer >= 1")
        self.ngram, self.unit = ngram, unit

    async def calculate(self, trajectory: Trajectory) -> float:
        texts: list[Sequence[Hashable]] = [trajectory.completion.lower().split()]
        if self.unit == "tokens":
            texts = [turn.completion.token_ids for turn in trajectory.turns]
        ngrams = [
            tuple(text[start : start + self.ngram])
            for text in texts  # an n-gram does not cross turns
            for start in range(len(text) - self.ngram + 1)
        ]
        return len(set(ngrams)) / len(ngrams) - 1.0 if ngrams else 0.0
