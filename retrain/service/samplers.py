"""A few local samplers that serve many snapshots of the weights.

Each live sampler holds one snapshot. A request for a snapshot that isn't live takes over the
sampler that has rested longest, or makes another one as long as there are fewer than `limit`;
when all are busy it waits. A sampler is never given other weights while a request of it is under
way, so what was asked of a snapshot is answered by that snapshot.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from torch import Tensor

from retrain.engine.sampler import LocalSampler

Key = str
Load = Callable[[], Mapping[str, Tensor]]
"""Reads a snapshot as the weights of the plain model; runs in a thread."""


@dataclass(slots=True, eq=False)
class _Live:
    sampler: LocalSampler
    users: int = 0


class SamplerPool:
    """Belongs to one event loop; `make` builds a sampler with whatever weights."""

    def __init__(self, make: Callable[[], LocalSampler], limit: int) -> None:
        self._make = make
        self._limit = limit
        self._live: OrderedDict[Key, _Live] = OrderedDict()  # the longest rested first
        self._freed = asyncio.Condition()
        self._loads = 0

    @asynccontextmanager
    async def use(self, key: Key, load: Load) -> AsyncIterator[LocalSampler]:
        """The sampler of the snapshot `key`, loaded when it isn't live."""
        async with self._freed:
            while key not in self._live and not self._has_room():
                await self._freed.wait()
            live = self._live.get(key) or await self._bring(key, load)
            self._live.move_to_end(key)
            live.users += 1
        try:
            yield live.sampler
        finally:
            live.users -= 1
            async with self._freed:
                self._freed.notify_all()

    async def close(self) -> None:
        """End every sampler's thread."""
        for live in self._live.values():
            await live.sampler.close()
        self._live.clear()

    def _has_room(self) -> bool:
        return len(self._live) < self._limit or any(not one.users for one in self._live.values())

    async def _bring(self, key: Key, load: Load) -> _Live:
        """With the condition's lock held, so that a snapshot is loaded once."""
        weights = await asyncio.to_thread(load)
        rested = next((old for old, one in self._live.items() if not one.users), None)
        if len(self._live) < self._limit:
            live = _Live(await (await asyncio.to_thread(self._make)).__aenter__())
        else:
            assert rested is not None  # _has_room said so, and users only ever leave meanwhile
            live = self._live.pop(rested)
        self._live[key] = live
        self._loads += 1
        try:
            await live.sampler.load_weights(weights, self._loads)
        except BaseException:
            del self._live[key]
            await live.sampler.close()
            raise
        return live
