"""The local sampler: any Hugging Face causal LM as a `Sampler`, on CPU or CUDA.

It samples in a thread, from its own copy of the weights, so that the event loop never waits for a
pass and training may change the model meanwhile. Requests join the running batch between two
passes: `worker.py` has the order, `decoder.py` the batch.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from retrain.engine.decoder import QueuedRequest, SamplerStats
from retrain.engine.drawing import Mask, Top, row_keys, top_tokens
from retrain.engine.lengths import of_like_length
from retrain.engine.limits import Limits, check_params
from retrain.engine.losses import token_logprobs
from retrain.engine.stopping import Stopping
from retrain.engine.weights import LoraWeights
from retrain.engine.worker import Worker, WorkerCall
from retrain.sampler import SamplingParams, Tokenizer
from retrain.types import Completion

SCORED_TOKENS = 2048
"""Maximum tokens that one pass scores, padding included."""
SCORED_POSITIONS = 1024
"""Positions whose log-probs are computed at once; bounds the memory."""


class Alternatives(NamedTuple):
    """Log-probs of other tokens at the positions of a sequence, but the first."""

    top: Top | None
    """The likeliest tokens, (T - 1, top)."""
    given: list[list[float]] | None
    """Of the ids that were asked for, (T - 1, K); 0.0 for an id of -1."""


class LocalSampler:
    """Serves completions from a copy of `model`; an async context manager.

    `model` is a plain causal LM. Raises ValueError if its `forward` was patched (by TRL or
    accelerate), since a copy would still compute with the original's weights, or if it has no
    `past_key_values` (Mamba's own cache), since it can't continue from a prefill.

    At most `max_rows` rows decode at once. With `isolate` each request is a batch of its own, so
    that its log-probs are bit-identical under any load. `threads` is the number of CPU threads of a
    pass. A row ends at the eos of the tokenizer and of the model's generation config, and as its
    SamplingParams say. Sampling and publishing raise AdapterError after the worker has failed.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        max_rows: int = 256,
        isolate: bool = False,
        threads: int = 1,
    ) -> None:
        _refuse_unfit(model)
        config = model.config.get_text_config()
        self.wants_lora = False
        self.context_length: int | None = getattr(config, "max_position_embeddings", None)
        self.vocabulary: int = config.vocab_size
        self._limits = Limits(self.context_length, self.vocabulary)
        self._tokenizer = tokenizer
        self._always_stop = eos_ids(model, tokenizer)
        self._max_rows = max_rows
        self._outbox: list[QueuedRequest | WorkerCall] = []
        own = copy.deepcopy(model).requires_grad_(False)
        own.train(False)
        self._worker = Worker(own, tokenizer, max_rows=max_rows, isolate=isolate, threads=threads)

    @property
    def version(self) -> int:
        """The version of the weights that serve new requests."""
        return self._worker.current.version

    @property
    def stats(self) -> SamplerStats:
        """Counters since the start."""
        return self._worker.stats

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        """`n` completions of one prompt, which is prefilled once.

        Raises ValueError if the prompt is empty, fills the context, or has an id outside the
        vocabulary. Cancelling retires the rows.
        """
        return [completion for completion, _ in await self.sample_with_top(prompt_ids, params, n)]

    async def sample_with_top(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        n: int = 1,
        *,
        top: int = 0,
        eos: bool = True,
        mask: Callable[[], Mask] | None = None,
        watch: Callable[[int, Sequence[int]], None] | None = None,
    ) -> list[tuple[Completion, Top | None]]:
        """`sample`, and the `top` likeliest tokens of each position, (T, top); None for top 0.

        Their log-probs are those of the distribution that was sampled from. Without `eos`, the
        model's own stop tokens don't end a completion. `mask` makes the Mask of a completion;
        log-probs are then those of the remaining tokens. `watch` gets the index of a completion
        and its tokens so far, on another thread.
        """
        room = self._limits.room(prompt_ids)
        check_params(params, n)
        always = self._always_stop if eos else frozenset[int]()
        stopping = Stopping(params, self._tokenizer, always, room)
        loop, prompt, keys = asyncio.get_running_loop(), list(prompt_ids), row_keys(params.seed, n)
        requests = [
            QueuedRequest(
                prompt,
                stopping,
                keys[first : first + self._max_rows],
                loop.create_future(),
                top,
                first,
                mask,
                watch,
            )
            for first in range(0, n, self._max_rows)
        ]
        try:
            self._submit(requests)
            parts = [await request.future for request in requests]
        except BaseException:
            _cancel(requests)
            raise
        tops = [
            Top(*map(np.stack, zip(*rows, strict=True))) if rows else None
            for request in requests
            for rows in request.tops
        ]
        completions = [completion for part in parts for completion in part]
        return list(zip(completions, tops, strict=True))

    async def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """The log-prob of each token given those before it, at temperature 1; the first is 0.0."""
        [scores] = await self.logprobs_of([token_ids])
        return scores

    async def logprobs_of(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """`logprobs` of each sequence; sequences of similar lengths share a pass.

        Raises ValueError if a sequence is empty, too long, or has an id outside the vocabulary.
        """
        for token_ids in sequences:
            self._limits.check_length(token_ids)
        scores: dict[int, list[float]] = {}
        for rows in of_like_length(list(map(len, sequences)), SCORED_TOKENS):
            together = [sequences[row] for row in rows]
            found = await self._call(lambda together=together: self._score(together))  # type: ignore[misc]  # mypy can't infer a lambda with a default
            scores.update(zip(rows, found, strict=True))
        return [scores[row] for row in range(len(sequences))]

    async def alternatives(
        self,
        token_ids: Sequence[int],
        *,
        top: int = 0,
        given: Sequence[Sequence[int]] | None = None,
    ) -> Alternatives:
        """Log-probs of other tokens given those before them, at temperature 1.

        `given` are K ids for each token but the first, (T - 1, K); -1 asks for none. Raises
        ValueError as `logprobs_of` does.
        """
        self._limits.check_length(token_ids)
        found: Alternatives = await self._call(lambda: self._alternatives(token_ids, top, given))
        return found

    async def load_weights(self, weights: Mapping[str, Tensor] | LoraWeights, version: int) -> None:
        """Serve `weights` (a `snapshot`) as `version` to all requests after this returns.

        Running rows finish on the weights that they began with. `weights` must not change before
        this returns. Raises AdapterError if they don't fit this model.
        """
        assert not isinstance(weights, LoraWeights)  # `wants_lora` says so
        await self._call(lambda: self._worker.publish(weights, version))

    @property
    def failed(self) -> bool:
        """The worker has failed, so that no call can succeed any more."""
        return self._worker.failed

    async def close(self) -> None:
        """End the thread; waiting requests raise AdapterError."""
        await self._worker.close()

    async def __aenter__(self) -> Self:
        self._worker.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _call(self, run: Callable[[], Any]) -> Any:  # whatever `run` returns
        call = WorkerCall(run, asyncio.get_running_loop().create_future())
        self._submit([call])
        return await call.future

    def _submit(self, items: Sequence[QueuedRequest | WorkerCall]) -> None:
        """Submit the requests of one turn of the event loop together, to share a prefill."""
        if not self._worker.started:
            raise RuntimeError("the sampler has not started; use it in `async with`")
        if not self._outbox:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox += items

    def _flush(self) -> None:
        items, self._outbox = self._outbox, []
        self._worker.submit(items)

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Log-probs of sequences padded on the right, which a causal model ignores."""
        model = self._worker.current.model
        ids = pad_sequence([torch.tensor(row) for row in sequences], batch_first=True)
        ids = ids.to(model.device)
        logits = model(ids, use_cache=False).logits[:, :-1]
        scores = token_logprobs(logits, ids[:, 1:], chunk_tokens=SCORED_POSITIONS).tolist()
        return [[0.0, *row[: len(own) - 1]] for row, own in zip(scores, sequences, strict=True)]

    def _alternatives(
        self, token_ids: Sequence[int], top: int, given: Sequence[Sequence[int]] | None
    ) -> Alternatives:
        model = self._worker.current.model
        ids = torch.tensor([token_ids], device=model.device)
        logits = model(ids, use_cache=False).logits[0, :-1]
        tops: list[Top] = []
        scores: list[list[float]] = []
        for first in range(0, len(logits), SCORED_POSITIONS):
            logprobs = logits[first : first + SCORED_POSITIONS].float().log_softmax(-1)
            if top:
                tops.append(Top(*(part.numpy() for part in top_tokens(logprobs, top))))
            if given is not None:
                wanted = torch.tensor(given[first : first + SCORED_POSITIONS], device=ids.device)
                found = logprobs.gather(1, wanted.clamp(min=0))
                scores += found.masked_fill(wanted < 0, 0.0).tolist()
        joined = Top(*map(np.concatenate, zip(*tops, strict=True))) if tops else None
        return Alternatives(joined, None if given is None else scores)


def _cancel(requests: Sequence[QueuedRequest]) -> None:
    for request in requests:
        request.cancelled = True
        if request.future.done() and not request.future.cancelled():
            request.future.exception()  # retrieved: the error of another part is raised
        request.future.cancel()


def _refuse_unfit(model: nn.Module) -> None:
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise ValueError(
            f"{type(model).__name__} has no past_key_values, so the local sampler can't use it; "
            "choose a causal LM with attention layers, pure or hybrid"
        )
    for name, module in model.named_modules():
        if "forward" in vars(module):
            raise ValueError(
                f"the forward of {name or 'the model'} ({type(module).__name__}) was patched, so "
                "a copy would compute with the original's weights; create the sampler before the "
                "trainer"
            )


def eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    """The tokens that always end a completion: of the tokenizer and of the generation config."""
    generation = getattr(model, "generation_config", None)
    ids = generation.eos_token_id if generation is not None else None
    several = ids if isinstance(ids, list) else [ids]
    return frozenset(i for i in (*several, tokenizer.eos_token_id) if i is not None)
