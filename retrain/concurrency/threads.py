"""Daemon threads for a user's blocking code: one that hangs is abandoned, and never waited for.

The standard executors and anyio's worker threads are joined when the program ends, so a reward
that blocks for ever would keep the process alive; these are not.
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
    """At most `size` threads that run blocking calls; all methods belong to the event loop.

    A thread that was abandoned counts no more: another one may start in its place.
    """

    def __init__(self, size: int, name: str = "retrain-user-code") -> None:
        self._free = asyncio.Semaphore(size)
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._abandoned = 0

    async def run(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """`call()` in a thread; cancelling the await abandons the thread to its fate.

        Raises TimeoutError `seconds` after a thread took it, which is abandoned too.
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
                if future.cancelled():  # the thread leaves when its call ends
                    self._threads -= 1
                    self._abandoned += 1
                raise

    def close(self) -> None:
        """Let the idle threads end."""
        for _ in range(self._threads + self._abandoned):
            self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            call, loop, future = job
            try:
                outcome: Any = call()
                error = None
            except BaseException as raised:  # noqa: BLE001 - it is handed to the waiting task
                outcome, error = None, raised
            try:
                loop.call_soon_threadsafe(self._deliver, future, outcome, error)
            except RuntimeError:  # the loop is closed: nobody waits any more
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
