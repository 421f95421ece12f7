"""What Ctrl-C, SIGTERM and SIGHUP do: the first cancels a task, the second ends the process (P10).

The handlers are those of the process, not of the loop, so that they work while user code blocks the
loop. The guardian acts where they can't run.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from retrain.concurrency.guardian import guardian
from retrain.concurrency.watchdog import debugging


class Interrupts:
    """Signal handlers that cancel `task` and call `announce`, which must not lock.

    The second signal ends the process with the exit code `code`. At the prompt of a debugger,
    Ctrl-C belongs to the debugger.
    """

    # any: the result of the task doesn't matter
    def __init__(self, task: asyncio.Task[Any], announce: Callable[[], None], code: int) -> None:
        self.asked = False
        """Whether there was a signal."""
        self._task, self._announce, self._code = task, announce, code
        self._process = os.getpid()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals meanwhile; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can set handlers
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # ignored under nohup, and stays so
            numbers.append(signal.SIGHUP)
        handle = self._handle  # one object: the guardian compares it
        before = {number: signal.signal(number, handle) for number in numbers}
        try:
            with guardian.signals(handle):
                yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process:
            self._handle_in_fork(number)
            return
        guardian.heard()
        if number == signal.SIGINT and frame and debugging(frame):
            raise KeyboardInterrupt  # the debugger returns to its prompt
        if self.asked:
            guardian.leaving()
            os._exit(self._code)
        self.asked = True
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._announce()

    def _handle_in_fork(self, number: int) -> None:
        """In a worker that user code forked: the run decides on Ctrl-C, other signals end it."""
        if number != signal.SIGINT:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif self.asked:
            os._exit(self._code)
        self.asked = True
