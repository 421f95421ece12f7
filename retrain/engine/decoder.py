"""A batch of rows that decode together on one set of weights: prefill, step, retire.

A request is prefilled once, whatever its number of rows. A row leaves the batch with its last
token. Everything here runs on the worker's thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrain.engine.drawing import Drawer, Drawn, Mask, Row, Top
from retrain.engine.fused import FusedStep
from retrain.engine.kv_cache import RowCache, make_cache
from retrain.engine.lengths import of_like_length
from retrain.engine.stopping import Stopping
from retrain.sampler import Tokenizer
from retrain.types import Completion

PREFILL_TOKENS = 16384
"""Maximum tokens of a prefill pass, padding included, unless a single prompt is longer."""


@dataclass(slots=True)
class SamplerStats:
    """Counters since the start."""

    tokens: int = 0
    """Sampled tokens."""
    steps: int = 0
    """Decode passes, without prefills."""
    rows: int = 0
    """Rows that are being decoded now."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class QueuedRequest:
    """Completions of one prompt, one per key."""

    prompt_ids: Sequence[int]
    stopping: Stopping
    keys: Sequence[int]
    future: asyncio.Future[list[Completion]]
    top: int = 0
    """How many of the likeliest tokens to report at each sampled position."""
    first: int = 0
    """The index of its first row, for `watch`."""
    mask: Callable[[], Mask] | None = None
    """Makes what restricts the tokens of a row."""
    watch: Callable[[int, Sequence[int]], None] | None = None
    """Gets the index of a row and its tokens so far (a list that grows), after each token but the
    last; on the worker's thread."""
    cancelled: bool = False
    """Set by the caller; the rows are retired before the next pass."""
    completions: list[Completion | None] = field(init=False)
    tops: list[list[Top]] = field(init=False)
    """Per completion, one for each of its tokens if `top` asks for them."""

    def __post_init__(self) -> None:
        self.completions = [None] * len(self.keys)
        self.tops = [[] for _ in self.keys]


@dataclass(slots=True, eq=False, kw_only=True)
class LiveRow(Row):
    """One unfinished completion."""

    request: QueuedRequest
    index: int
    logprobs: list[float] = field(default_factory=list)


class Decoder:
    """One batch; `admit` and `step` return the requests that they finish."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        version: int,
        stats: SamplerStats,
        max_rows: int,
        fused: FusedStep | None = None,
    ) -> None:
        """`fused` decodes in place of the model's forward."""
        self.model, self.tokenizer, self.version = model, tokenizer, version
        self.stats = stats
        self.rows: list[LiveRow] = []
        self._cache = make_cache(model.config.get_text_config(), max_rows)
        self._fused = fused
        self._drawer: Drawer | None = None  # None if the rows have changed since the last step
        self._tokens: list[int] = []  # the newest of each row, not yet in the cache
        self._known = inspect.signature(model.forward).parameters
        self._device = model.device  # transformers finds it anew for each access

    def admit(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        """Prefill the requests and draw the first token of each row."""
        lengths = [len(request.prompt_ids) for request in requests]
        done: list[QueuedRequest] = []
        for chunk in of_like_length(lengths, PREFILL_TOKENS):
            done += self._admit([requests[index] for index in chunk])
        return done

    def step(self) -> list[QueuedRequest]:
        """Draw one more token for every row."""
        kept = [i for i, row in enumerate(self.rows) if not row.request.cancelled]
        if len(kept) < len(self.rows):
            self._retain(kept)
        if not self.rows:
            return []
        inputs = self._cache.step_inputs()
        ids = torch.tensor(self._tokens, device=self._device)
        if self._fused is not None and isinstance(self._cache, RowCache):
            logits = self._fused(ids, self._cache, **inputs)
        else:
            logits = self._forward(ids.unsqueeze(1), self._cache.past, inputs)
        self._cache.advance()
        self.stats.steps += 1
        if self._drawer is None:
            self._drawer = Drawer(self.rows, self._device)
        drawn = self._drawer(logits)
        self._tokens = drawn.tokens
        done, kept = self._record(self.rows, drawn)
        if len(kept) < len(self.rows):
            self._retain(kept)
        return done

    def _admit(self, requests: Sequence[QueuedRequest]) -> list[QueuedRequest]:
        past = self._cache.empty_prefill()
        ids, inputs = _padded([r.prompt_ids for r in requests], self._device)
        logits = self._forward(ids, past, inputs)
        rows, sources = [], []
        for source, request in enumerate(requests):
            for index, key in enumerate(request.keys):
                row = LiveRow(params=request.stopping.params, key=key, request=request, index=index)
                row.mask, row.top = request.mask and request.mask(), request.top
                rows.append(row)
                sources.append(source)
        drawer = Drawer(rows, self._device)
        drawn = drawer(logits[torch.tensor(sources, device=logits.device)])
        done, kept = self._record(rows, drawn)
        if kept:
            lengths = [len(rows[i].request.prompt_ids) for i in kept]
            self._cache.add(past, [sources[i] for i in kept], lengths)
            self.rows += [rows[i] for i in kept]
            self._tokens += [drawn.tokens[i] for i in kept]
            self._drawer = None
        return done

    def _forward(self, ids: Tensor, past: object, inputs: dict[str, Tensor]) -> Tensor:
        """The logits of the last position, (rows, vocabulary)."""
        known: dict[str, Any] = {
            name: value.to(self._device) for name, value in inputs.items() if name in self._known
        }
        if "logits_to_keep" in self._known:
            known["logits_to_keep"] = 1
        logits: Tensor = self.model(ids, past_key_values=past, use_cache=True, **known).logits
        return logits[:, -1]

    def _record(
        self, rows: Sequence[LiveRow], drawn: Drawn
    ) -> tuple[list[QueuedRequest], list[int]]:
        """Record what was drawn; returns the finished requests and the unfinished rows."""
        self.stats.tokens += len(rows)
        done: list[QueuedRequest] = []
        kept: list[int] = []
        for i, (row, token, logprob, top) in enumerate(zip(rows, *drawn, strict=True)):
            row.token_ids.append(token)
            row.logprobs.append(logprob)
            request = row.request
            if top is not None:
                request.tops[row.index].append(top)
            reason = request.stopping.reason(row.token_ids)
            if reason is None:
                kept.append(i)
                if request.watch is not None:
                    request.watch(request.first + row.index, row.token_ids)
                continue
            text = self.tokenizer.decode(row.token_ids, skip_special_tokens=True)
            request.completions[row.index] = Completion(
                row.token_ids, row.logprobs, text, reason, self.version
            )
            if None not in request.completions:
                done.append(request)
        return done, kept

    def _retain(self, kept: list[int]) -> None:
        """Keep these rows; rows from the end fill the holes, so that few rows move."""
        count = len(kept)
        spare = [i for i in kept if i >= count]
        staying = {i for i in kept if i < count}
        order = [i if i in staying else spare.pop() for i in range(count)]
        self._cache.retain(order)
        self.rows = [self.rows[i] for i in order]
        self._tokens = [self._tokens[i] for i in order]
        self._drawer = None


def _padded(
    prompts: Sequence[Sequence[int]], device: torch.device
) -> tuple[Tensor, dict[str, Tensor]]:
    """Prompts padded on the left, (prompts, longest), and further arguments of the model."""
    longest = max(map(len, prompts))
    padding = torch.tensor([longest - len(p) for p in prompts], device=device).unsqueeze(1)
    ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in prompts], device=device)
    columns = torch.arange(longest, device=device)
    inputs = {"position_ids": (columns - padding).clamp_(min=0)}
    if any(len(p) < longest for p in prompts):
        inputs["attention_mask"] = columns >= padding
    return ids, inputs
