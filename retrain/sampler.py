"""The Sampler: token ids in, sampled ids out, each with its log-prob and version."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retrain.types import Completion

HASH_BYTES = 4
PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""The text of an incomplete character."""


def hash_of(token_ids: Sequence[int]) -> str:
    """A short BLAKE2b hash of token ids: equal for equal prompts."""
    return hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=HASH_BYTES).hexdigest()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample. A run that asks for more than its backend supports is rejected at start-up."""

    max_tokens: int = 256
    temperature: float = 1.0
    """0 is greedy, with the log-probs of the distribution at temperature 1."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    stop: tuple[str, ...] = ()
    """A completion ends with the token that completes one of these strings; its ids keep it."""
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    """Completion i of a request depends on (seed, i), not on what else is in its batch."""


class Sampler(Protocol):
    """Samples from the weights that were published last."""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        """Sample `n` completions of one prompt, which is prefilled once.

        A completion that began before new weights were published ends with the old weights, or
        its `versions` say which weights sampled each token.
        """
        ...


class Tokenizer(Protocol):
    """Ids <-> text, and the chat template: the part of a Hugging Face tokenizer that we use."""

    eos_token_id: int | None
    chat_template: Any  # a Jinja string; some tokenizers hold a mapping of named ones

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        **kwargs: Any,  # template variables such as enable_thinking
    ) -> Any: ...  # the text, when tokenize is False
