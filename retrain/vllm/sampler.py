"""VllmSampler: vLLM servers as a sampler; token ids in, ids with log-probs and versions out.

A completion is used only if it says which weights sampled each of its tokens, and the run published
these. What a server returns after a restart, or cuts short, is sampled again.
"""

from __future__ import annotations

import asyncio
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

from retrain.engine.limits import Limits, check_params
from retrain.errors import AdapterError
from retrain.sampler import SamplingParams, Tokenizer
from retrain.supervision.sharing import Leases
from retrain.types import Completion
from retrain.vllm.client import Json
from retrain.vllm.delivery import adapter_name
from retrain.vllm.fleet import Fleet
from retrain.vllm.options import HEATS
from retrain.vllm.replies import (
    ForeignWeightsError,
    completion_of,
    prompt_rows,
    sampled_row,
)
from retrain.wire.refusals import RemoteError

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.engine.weights import LoraWeights

ABORTED = "abort"
ATTEMPTS = 5
"""How often a request is sent that servers lose, fail or cut short."""
SCORED_AT_ONCE = 64
"""Sequences that are scored at the same time."""
Seeds = Literal["ignore", "send", "reject"]


class VllmSampler:
    """A sampler over the servers of a fleet; an async context manager, with LocalSampler's methods.

    `stop_ids` always end a completion. With `wants_lora`, each version is an adapter, and a request
    ends on the one that it began with. A `seed` is ignored, since it would slow down every pass and
    does not repeat a completion when batches differ; or it is sent, or it is rejected (a server on
    the CPU would die of it).
    """

    def __init__(
        self,
        fleet: Fleet,
        tokenizer: Tokenizer,
        limits: Limits,
        *,
        stop_ids: frozenset[int] = frozenset(),
        wants_lora: bool = False,
        seeds: Seeds = "ignore",
    ) -> None:
        self.fleet = fleet
        self.wants_lora = wants_lora
        self.limits = limits
        self._tokenizer, self._stop_ids, self._seeds = tokenizer, stop_ids, seeds
        self.context_length, self.vocabulary = limits.context_length, limits.vocabulary
        self.version = 0
        """The version of the weights that serve new requests."""
        self._published: set[int] = set()
        """Versions that servers may serve."""
        self._adapters: Leases[int] | None = Leases(fleet.retire) if wants_lora else None
        self._owns_fleet = True

    def beside(self, *, wants_lora: bool) -> Self:
        """Another sampler over the same servers, with versions of its own.

        The versions of all of them must differ. Closing it frees its adapters and no server.
        """
        other = type(self)(
            self.fleet,
            self._tokenizer,
            self.limits,
            stop_ids=self._stop_ids,
            wants_lora=wants_lora,
            seeds=self._seeds,
        )
        other._owns_fleet = False
        return other

    @contextmanager
    def pinned(self) -> Iterator[Self]:
        """A sampler of the present adapter, which the servers keep until the block ends."""
        assert self._adapters is not None, "`wants_lora` says so"
        with self._adapters.in_use() as version:
            kept = copy.copy(self)
            kept._adapters = Leases(self.fleet.retire)  # it retires nothing: no `use` follows
            kept._adapters.use(version)
            yield kept

    @property
    def failed(self) -> bool:
        """No server is left that could come back."""
        return self.fleet.failed

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the run's own servers, or free this sampler's adapters if it is `beside` another."""
        if self._adapters is not None:
            if self._owns_fleet:
                self._adapters.cancel()
                await self._adapters.freed()
            else:
                await self._adapters.close()
        if self._owns_fleet:
            await self.fleet.close()

    # --- sampling

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        """`n` completions of one prompt, whose prefill they share.

        Raises ValueError as LocalSampler does. Cancelling ends the request in the server.
        """
        return [completion for completion, _ in await self._complete(prompt_ids, params, n)]

    async def _complete(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int, **settings: Any
    ) -> list[tuple[Completion, Json]]:
        """Completions, with vLLM's own choices; `settings` are further ones of vLLM's."""
        room = self.limits.room(prompt_ids)
        check_params(params, n, HEATS, " (vLLM's range)")
        if params.seed is not None and self._seeds == "reject":
            raise ValueError("seed: a vLLM server on the CPU does not support seeds; remove it")
        rows = n if params.temperature else 1  # vLLM samples no greedy completion twice
        settings = {**self._settings(params, room, rows), **settings}
        reply, version = await self._generate(prompt_ids, settings, rows)
        drawn = [
            (completion_of(choice, self._tokenizer, full=room, version=version), choice)
            for choice in reply["choices"]
        ]
        return drawn if params.temperature else drawn * n

    async def logprobs_of(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """The log-prob of each token given those before it, at temperature 1; 0.0 for the first.

        Raises ValueError if a sequence is empty, too long, or has an id outside the vocabulary.
        """
        for token_ids in sequences:
            self.limits.check_length(token_ids)
        turns = asyncio.Semaphore(SCORED_AT_ONCE)

        async def score(token_ids: Sequence[int]) -> list[float]:
            async with turns:
                found = await self._rows(token_ids, 0)
            rows = zip(token_ids[1:], found, strict=True)
            return [0.0, *(row.get(token, -math.inf) for token, row in rows)]

        return list(await asyncio.gather(*map(score, sequences)))

    async def _rows(self, token_ids: Sequence[int], count: int) -> list[dict[int, float]]:
        """The log-probs of each token but the first, and of the `count` likeliest ones (-1: all).

        The server always samples one token, so a full sequence is sent without its last, whose row
        is then that of the sampled one.
        """
        if len(token_ids) == 1:
            return []
        full = len(token_ids) == self.context_length
        sent = token_ids[:-1] if full else token_ids
        settings: Json = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": count}
        settings |= {"logprobs": count or -1} if full else {}
        reply, _ = await self._generate(sent, {**settings, "detokenize": False}, 1)
        rows = prompt_rows(reply, len(sent))
        last = [sampled_row(reply["choices"][0]["logprobs"]["content"][0])] if full else []
        return rows + last

    async def _generate(
        self, prompt_ids: Sequence[int], settings: Json, rows: int
    ) -> tuple[Json, int | None]:
        """A whole reply by published weights, its choices in order, and its adapter's version.

        Raises AdapterError when servers have failed `ATTEMPTS` times, or none is left.
        """
        body: Json = {"token_ids": list(map(int, prompt_ids)), "sampling_params": settings}
        for left in reversed(range(ATTEMPTS)):
            member = await self.fleet.choose(prompt_ids)
            async with self.fleet.turn(member, rows, alone="prompt_logprobs" in settings) as client:
                with self._adapters.in_use() if self._adapters else nullcontext() as version:
                    if version is not None:
                        body["model"] = adapter_name(version)
                    try:
                        reply = await client.generate(body)
                        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
                        self._check_labels(choices, version)
                    except (RemoteError, ForeignWeightsError) as error:
                        if _is_final(error, version):
                            raise
                        self.fleet.take_out(member, client, error)
                        if not left:
                            raise
                        continue
            if not any(choice["finish_reason"] == ABORTED for choice in choices):
                return {**reply, "choices": choices}, version
        raise AdapterError(
            f"the vLLM server {client.url} cut the completions of a prompt short in "
            f"{ATTEMPTS} attempts: does something else send /pause or /abort_requests?"
        )

    def _settings(self, params: SamplingParams, room: int | None, n: int) -> Json:
        limit = params.max_tokens if room is None else min(params.max_tokens, room)
        settings: Json = {
            "n": n,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": params.top_k or -1,
            "min_p": 0.0,
            "max_tokens": limit,
            "logprobs": 0,
            "stop": list(params.stop),
            "stop_token_ids": sorted(self._stop_ids | set(params.stop_token_ids)),
            "include_stop_str_in_output": True,
            "detokenize": bool(params.stop),
            "skip_special_tokens": False,
        }
        if params.seed is not None and self._seeds == "send":
            settings["seed"] = params.seed
        return settings

    def _check_labels(self, choices: Sequence[Json], version: int | None) -> None:
        """Raises ForeignWeightsError for weights that were not published."""
        if version is not None:  # an adapter's name is its version
            return
        labels = {span["version"] for choice in choices for span in choice["weight_versions"] or ()}
        foreign = sorted(labels - {str(known) for known in self._published})
        if foreign:
            raise ForeignWeightsError(
                f"it serves weights that this run did not publish (version {foreign[0]!r}): it was "
                "restarted, or something else changed its weights"
            )

    # --- weights

    async def load_weights(self, weights: Mapping[str, Tensor] | LoraWeights, version: int) -> None:
        """Serve `weights` as `version` at every server that is up; the others get them later.

        Raises AdapterError if no server can serve them.
        """
        self._published.add(version)
        if self._adapters is not None:
            self._adapters.add(version)
        await self.fleet.publish(weights, version)
        self.version = version
        if self._adapters is not None:
            self._adapters.use(version)


def _is_final(error: AdapterError, version: int | None) -> bool:
    """Whether no other attempt can avoid it, unlike a 404 of a server that lost its adapters."""
    gone = version is not None and getattr(error, "status", None) == 404
    return isinstance(error, RemoteError) and not (error.retryable or gone)
