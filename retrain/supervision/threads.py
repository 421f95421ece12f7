"""Daemon threads for blocking user code: a thread that hangs is abandoned and never joined.

The standard executors and anyio's worker threads are joined when the program ends, so that a reward
that never returns would keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
Job = tuple[Callable[[], Any], asyncio.AbstractEventLoop, "asyncio.Future[Any]"]


class DaemonPool:
    """At most `size` threads for blocking calls. Call all methods on the event loop.

    An abandoned thread doesn't count: another one may replace it.
    """

    def __init__(self, size: int, name: str = "retrain-user-code") -> None:
        self._free = asyncio.Semaphore(size)
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        """Of all threads, so that calls begin in their order, whichever thread wakes first."""
        self._threads = 0
        self._idle = 0
        self._abandoned = 0

    async def run(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Run `call()` in a thread. Cancelling the await abandons the thread.

        Raises TimeoutError `seconds` after a thread started it, and abandons that thread.
        """
        async with self._free, asyncio.timeout(seconds):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[T] = loop.create_future()
            if self._idle:
                self._idle -= 1
            else:
                threading.Thread(target=self._work, name=self._name, daemon=True).start()
                self._threads += 1
            self._jobs.put((call, loop, future))
            try:
                return await future
            except asyncio.CancelledError:
                if future.cancelled():  # the thread ends with its call
                    self._threads -= 1
                    self._abandoned += 1
                raise

    def close(self) -> None:
        """End the idle threads."""
        for _ in range(self._threads + self._abandoned):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, loop, future = job
            try:
                outcome: Any = call()
                error = None
            except BaseException as raised:  # noqa: BLE001 - raised in the waiting task
                outcome, error = None, raised
            try:
                loop.call_soon_threadsafe(self._deliver, future, outcome, error)
            except RuntimeError:  # the loop is closed: nothing waits for the result
                return
            del job, call, future, outcome, error

    def _deliver(
        self, future: asyncio.Future[Any], outcome: Any, error: BaseException | None
    ) -> None:
        if future.cancelled():
            self._abandoned -= 1
            self._jobs.put(None)
            return
        self._idle += 1
        if error is None:
            future.set_result(outcome)
        else:
            future.set_exception(error)


async def in_thread(call: Callable[[], T]) -> T:
    """Await a blocking call in a daemon thread of its own; cancelling abandons the thread."""
    pool = DaemonPool(1)
    try:
        return await pool.run(call)
    finally:
        pool.close()
