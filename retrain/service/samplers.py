"""A pool of samplers that serve many snapshots of the weights.

Each live sampler holds one snapshot. A request for another snapshot starts a new sampler while
there are fewer than `limit` and memory is free, then takes the least recently used idle one; if all
are busy, it waits. A sampler never changes its weights while it serves a request. One whose worker
has failed, or whose snapshot nobody needs any more, is closed.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Collection, Hashable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from torch import Tensor

from retrain.engine.weights import LoraWeights

log = logging.getLogger(__name__)


class Publishable(Protocol):
    """What the pool asks of a sampler."""

    @property
    def failed(self) -> bool: ...
    async def load_weights(
        self, weights: Mapping[str, Tensor] | LoraWeights, version: int
    ) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def close(self) -> None: ...


K = TypeVar("K", bound=Hashable)
S = TypeVar("S", bound=Publishable)


@dataclass(slots=True, eq=False)
class _Live(Generic[S]):
    sampler: S
    users: int = 0
    unwanted: bool = False
    """It is closed as soon as nobody uses it."""


class SamplerPool(Generic[K, S]):
    """Belongs to one event loop; `make` builds a sampler with any weights.

    `load` reads a snapshot, as weights of the plain model or as an adapter. Both run in a thread.
    `room` says whether memory for another sampler is free; the first one is made in any case.
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
        self._limit, self._room = limit, room
        self._live: OrderedDict[K, _Live[S]] = OrderedDict()  # least recently used first
        self._freed = asyncio.Condition()
        self._loads = 0

    @asynccontextmanager
    async def use(self, key: K) -> AsyncIterator[S]:
        """The sampler of snapshot `key`, loaded if it isn't live."""
        async with self._freed:
            await self._bury()
            while key not in self._live and not (self._may_grow() or self._idle()):
                await self._freed.wait()
                await self._bury()
            live = self._live.get(key) or await self._bring(key)
            self._live.move_to_end(key)
            live.users, live.unwanted = live.users + 1, False
        try:
            yield live.sampler
        finally:
            live.users -= 1
            async with self._freed:
                await self._bury()
                self._freed.notify_all()

    async def forget(self, keys: Collection[K]) -> None:
        """Free the memory of these snapshots, as soon as nobody samples them."""
        for key in keys:
            if key in self._live:
                self._live[key].unwanted = True
        async with self._freed:
            await self._bury()
            self._freed.notify_all()

    async def close(self) -> None:
        """End the threads of all samplers."""
        for live in self._live.values():
            await live.sampler.close()
        self._live.clear()

    async def _bury(self) -> None:
        """Close failed samplers, whose users have got the error, and unwanted ones."""
        for key, live in list(self._live.items()):
            if live.sampler.failed:
                log.error("the sampler of %s failed; the next request starts another", key)
            elif not live.unwanted or live.users:
                continue
            del self._live[key]
            await live.sampler.close()

    def _may_grow(self) -> bool:
        return not self._live or (len(self._live) < self._limit and self._room())

    def _idle(self) -> list[K]:
        """The snapshots that nobody samples now, the least recently used first."""
        return [key for key, live in self._live.items() if not live.users]

    async def _bring(self, key: K) -> _Live[S]:
        """Runs with the condition's lock held, so that a snapshot is loaded once."""
        weights = await asyncio.to_thread(self._load, key)
        if idle := [] if self._may_grow() else self._idle():  # users only ever leave meanwhile
            live = self._live.pop(idle[0])
        else:
            live = _Live(await (await asyncio.to_thread(self._make)).__aenter__())
        self._live[key] = live
        self._loads += 1
        async with AsyncExitStack() as failed:
            failed.push_async_callback(live.sampler.close)
            failed.callback(self._live.pop, key)
            await live.sampler.load_weights(weights, self._loads)
            failed.pop_all()
        return live
