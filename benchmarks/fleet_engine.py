"""A simulated vLLM server: what a request costs, in the time of the event loop.

The curve is a roofline of a dense model of 8 B parameters in bf16 (36 layers, 8 KV heads of 128)
on one H100 SXM: 3.35 TB/s and 989 TFLOP/s by its data sheet, of which 60% and 40% are assumed to be
reached. No number is measured; all are parameters of `Curve`.

- Reading the weights: 16 GB / 2.0 TB/s = 8 ms per decode step, whatever the number of rows.
- Matrix products: 2 x 8e9 / 400e12 = 40 us per token. Decoding is bound by memory up to 200 rows,
  then by compute. A prompt token costs the same and holds up the rows that decode.
- Attention reads the KV cache: 147 kB x 2,800 tokens of context / 2.0 TB/s = 200 us per row. These
  are the tokens of an average row at an average moment, where the lengths of completions have a
  mean of 2,048 and are lognormal with sigma 1: 2,048 x e / 2.
- The KV cache of 128 such rows is 53 GB, the rest of an 80 GB GPU; further requests wait.

Memory is not modelled further: nothing is preempted.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Literal

from pydantic import BaseModel, ConfigDict

TOKENS = 128
"""Tokens that one simulated id stands for, so that the pipe's lists stay short."""
InFlight = Literal["recompute", "keep_cache", "drain", "adapter"]
"""What happens to requests in flight when weights are pushed: their KV cache is computed again
under the new weights; it is kept; they end first; or a push doesn't concern them (LoRA)."""


class Curve(BaseModel):
    """Seconds that an engine needs."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    overhead: float = 0.002
    """Scheduling and launching a decode step."""
    weights: float = 0.008
    """Reading the weights, once per decode step."""
    compute: float = 40e-6
    """Matrix products of one token, of a prompt or a completion."""
    attention: float = 200e-6
    """Reading the KV cache of one row, per decode step."""
    max_rows: int = 128
    """Rows that decode at the same time."""

    def step(self, rows: int) -> float:
        """One decode step, which gives each of the rows a token."""
        return self.overhead + max(self.weights, self.compute * rows) + self.attention * rows

    @property
    def best(self) -> float:
        """Seconds per token at the number of rows with the highest throughput."""
        return min(self.step(rows) / rows for rows in range(1, self.max_rows + 1))


class EngineLostError(Exception):
    """The engine died with the request in flight."""


@dataclass(slots=True)
class Request:
    """Rows that share a prompt."""

    prompt_ids: Sequence[int]
    lengths: Sequence[int]
    """Tokens to sample, per row."""
    done: asyncio.Future[list[int]]
    """Gets the oldest version of the tokens of each row."""
    left: int
    versions: list[int]
    ended: int = 0
    """Tokens of the rows that are complete."""


@dataclass(slots=True, order=True)
class _Row:
    end: float
    """The engine's count of decode steps at which the row is complete."""
    number: int
    index: int = field(compare=False)
    """The row's place in its request."""
    request: Request = field(compare=False)

    @property
    def length(self) -> int:
        return self.request.lengths[self.index]


class Engine:
    """Advances all its rows together; one timer is set, for the row that ends next."""

    def __init__(self, curve: Curve, salted: bool) -> None:
        """`salted`: the prefix cache is per version, as it is with adapters."""
        self.curve, self.salted = curve, salted
        self.version = 0
        self.up = True
        self.lost = 0.0
        """Tokens that were lost when it died."""
        self.recomputed = 0.0
        """Seconds in which KV caches were computed again after pushes."""
        self._rows: list[_Row] = []
        self._waiting: deque[tuple[int, Request]] = deque()
        self._cached: dict[int, None] = {}
        self._steps = 0.0
        self._at = 0.0
        """Until when `_steps` is counted; later than now while rows are held up."""
        self._numbers = count()
        self._timer: asyncio.TimerHandle | None = None
        self._drained: asyncio.Future[None] | None = None

    async def sample(self, prompt_ids: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Decode rows of these lengths in tokens; returns the oldest version of each row's tokens.

        Raises EngineLostError.
        """
        done = asyncio.get_running_loop().create_future()
        rows = len(lengths)
        request = Request(prompt_ids, lengths, done, rows, [0] * rows)
        self._waiting += [(index, request) for index in range(rows)]
        self._advance()
        self._proceed()
        return await done

    async def swap(self, version: int, mode: InFlight, pause: float) -> None:
        """Serve these weights from now on."""
        if mode == "drain" and self._rows:
            self._drained = asyncio.get_running_loop().create_future()
            await self._drained
            self._drained = None
        if not self.up:
            return
        self._advance()
        self.version = version
        self._at += pause
        if mode in ("recompute", "drain"):
            self._cached.clear()
        if mode == "recompute":
            seconds = self.curve.compute * sum(self._context(row) for row in self._rows)
            self.recomputed += seconds
            self._at += seconds
        self._proceed()
        await asyncio.sleep(pause)

    def die(self) -> None:
        """All requests in flight fail, and the prefix cache is gone."""
        self._advance()
        self.lost += sum(row.length - (row.end - self._steps) for row in self._rows)
        requests = [row.request for row in self._rows] + [request for _, request in self._waiting]
        self.lost += sum({id(request): request.ended for request in requests}.values())
        self.up = False
        self._rows.clear()
        self._waiting.clear()
        self._cached.clear()
        for request in requests:
            if not request.done.done():
                request.done.set_exception(EngineLostError())
        self._proceed()

    def start(self, version: int) -> None:
        """It is up again, with the weights of this version."""
        self.up, self.version = True, version

    def _context(self, row: _Row) -> float:
        decoded = row.length - (row.end - self._steps)
        return len(row.request.prompt_ids) * TOKENS + decoded

    def _advance(self) -> None:
        """Count the decode steps until now."""
        now = asyncio.get_running_loop().time()
        if now > self._at:
            if self._rows:
                self._steps += (now - self._at) / self.curve.step(len(self._rows))
            self._at = now

    def _tick(self) -> None:
        self._advance()
        while self._rows and self._rows[0].end <= self._steps + 1e-6:
            row = heapq.heappop(self._rows)
            request = row.request
            request.left -= 1
            request.ended += row.length
            if not request.left and not request.done.done():
                request.done.set_result(request.versions)
        self._proceed()

    def _proceed(self) -> None:
        """Begin what waits, and set the timer."""
        if self._drained is None:
            while self._waiting and len(self._rows) < self.curve.max_rows:
                self._begin(*self._waiting.popleft())
        elif not self._rows and not self._drained.done():
            self._drained.set_result(None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._rows:
            left = max(0.0, self._rows[0].end - self._steps)
            when = self._at + left * self.curve.step(len(self._rows))
            self._timer = asyncio.get_running_loop().call_at(when, self._tick)

    def _begin(self, index: int, request: Request) -> None:
        tokens = self._uncached(request.prompt_ids) * TOKENS
        self._at += tokens * self.curve.compute
        request.versions[index] = self.version
        end = self._steps + request.lengths[index]
        heapq.heappush(self._rows, _Row(end, next(self._numbers), index, request))

    def keep(self, ids: Sequence[int]) -> None:
        """Put a whole sequence into the prefix cache."""
        self._uncached(ids)

    def _uncached(self, ids: Sequence[int]) -> int:
        """How many ids are not in the prefix cache; they are now.

        As in vLLM, a chain of hashes of blocks; the oldest blocks are evicted.
        """
        chain, missing, cached = self.version if self.salted else 0, 0, self._cached
        for one in ids:
            chain = hash((chain, one))
            missing += chain not in cached
            cached.pop(chain, None)
            cached[chain] = None
        while len(cached) > self.curve.max_rows * 3000 // TOKENS:
            del cached[next(iter(cached))]
        return missing
