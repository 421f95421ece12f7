"""A pool of samplers that serve many snapshots of the weights.

Each live sampler holds one snapshot. A request for another snapshot starts a new sampler while
there are fewer than `limit` and there is memory for one, then takes the least recently used idle
one; if all are busy, it waits. A sampler never changes its weights while it serves a request. One
whose worker has failed is closed, and the next request starts another; so is one whose snapshot was
dropped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Set
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from retrain.engine.sampler import LocalSampler
from retrain.engine.weights import LoraWeights
from retrain.service.served import ServedSampler

K = TypeVar("K", bound=Hashable)
S = TypeVar("S", LocalSampler, ServedSampler)
log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Live(Generic[S]):
    sampler: S
    users: int = 0
    dropped: bool = False


class SamplerPool(Generic[K, S]):
    """Belongs to one event loop; `make` builds a sampler with any weights.

    `load` reads a snapshot, as weights of the plain model or as an adapter. Both run in a thread.
    `room` says whether there is memory for one more sampler.
    """

    def __init__(
        self,
        make: Callable[[], S],
        load: Callable[[K], Mapping[str, Tensor] | LoraWeights],
        limit: int,
        room: Callable[[], bool] = lambda: True,
    ) -> None:
        self._make: Callable[[], S] = make
        self._load = load
        self._limit = limit
        self._room = room
        self._live: OrderedDict[K, _Live[S]] = OrderedDict()  # least recently used first
        self._freed = asyncio.Condition()
        self._loads = 0

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[S]:
        """The sampler of snapshot `key`, loaded if it isn't live."""
        async with self._freed:
            await self._bury()
            if key in self._live:
                self._live[key].dropped = False  # another session samples it
            while key not in self._live and not self._has_room():
                await self._freed.wait()
                await self._bury()
            live = self._live.get(key) or await self._bring(key)
            self._live.move_to_end(key)
            live.users += 1
        try:
            yield live.sampler
        finally:
            live.users -= 1
            async with self._freed:
                await self._bury()
                self._freed.notify_all()

    async def drop(self, keys: Set[K]) -> None:
        """Close the samplers of these snapshots, or when their requests end."""
        async with self._freed:
            for key in keys & self._live.keys():
                self._live[key].dropped = True
            await self._bury()
            self._freed.notify_all()

    async def close(self) -> None:
        """End the threads of all samplers."""
        for live in self._live.values():
            await live.sampler.close()
        self._live.clear()

    async def _bury(self) -> None:
        """Close the failed samplers, whose users have got the error, and dropped idle ones."""
        for key, live in list(self._live.items()):
            if live.sampler.failed:
                log.error("the sampler of %s failed; the next request starts another", key)
            elif not live.dropped or live.users:
                continue
            del self._live[key]
            await live.sampler.close()

    def _grows(self) -> bool:
        return not self._live or (len(self._live) < self._limit and self._room())

    def _has_room(self) -> bool:
        return any(not one.users for one in self._live.values()) or self._grows()

    async def _bring(self, key: K) -> _Live[S]:
        """Runs with the condition's lock held, so that a snapshot is loaded once."""
        weights = await asyncio.to_thread(self._load, key)
        idle = [old for old, one in self._live.items() if not one.users]
        if not idle or self._grows():
            live = _Live(await (await asyncio.to_thread(self._make)).__aenter__())
        else:
            live = self._live.pop(idle[0])
        self._live[key] = live
        self._loads += 1
        try:
            await live.sampler.load_weights(weights, self._loads)
        except BaseException:
            del self._live[key]
            await live.sampler.close()
            raise
        return live
