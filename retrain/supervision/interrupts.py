"""What Ctrl-C, SIGTERM and SIGHUP do: the first cancels a task, the second ends the process (P10).

The handlers are those of the process, not of the loop, so that they work while user code blocks the
loop. While code holds the interpreter they can't run: Ctrl-\\ (SIGQUIT) then ends the process.
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

from retrain.supervision.leash import leash
from retrain.supervision.watch import debugging


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

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Handle the signals meanwhile; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield  # only the main thread can set handlers
            return
        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # ignored under nohup, and stays so
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, self._handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and frame and debugging(frame):
            raise KeyboardInterrupt  # the debugger returns to its prompt
        if self.asked:
            leash.let_go()
            os._exit(self._code)
        self.asked = True
        self._task.get_loop().call_soon_threadsafe(self._task.cancel)
        self._announce()
