"""A sampling session in `retrain`'s terms: SamplingParams in, sequences with log-probs out.

Stops mean here what they mean on every backend: a completion ends with the first token that is a
stop token or that completes a stop string. The protocol takes ids or strings, not both; ids go out
where there are any (the end of a turn is one), and whatever was sampled past a stop is cut off.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrain.adapters.remote.published import Sampled
from retrain.adapters.tinker.client import TinkerClient
from retrain.adapters.tinker.sampling import SamplingClient
from retrain.errors import AdapterError
from retrain.protocols.tinker.values import SampledSequence
from retrain.sampler import SamplingParams, Tokenizer


class ServedWeights:
    """A `retrain.adapters.remote.published.Session` over one set of weights."""

    def __init__(
        self, client: TinkerClient, sampler: SamplingClient, tokenizer: Tokenizer, deadline: float
    ) -> None:
        """`deadline` is how many seconds a sample may take."""
        self._client = client
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._deadline = deadline

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[Sampled]:
        """`n` completions; raises AdapterError when the service leaves one or its log-probs out."""
        result = await self._sampler.sample(prompt_ids, params, n=n, timeout=self._deadline)
        if len(result.sequences) != n:
            raise AdapterError(
                f"asked the service for {n} completions, got {len(result.sequences)}"
            )
        return [cut(one, params, self._tokenizer) for one in result.sequences]

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """The log-prob of each token after those before it; None for the first."""
        return await self._sampler.compute_logprobs(token_ids, timeout=self._deadline)

    async def close(self) -> None:
        """Free the snapshot, where it is a checkpoint of its own; sessions end by themselves."""
        if self._sampler.snapshot is not None:
            await self._client.delete(self._sampler.snapshot)


def cut(sequence: SampledSequence, params: SamplingParams, tokenizer: Tokenizer) -> Sampled:
    """The sequence up to its first stop, that included."""
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        raise AdapterError(
            "the service returned a completion without a log-prob for each token: it can't be "
            "trained on"
        )
    stops = [i for i, token in enumerate(sequence.tokens) if token in params.stop_token_ids]
    completed = _completed(sequence.tokens, params.stop, tokenizer)
    end = min((*stops[:1], *completed), default=None)
    if end is None:
        return Sampled(sequence.tokens, sequence.logprobs, sequence.stop_reason)
    return Sampled(sequence.tokens[: end + 1], sequence.logprobs[: end + 1], "stop")


def _completed(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The index of the token that completes the first stop string, in a list, if any does."""

    def has_stop(length: int) -> bool:
        text = tokenizer.decode(tokens[:length])
        return any(one in text for one in stop)

    if not stop or not has_stop(len(tokens)):
        return []
    low, high = 0, len(tokens)  # no stop within `low` tokens, one within `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle, high)
    return [high - 1]
