"""A pool of samplers that serve many snapshots of the weights.

Each live sampler holds one snapshot. A request for another snapshot starts a new sampler while
there are fewer than `limit`, then takes the least recently used idle one; if all are busy, it
waits. A sampler never changes its weights while it serves a request. One whose worker has failed is
closed, and the next request starts another.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Mapping
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


class SamplerPool(Generic[K, S]):
    """Belongs to one event loop; `make` builds a sampler with any weights.

    `load` reads a snapshot, as weights of the plain model or as an adapter. Both run in a thread.
    """

    def __init__(
        self,
        make: Callable[[], S],
        load: Callable[[K], Mapping[str, Tensor] | LoraWeights],
        limit: int,
    ) -> None:
        self._make: Callable[[], S] = make
        self._load = load
        self._limit = limit
        self._live: OrderedDict[K, _Live[S]] = OrderedDict()  # least recently used first
        self._freed = asyncio.Condition()
        self._loads = 0

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[S]:
        """The sampler of snapshot `key`, loaded if it isn't live."""
        async with self._freed:
            await self._bury()
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
                self._freed.notify_all()

    async def close(self) -> None:
        """End the threads of all samplers."""
        for live in self._live.values():
            await live.sampler.close()
        self._live.clear()

    async def _bury(self) -> None:
        """Close the failed samplers; their users have got the error."""
        for key, live in list(self._live.items()):
            if live.sampler.failed:
                del self._live[key]
                log.error("the sampler of %s failed; the next request starts another", key)
                await live.sampler.close()

    def _has_room(self) -> bool:
        return len(self._live) < self._limit or any(not one.users for one in self._live.values())

    async def _bring(self, key: K) -> _Live[S]:
        """Runs with the condition's lock held, so that a snapshot is loaded once."""
        weights = await asyncio.to_thread(self._load, key)
        idle = next((old for old, one in self._live.items() if not one.users), None)
        if len(self._live) < self._limit:
            live = _Live(await (await asyncio.to_thread(self._make)).__aenter__())
        else:
            assert idle is not None  # _has_room said so, and users only ever leave meanwhile
            live = self._live.pop(idle)
        self._live[key] = live
        self._loads += 1
        try:
            await live.sampler.load_weights(weights, self._loads)
        except BaseException:
            del self._live[key]
            await live.sampler.close()
            raise
        return live
