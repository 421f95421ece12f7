"""ContextTask: an async context manager that is entered and left in a separate task."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Generic, TypeVar

T = TypeVar("T")


class ContextTask(Generic[T]):
    """Keeps open what `make` returns, until it is closed or fails.

    A cancel scope in it, such as of anyio, belongs to its own task, so that its failure cancels
    nobody else, and any task may open and close it. One call at a time.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]], name: str) -> None:
        self._make, self._name = make, name
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._value: T | None = None

    @property
    def value(self) -> T | None:
        """What it gave; None while it is not open."""
        return self._value if self._task is not None and not self._task.done() else None

    async def open(self) -> T:
        """Enter a new one, and leave the one before.

        Raises what entering raises, and ConnectionError if the context cancels its own task.
        """
        await self.close()
        ready: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._leave = asyncio.Event()
        self._task = asyncio.create_task(self._hold(ready, self._leave), name=self._name)
        try:
            self._value = await ready
        except asyncio.CancelledError:
            self._task.cancel()
            raise
        return self._value

    async def close(self) -> None:
        """Leave it; returns when it has ended."""
        self._value = None
        if self._task is not None:
            self._leave.set()
            await asyncio.wait([self._task])
            self._task = None

    async def _hold(self, ready: asyncio.Future[T], leave: asyncio.Event) -> None:
        lost = ConnectionError(f"{self._name}: the context cancelled itself while it opened")
        try:
            async with self._make() as value:
                if not ready.done():  # a caller that is cancelled has cancelled `ready`
                    ready.set_result(value)
                    await leave.wait()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - `open` raises it
            if not ready.done():  # once it is open, whoever uses it sees it fail
                ready.set_exception(error)
        finally:
            if not ready.done():
                ready.set_exception(lost)
