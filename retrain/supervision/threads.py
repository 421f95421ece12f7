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
Jobs = queue.SimpleQueue[Job | None]
"""Those of one thread, which ends at None."""


class DaemonPool:
    """At most `size` threads for blocking calls. Call all methods on the event loop.

    An abandoned thread doesn't count: another one may replace it.
    """

    def __init__(self, size: int, name: str = "retrain-user-code") -> None:
        self._free = asyncio.Semaphore(size)
        self._name = name
        self._idle: list[Jobs] = []
        """Of the threads that wait for a job."""
        self._closed = False

    async def run(self, call: Callable[[], T], seconds: float | None = None) -> T:
        """Run `call()` in a thread. Cancelling the await abandons the thread.

        Raises TimeoutError `seconds` after a thread started it, and abandons that thread.
        """
        async with self._free, asyncio.timeout(seconds):
            loop = asyncio.get_running_loop()
            future: asyncio.Future[T] = loop.create_future()
            jobs = self._idle.pop() if self._idle else self._start()
            jobs.put((call, loop, future))
            return await future

    def close(self) -> None:
        """End the threads; those that still work end with their call."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _start(self) -> Jobs:
        jobs: Jobs = queue.SimpleQueue()
        threading.Thread(target=self._work, args=(jobs,), name=self._name, daemon=True).start()
        return jobs

    def _work(self, jobs: Jobs) -> None:
        while (job := jobs.get()) is not None:
            call, loop, future = job
            try:
                outcome: Any = call()
                error = None
            except BaseException as raised:  # noqa: BLE001 - raised in the waiting task
                outcome, error = None, raised
            try:
                loop.call_soon_threadsafe(self._deliver, jobs, future, outcome, error)
            except RuntimeError:  # the loop is closed: nothing waits for the result
                return
            del job, call, future, outcome, error

    def _deliver(
        self, jobs: Jobs, future: asyncio.Future[Any], outcome: Any, error: BaseException | None
    ) -> None:
        if self._closed or future.cancelled():  # an abandoned thread ends with its call
            jobs.put(None)
        else:
            self._idle.append(jobs)
        if future.cancelled():
            return
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
