"""An event loop whose clock jumps to the next timer, so that waiting takes no time.

Nothing runs beside it: blocking calls run at once, and the watch's thread does not start. The
order of all events then depends on the program alone.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from retrain.supervision.threads import DaemonPool
from retrain.supervision.watch import Watch


class DeadlockError(Exception):
    """Every task waits, and no timer is set."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """The loop; `now` is its time in seconds."""

    now = 0.0

    def __init__(self) -> None:
        super().__init__(_Selector(self))

    def time(self) -> float:
        return self.now

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except BaseException as error:  # noqa: BLE001 - raised in the waiting task
            future.set_exception(error)
        return future


class _Selector(selectors.DefaultSelector):
    """Moves the loop's clock to the next timer where another selector would wait."""

    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[Any]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise DeadlockError
        if not ready and timeout:
            self._loop.now += timeout
        return ready


async def _at_once(self: DaemonPool, call: Callable[[], Any], seconds: float | None = None) -> Any:
    return call()


@contextmanager
def virtual() -> Iterator[None]:
    """No threads, no report, and no sync of the disk: no history loses power."""
    with (
        mock.patch.object(DaemonPool, "run", _at_once),
        mock.patch.object(Watch, "_run"),
        mock.patch("os.fsync"),
        mock.patch("retrain.pipeline.recorder.write_report"),
    ):
        yield
