"""Find user code that blocks the event loop for a while: nothing else runs meanwhile.

`deadlines.blocked` ends a process that is blocked for minutes. Shorter blocks only make everything
slower, so they are reported.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Self

from retrain.concurrency.watchdog import debugging, named
from retrain.errors import INCLUDED, LIBRARIES

OURS = (LIBRARIES[0], str(Path(asyncio.__file__).parent))
"""The folders of code that calls user code, or waits for it."""
ADVICE = (
    "While it is blocked, no other rollout continues and no deadline applies. Use `await`, or move "
    "the work to a thread: `await asyncio.to_thread(...)`."
)
STOPPED = 1.0
"""Seconds. If the thread is later and nothing was computed, something stopped the process."""


class BlockedLoop:
    """A context manager that watches the running loop from a daemon thread.

    When the loop was blocked for more than `seconds`, it calls `found` in the loop, with the place
    in user code that did it, for how long, and in how many calls, one directly after the other. It
    measures up to a fifth of `seconds` too little.
    """

    def __init__(self, seconds: float, found: Callable[[str, float, int], None]) -> None:
        self._seconds, self._found = seconds, found
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._owes = False
        """Whether the loop was asked for an answer that it hasn't given."""
        self._since = 0.0
        """When it was asked."""
        self._spent: Counter[str] = Counter()
        """The milliseconds that it spent in each place since."""
        self._tasks: dict[str, set[int]] = {}
        """The tasks that were there: each runs at most once before the answer."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="retrain-blocks", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        tick = self._seconds / 5
        now, computed = time.monotonic(), time.process_time()
        while not self._stop.wait(tick):
            before, now = now, time.monotonic()
            computed_before, computed = computed, time.process_time()
            late = now - before - tick
            computing = computed - computed_before > (now - before) / 10
            if debugging() or (late > STOPPED and not computing):
                self._since += now - before
                continue
            # code that holds the interpreter keeps this thread waiting too
            held = late > tick and computing and not self._owes
            if self._owes or held:
                place = _user_code(sys._current_frames().get(self._loop_thread))
                self._spent[place] += round(1000 * (now - before))
                self._tasks.setdefault(place, set()).add(id(asyncio.current_task(self._loop)))
            if not self._owes:
                self._owes, self._since = True, before if held else now
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return

    def _answer(self) -> None:
        seconds = time.monotonic() - self._since
        self._owes = False
        spent, self._spent = self._spent.most_common(1), Counter()
        tasks, self._tasks = self._tasks, {}
        if seconds > self._seconds and spent and (place := spent[0][0]):
            self._found(place, seconds, max(1, len(tasks.get(place, ()))))


def _user_code(frame: FrameType | None) -> str:
    """The innermost line of user code, if it or a library that it calls runs; else empty.

    Not during an import, which blocks once: many libraries are imported when they are needed.
    """
    for inner, _ in traceback.walk_stack(frame) if frame else ():
        file = inner.f_code.co_filename
        if file.startswith(INCLUDED):
            return named(inner)
        if file.startswith((*OURS, "<frozen importlib")):
            return ""
        if not file.startswith((*LIBRARIES, "<frozen ")):
            return named(inner)
    return ""
