"""What tasks share: the units of a capacity, and values that are freed after their last use."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from retrain.errors import AdapterError

T = TypeVar("T", bound=Hashable)
log = logging.getLogger(__name__)


class Capacity:
    """Units lent in the order of the requests, so that no request starves another.

    A request for more than all units gets all of them, so it is alone.
    """

    def __init__(self, units: int) -> None:
        self.units = self.free = units
        self.turn = asyncio.Lock()
        """Held by the request that is next."""
        self.returned = asyncio.Event()

    def take(self, units: int = 1) -> Loan:
        """Hold `units` within an `async with`; entering waits until they are free."""
        return Loan(self, min(units, self.units))


class Loan:
    """Holds units within an `async with`.

    A class and not a generator: thousands of live generators would cost the garbage collector a
    large part of a client's time.
    """

    __slots__ = ("_capacity", "_units")

    def __init__(self, capacity: Capacity, units: int) -> None:
        self._capacity = capacity
        self._units = units

    async def __aenter__(self) -> None:
        async with self._capacity.turn:
            while self._capacity.free < self._units:
                self._capacity.returned.clear()
                await self._capacity.returned.wait()
            self._capacity.free -= self._units

    async def __aexit__(self, *exception: object) -> None:
        self._capacity.free += self._units
        self._capacity.returned.set()


class Leases(Generic[T]):
    """The value that new requests use, and earlier ones that requests still use.

    `free` frees a value that was replaced, once its last request has ended.
    """

    def __init__(self, free: Callable[[T], Awaitable[None]]) -> None:
        self._free = free
        self._present: T | None = None
        self._live: set[T] = set()
        self._requests: Counter[T] = Counter()
        self._freeing: set[asyncio.Task[None]] = set()

    def add(self, value: T) -> None:
        """The value needs to be freed, even if it is never used."""
        self._live.add(value)

    def use(self, value: T) -> None:
        """Give this value to new requests."""
        self._live.add(value)
        before, self._present = self._present, value
        if before is not None:
            self._free_unused(before)

    @contextmanager
    def in_use(self) -> Iterator[T]:
        """The present value, which stays until the block ends.

        Raises AdapterError if there is none yet.
        """
        value = self._present
        if value is None:
            raise AdapterError("can't sample: no weights are published yet")
        self._requests[value] += 1
        try:
            yield value
        finally:
            self._requests[value] -= 1
            self._free_unused(value)

    async def freed(self) -> None:
        """Wait until every value that was let go is freed."""
        while self._freeing:
            await asyncio.wait(self._freeing)

    async def close(self) -> None:
        """Free every value that no request uses."""
        self._present = None
        for value in list(self._live):
            self._free_unused(value)
        await self.freed()

    def cancel(self) -> None:
        """Free nothing more: whoever holds the values has gone."""
        for task in self._freeing:
            task.cancel()

    def _free_unused(self, value: T) -> None:
        if value == self._present or self._requests[value] or value not in self._live:
            return
        self._live.discard(value)
        del self._requests[value]
        task = asyncio.create_task(self._freed(value), name=f"free {value}")
        self._freeing.add(task)
        task.add_done_callback(self._freeing.discard)

    async def _freed(self, value: T) -> None:
        try:
            await self._free(value)
        except AdapterError as error:  # costs a server some memory and does not harm the run
            log.warning("could not free %s: %s", value, error)
