"""The keys and values of rows that decode together.

`RowCache` keeps rows of different lengths in preallocated buffers. All rows end at the same column
and are padded on the left. A step writes one column in place; a new row is copied so that it ends
at that column; the last row takes the place of a finished one. `Window` is the part of the buffers
in use. Stale values in a row's padding must be finite, since masked attention multiplies them by 0.

`RequestCache` is for models that keep more than keys and values (state-space and linear attention
layers, which padding would disturb). It is the model's own cache, with the rows of one request.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedConfig, cache_utils
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)

GRAIN = 32
"""Buffers grow in multiples of this many columns."""
PLAIN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    # Layers without keys. Before transformers 5.23 they look like linear attention, so that the
    # requests of a model that has them decode one by one.
    getattr(cache_utils, "DummyLayer", DynamicLayer),
)


def shares_rows(config: PreTrainedConfig) -> bool:
    """Whether rows of several requests can decode together: all layers are attention."""
    return all(type(layer) in PLAIN_LAYERS for layer in DynamicCache(config=config).layers)


def make_cache(config: PreTrainedConfig, max_rows: int) -> RowCache | RequestCache:
    """A RowCache if the model allows it, else a RequestCache."""
    return RowCache(max_rows) if shares_rows(config) else RequestCache(config)


@dataclass(slots=True)
class Window:
    """The part of the buffers in use: the first `rows`, columns `start` to `end`."""

    rows: int = 0
    start: int = 0
    end: int = 0
    starts: list[int] = field(default_factory=list)
    """Each row's first column; (rows,)."""


class RowLayer(DynamicLayer):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """One layer's keys and values; (row capacity, heads, column capacity, head size) each."""

    keys: Tensor  # set before the first pass, unlike the parent's
    values: Tensor

    def __init__(self, window: Window) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # transformers types it partly
        self.window = window

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        w = self.window
        after = w.end + key_states.shape[-2]
        self.keys[: w.rows, :, w.end : after] = key_states
        self.values[: w.rows, :, w.end : after] = value_states
        return self.keys[: w.rows, :, w.start : after], self.values[: w.rows, :, w.start : after]

    def get_seq_length(self) -> int:
        return self.window.end - self.window.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


class RowCache(Cache):
    """Rows of any requests and lengths."""

    def __init__(self, max_rows: int) -> None:
        super().__init__(layers=[])
        self.window = Window()
        self.max_rows = max_rows
        self.row_capacity = self.column_capacity = 0
        self._starts = torch.empty(0, dtype=torch.long)
        self._ragged = False  # some row is padded

    @property
    def past(self) -> Cache:
        """The model's past_key_values."""
        return self

    def empty_prefill(self) -> Cache:
        """A cache for a prefill, for `add`; all its layers keep all columns."""
        return DynamicCache()

    def add(self, prefilled: Cache, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Append rows sources[i] of a left-padded prefill; their prompts have lengths[i] tokens."""
        w, width, count = self.window, prefilled.get_seq_length(), len(sources)
        while len(self.layers) < len(prefilled.layers):
            self.layers.append(RowLayer(w))
        self._make_room(prefilled, w.rows + count, width)
        picked = torch.tensor(sources, device=self._starts.device)
        new = slice(w.rows, w.rows + count)
        columns = slice(w.end - width, w.end)
        for mine, theirs in self._beside(prefilled):
            mine.keys[new, :, columns] = theirs.keys[picked]
            mine.values[new, :, columns] = theirs.values[picked]
        w.rows += count
        w.starts.extend(w.end - length for length in lengths)
        self._trim()

    def retain(self, order: Sequence[int]) -> None:
        """Keep len(order) rows; the old row order[i] becomes row i."""
        moves = [(to, source) for to, source in enumerate(order) if to != source]
        w = self.window
        if moves:
            to, source = torch.tensor(moves, device=self._starts.device).unbind(1)
            used = slice(w.start, w.end)
            for layer, _ in self._beside(self):
                layer.keys[to, :, used] = layer.keys[source, :, used]
                layer.values[to, :, used] = layer.values[source, :, used]
        w.rows = len(order)
        w.starts = [w.starts[i] for i in order]
        self._trim()

    def step_inputs(self) -> dict[str, Tensor]:
        """The model's arguments for one new token per row; makes room for it."""
        w = self.window
        if w.end == self.column_capacity:
            self._make_room(self, w.rows, w.end - w.start)
        positions = (w.end - self._starts).unsqueeze(1)
        if not self._ragged:
            return {"position_ids": positions}
        columns = torch.arange(w.start, w.end + 1, device=self._starts.device)
        return {"position_ids": positions, "attention_mask": columns >= self._starts.unsqueeze(1)}

    def advance(self) -> None:
        """The forward pass has written its column."""
        self.window.end += 1

    def _trim(self) -> None:
        w = self.window
        w.start = min(w.starts, default=w.end)
        self._ragged = max(w.starts, default=w.end) > w.start
        self._starts = torch.tensor(w.starts, dtype=torch.long, device=self._starts.device)

    def _make_room(self, like: Cache, rows: int, width: int) -> None:
        """Make room for `rows` rows of `width` columns up to the window's end, and one more column.

        If they don't fit, copy the window to the front of new buffers that are 1.5 times as wide as
        needed, so that this is rare.
        """
        w = self.window
        if not w.rows and rows <= self.row_capacity and width < self.column_capacity:
            w.end = width
            return
        if w.rows and rows <= self.row_capacity and width <= w.end < self.column_capacity:
            return
        used = w.end - w.start
        end = max(used, width)
        if rows > self.row_capacity:
            self.row_capacity = max(rows, min(2 * self.row_capacity, self.max_rows))
        self.column_capacity = -(-(end + max(end // 2, GRAIN)) // GRAIN) * GRAIN
        for mine, model in self._beside(like):
            mine.keys = self._moved(mine.keys, model.keys, end - used)
            mine.values = self._moved(mine.values, model.values, end - used)
            mine.is_initialized = True
            self._starts = self._starts.to(mine.keys.device)
        w.starts = [start - w.start + end - used for start in w.starts]
        w.start, w.end = end - used, end
        self._trim()

    def _beside(self, other: Cache) -> Iterator[tuple[RowLayer, RowLayer]]:
        """Pairs of our layers and another cache's, without those that have no keys."""
        for mine, theirs in zip(self.layers, other.layers, strict=True):
            if theirs.keys is not None:  # type: ignore[union-attr]  # they are attention layers
                yield cast(RowLayer, mine), cast(RowLayer, theirs)

    def _moved(self, old: Tensor | None, like: Tensor, offset: int) -> Tensor:
        w = self.window
        new = like.new_zeros(
            self.row_capacity, like.shape[1], self.column_capacity, like.shape[3]
        )  # zeros, not empty: see the module's docstring
        if old is not None and w.rows:
            used = w.end - w.start
            new[: w.rows, :, offset : offset + used] = old[: w.rows, :, w.start : w.end]
        return new


class RequestCache:
    """The rows of one request, all of one length, in the model's own kind of cache."""

    def __init__(self, config: PreTrainedConfig) -> None:
        self.config = config
        self.past: Cache = self.empty_prefill()
        self._rows = self._length = 0

    def empty_prefill(self) -> Cache:
        """A cache for a prefill, for `add`."""
        return DynamicCache(config=self.config)

    def add(self, prefilled: Cache, sources: Sequence[int], lengths: Sequence[int]) -> None:
        """Take over a prefill; its row sources[i] becomes row i."""
        self.past, self._length = prefilled, lengths[0]
        self.retain(sources)

    def retain(self, order: Sequence[int]) -> None:
        """Keep len(order) rows; the old row order[i] becomes row i."""
        self._rows = len(order)
        if order:
            self.past.reorder_cache(torch.tensor(order))  # type: ignore[arg-type]  # it is a long
        else:
            self.past = self.empty_prefill()

    def step_inputs(self) -> dict[str, Tensor]:
        """The model's arguments for one new token per row."""
        return {"position_ids": torch.full((self._rows, 1), self._length)}

    def advance(self) -> None:
        """The forward pass has added its column."""
        self._length += 1
