"""FleetSampler: what the service's protocols ask of a sampler, from a fleet of vLLM servers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from retrain.engine.drawing import Top
from retrain.engine.sampler import Alternatives
from retrain.sampler import SamplingParams
from retrain.types import Completion
from retrain.vllm.client import Json
from retrain.vllm.replies import sampled_row
from retrain.vllm.sampler import VllmSampler

WIDEST = 2**20
"""Log-probs of one reply: about 60 MB of JSON."""
LOWEST = -9999.0
"""What vLLM returns for a log-prob of minus infinity."""


class FleetSampler(VllmSampler):
    """A vLLM sampler with all that the service's protocols ask of a sampler."""

    async def sample_with_top(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        *,
        top: int = 0,
        eos: bool = True,
    ) -> list[tuple[Completion, Top | None]]:
        """As `LocalSampler.sample_with_top`."""
        # Of the sampled token and the likeliest ones, the server returns `logprobs` in all.
        settings: Json = {"logprobs": top + 1 if top else 0}
        if not eos:
            settings |= {"ignore_eos": True, "stop_token_ids": sorted(params.stop_token_ids)}
        return [
            (one, _top([sampled_row(row) for row in choice["logprobs"]["content"]], top))
            for one, choice in await self._complete(prompt_ids, params, n, **settings)
        ]

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """As `LocalSampler.logprobs`."""
        [scores] = await self.logprobs_of([token_ids])
        return scores

    async def alternatives(
        self,
        token_ids: Sequence[int],
        *,
        top: int = 0,
        given: Sequence[Sequence[int]] | None = None,
    ) -> Alternatives:
        """As `LocalSampler.alternatives`.

        vLLM returns the likeliest tokens or all of them, so `given` ids need all. Raises ValueError
        if these are too many.
        """
        self.limits.check_length(token_ids)
        if given is not None and len(token_ids) * self.vocabulary > WIDEST:
            raise ValueError(
                f"target_prompt_logprobs: {len(token_ids)} tokens with a vocabulary of "
                f"{self.vocabulary} are too many for a vLLM server, expected at most "
                f"{WIDEST // self.vocabulary} tokens; use topk_prompt_logprobs, or a service with "
                "the local sampler"
            )
        rows = await self._rows(token_ids, top if given is None else -1)
        top_rows = _top(rows, top)
        if given is None:
            return Alternatives(top_rows, None)
        pairs = zip(rows, given, strict=True)
        scores = [[0.0 if i < 0 else row.get(i, -np.inf) for i in ids] for row, ids in pairs]
        return Alternatives(top_rows, scores)


def _top(rows: Sequence[Mapping[int, float]], count: int) -> Top | None:
    """The `count` likeliest tokens of each row, in order; None for 0."""
    if not count:
        return None
    ids = np.zeros((len(rows), count), np.int32)
    logprobs = np.full((len(rows), count), -np.inf, np.float32)
    for place, row in enumerate(rows):
        best = sorted(row.items(), key=lambda item: -item[1])[:count]
        # A token without a probability has vLLM's lowest log-prob.
        kept = [(i, logprob) for i, logprob in best if logprob > LOWEST]
        ids[place, : len(kept)] = [i for i, _ in kept]
        logprobs[place, : len(kept)] = [logprob for _, logprob in kept]
    return Top(ids, logprobs)
