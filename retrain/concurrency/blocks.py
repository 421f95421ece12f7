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
from contextlib import suppress
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


class BlockedLoop:
    """A context manager that watches the running loop from a daemon thread.

    When the loop was blocked for more than `seconds`, it calls `found` in the loop, with the place
    in user code that did it, for how long, and in at least how many calls, one directly after the
    other. It measures up to two fifths of `seconds` too little.
    """

    def __init__(self, seconds: float, found: Callable[[str, float, int], None]) -> None:
        self._seconds, self._found = seconds, found
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        clock = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
        self._clock: int | None = clock(self._loop_thread) if clock else None
        self._stop = threading.Event()
        self._owes = False
        """Whether the loop was asked for an answer that it hasn't given."""
        self._spent: Counter[str] = Counter()
        """The milliseconds that it spent in each place since it was asked."""
        self._tasks: dict[str, set[int]] = {}
        """The tasks that were there: each runs at most once before the answer."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._watch, name="retrain-blocks", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        tick = self._seconds / 5
        now, computed = time.monotonic(), self._computed()
        while not self._stop.wait(tick):
            before, now = now, time.monotonic()
            computed_before, computed = computed, self._computed()
            late = now - before - tick > tick
            # If the loop's thread held the interpreter, which keeps this thread waiting too, it
            # computed all that time. What is found takes five ticks: one of other work is a fifth.
            held = late and computed - computed_before > (now - before) / 4
            # Else another thread held it, or the process was stopped.
            if (late and not held) or ((late or self._owes) and debugging()):
                continue
            if self._owes or held:
                place = _user_code(sys._current_frames().get(self._loop_thread))
                self._spent[place] += round(1000 * (now - before))
                self._tasks.setdefault(place, set()).add(id(asyncio.current_task(self._loop)))
            if not self._owes:
                self._owes = True
                try:
                    self._loop.call_soon_threadsafe(self._answer)
                except RuntimeError:  # the loop is closed
                    return

    def _computed(self) -> float:
        """The CPU time of the loop's thread, or always 0 if the platform doesn't measure it."""
        with suppress(OSError):  # it has ended
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        return 0.0

    def _answer(self) -> None:
        if self._stop.is_set():
            return
        self._owes = False
        spent, self._spent = self._spent, Counter()
        tasks, self._tasks = self._tasks, {}
        if (seconds := spent.total() / 1000) > self._seconds:
            place = max(spent, key=spent.__getitem__)
            if place:
                self._found(place, seconds, max(1, len(tasks.get(place, ()))))


def _user_code(frame: FrameType | None) -> str:
    """The innermost line of user code, if it or a library that it calls runs; else empty.

    Not during an import, which blocks once: many modules are imported when they are needed.
    """
    place = ""
    for inner, _ in traceback.walk_stack(frame) if frame else ():
        file = inner.f_code.co_filename
        included = file.startswith(INCLUDED)
        if file.startswith("<frozen importlib"):
            return ""
        if file.startswith(OURS) and not included:
            break
        if not place and (included or not file.startswith((*LIBRARIES, "<frozen "))):
            place = named(inner)
    return place
