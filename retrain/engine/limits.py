"""What a model can sample with: the checks of ids and SamplingParams that all samplers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from retrain.errors import shown
from retrain.sampler import SamplingParams

_LARGEST = 2**31 - 1
_SMALLEST = 1e-6
_HEATS = (_SMALLEST, 1e6)
"""Temperatures that keep the logits finite in float32."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The sizes of a model; every method raises ValueError."""

    context_length: int | None
    """The maximum number of tokens of prompt and completion together; None: no limit."""
    vocabulary: int

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """There are ids, and each is in the vocabulary."""
        if not token_ids:
            raise ValueError("got no tokens, expected at least one")
        if min(token_ids) < 0 or max(token_ids) >= self.vocabulary:
            wrong = next(i for i in token_ids if not 0 <= i < self.vocabulary)
            raise ValueError(
                f"got token id {wrong}, expected 0 to {self.vocabulary - 1}; encode with the "
                "model's own tokenizer"
            )

    def check_length(self, token_ids: Sequence[int]) -> None:
        """The ids fit the context, as those of a sequence to score must."""
        self.check_ids(token_ids)
        if self.context_length is not None and len(token_ids) > self.context_length:
            limit = f"{self.context_length} (the model's context)"
            raise ValueError(f"got {len(token_ids)} tokens, expected at most {limit}")

    def room(self, prompt_ids: Sequence[int]) -> int | None:
        """How many tokens may follow the prompt; None if the model has no limit."""
        self.check_ids(prompt_ids)
        if self.context_length is None:
            return None
        room = self.context_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"the prompt has {len(prompt_ids)} tokens, expected fewer than the model's context "
                f"of {self.context_length}; shorten it"
            )
        return room


def check_params(
    params: SamplingParams, n: int, heats: tuple[float, float] = _HEATS, by: str = ""
) -> None:
    """Raise ValueError for values that can't be sampled with.

    `heats` are the lowest and the highest temperature beside 0; `by` says what has these limits.
    """
    heat, (coldest, hottest) = params.temperature, heats
    warm = f"0, or a number from {coldest:g} to {hottest:g}{by}"
    wrong = {
        "n": (n, n >= 1, "an integer >= 1"),
        "max_tokens": (params.max_tokens, 1 <= params.max_tokens <= _LARGEST, "an integer >= 1"),
        "temperature": (heat, heat == 0 or coldest <= heat <= hottest, warm),
        "top_p": (params.top_p, _SMALLEST <= params.top_p <= 1, f"{_SMALLEST:g} to 1"),
        "top_k": (params.top_k, 0 <= params.top_k <= _LARGEST, "0 (all tokens) or more"),
        "stop": (params.stop, all(params.stop), "non-empty strings"),
    }
    for name, (got, fine, expected) in wrong.items():
        if not fine:
            raise ValueError(f"{name}: got {shown(got)}, expected {expected}")
