"""From logits to tokens: temperature, top-k, top-p, and the log-prob of the drawn token.

A row's random numbers are a function of its key and of how many tokens it has drawn (SplitMix64,
Steele et al. 2014), and a token is the inverse of the cumulative distribution at that number. A
row therefore draws the same tokens whatever else is in the batch, up to rounding of its logits.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from retrain.sampler import SamplingParams

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 40))
_FACTORS = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
Keys = NDArray[np.uint64]


class Top(NamedTuple):
    """The likeliest tokens, in order; a place without a token has id 0 and log-prob -inf."""

    ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class Mask(Protocol):
    """The tokens that a row may draw next; its methods must not raise."""

    def allowed(self) -> NDArray[np.bool_]:
        """One value per token, for the first tokens of the vocabulary; at least one is True."""
        ...

    def drew(self, token: int) -> None: ...


@dataclass(slots=True, eq=False, kw_only=True)
class Row:
    """What is needed to draw a token for a row."""

    params: SamplingParams
    key: int
    token_ids: list[int] = field(default_factory=list)
    mask: Mask | None = None
    """None if the row may draw all tokens, as rows that are trained always may."""
    top: int = 0
    """How many of the likeliest tokens to report."""


class Drawn(NamedTuple):
    """One step of every row."""

    tokens: list[int]
    logprobs: list[float]
    tops: list[Top | None]
    """Of the distribution that was drawn from, (top,) each; None for a row that asks for none."""


def row_keys(seed: int | None, count: int) -> list[int]:
    """The keys of a request's rows: derived from (seed, i), or random without a seed."""
    if seed is None:
        return [secrets.randbits(64) for _ in range(count)]
    root = _mixed(np.array([seed % 2**64], dtype=np.uint64) + GOLDEN)
    keys: list[int] = _mixed(root + np.arange(1, count + 1, dtype=np.uint64) * GOLDEN).tolist()
    return keys


def uniforms(states: Keys) -> NDArray[np.float32]:
    """Numbers in [0, 1), 24 bits each, so that float32 holds them exactly."""
    return (_mixed(states) >> _SHIFTS[3]).astype(np.float32) * np.float32(2**-24)


class Drawer:
    """Draws one token per row and step; made anew when the rows change."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        self._states, self._device = _states(rows), device
        self._tops = [row.top for row in rows]
        self._masks = [(i, row.mask) for i, row in enumerate(rows) if row.mask is not None]
        temperatures = [row.params.temperature for row in rows]
        greedy, heat = [t == 0 for t in temperatures], [t or 1.0 for t in temperatures]
        self._all_greedy = all(greedy)
        self._greedy = self._tensor(greedy) if any(greedy) else None
        self._temperature = self._tensor(heat)[:, None] if set(heat) != {1.0} else None
        self._cut = _Cut(rows, device)

    def __call__(self, logits: Tensor) -> Drawn:
        """A token per row, from logits of shape (rows, vocabulary)."""
        logits = logits.float()
        if self._masks:
            logits = self._masked(logits)
        if self._temperature is not None:
            logits = logits / self._temperature
        logprobs = logits.log_softmax(-1)
        if self._all_greedy:
            tokens = logprobs.argmax(-1)
        else:
            u = torch.from_numpy(uniforms(self._states)).to(self._device)[:, None]
            tokens = _inverse_cdf(logprobs.exp(), u).squeeze(1)
            if self._greedy is not None:
                tokens = torch.where(self._greedy, logprobs.argmax(-1), tokens)
        chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
        if len(cut := self._cut.rows):
            tokens[cut], chosen[cut], kept = self._cut(logprobs[cut], u[cut])
            if any(self._tops):
                logprobs[cut] = kept
        self._states += GOLDEN
        drawn = tokens.tolist()
        for row, mask in self._masks:
            mask.drew(drawn[row])
        return Drawn(drawn, chosen.tolist(), self._likeliest(logprobs))

    def _masked(self, logits: Tensor) -> Tensor:
        logits = logits.clone()
        for row, mask in self._masks:
            allowed = torch.from_numpy(mask.allowed()[: logits.shape[1]]).to(self._device)
            logits[row, : len(allowed)].masked_fill_(~allowed, -torch.inf)
            logits[row, len(allowed) :] = -torch.inf
        return logits

    def _likeliest(self, logprobs: Tensor) -> list[Top | None]:
        if not any(self._tops):
            return [None] * len(self._tops)
        ids, values = (found.numpy() for found in top_tokens(logprobs, max(self._tops)))
        return [
            Top(ids[row, :count].copy(), values[row, :count].copy()) if count else None
            for row, count in enumerate(self._tops)
        ]

    def _tensor(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=self._device)


class _Cut:
    """The rows that may draw only some of their likeliest tokens."""

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        params = {i: row.params for i, row in enumerate(rows) if _is_cut(row.params)}
        self.rows = torch.tensor([*params], dtype=torch.long, device=device)
        self._top_k = torch.tensor([[p.top_k] for p in params.values()], device=device)
        self._top_p = torch.tensor([[p.top_p] for p in params.values()], device=device)

    def __call__(self, logprobs: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Draw from the smallest set of the top-k tokens with probability top-p or more.

        Also returns the log-probs of all tokens in that distribution, -inf outside the set.
        """
        ordered, ids = logprobs.sort(dim=-1, descending=True, stable=True)
        ranks = torch.arange(ordered.shape[1], device=ordered.device)
        ordered = ordered.masked_fill((self._top_k > 0) & (ranks >= self._top_k), -torch.inf)
        probs = ordered.softmax(-1)
        before = probs.cumsum(-1) - probs
        kept = (before < self._top_p) & (probs > 0)
        kept[:, 0] = True  # of a top_p that is 0 in float32 too
        ordered = ordered.masked_fill(~kept, -torch.inf).log_softmax(-1)
        place = _inverse_cdf(ordered.exp(), u)
        place = torch.minimum(place, kept.sum(-1, keepdim=True) - 1)
        drawn, chosen = (found.gather(1, place).squeeze(1) for found in (ids, ordered))
        return drawn, chosen, torch.empty_like(ordered).scatter_(1, ids, ordered)


def _states(rows: Sequence[Row]) -> Keys:
    """Where each row is in its sequence of random numbers."""
    keys = np.array([row.key for row in rows], dtype=np.uint64)
    drawn = np.array([len(row.token_ids) + 1 for row in rows], dtype=np.uint64)
    return keys + drawn * GOLDEN


def _is_cut(params: SamplingParams) -> bool:
    """Whether a row may draw only its likeliest tokens."""
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def top_tokens(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids (int32) and log-probs of the likeliest tokens of (..., V), in order: (..., count), CPU.

    Where fewer than `count` tokens have a probability, the rest has id 0 and log-prob -inf.
    """
    size = logprobs.shape[-1]
    values, ids = logprobs.topk(min(count, size), dim=-1)
    ids = ids.masked_fill(values == -torch.inf, 0)
    missing = (0, count - values.shape[-1])
    values = torch.nn.functional.pad(values, missing, value=-torch.inf)
    return torch.nn.functional.pad(ids, missing).int().cpu(), values.float().cpu()


def _inverse_cdf(probs: Tensor, u: Tensor) -> Tensor:
    """The first entry whose cumulative probability exceeds u times the total; (rows, 1)."""
    cumulative = probs.cumsum(-1)
    place = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    return place.clamp_(max=probs.shape[1] - 1)


def _mixed(states: Keys) -> Keys:
    """SplitMix64's output function; wraps at 64 bits."""
    mixed = (states ^ (states >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    out: Keys = mixed ^ (mixed >> _SHIFTS[2])
    return out
