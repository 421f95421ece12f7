"""The watchdog: a thread that ends a run without progress, and reports what it waits for (P4).

It detects three cases, also while the event loop is blocked:

- The loop doesn't answer (`deadlines.blocked`). The message names the file and line that block it.
- The loop answers, but there is no progress (`deadlines.stall`).
- The run should end and doesn't.

Nothing can fix the first and the last from outside, so the process exits, after the files were
flushed. While code holds the interpreter, this thread doesn't run either: the guardian then misses
its beats, and ends the process (P12).

Time in a debugger, or while the process is suspended, doesn't count.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Self

from retrain.concurrency.guardian import guardian
from retrain.errors import LIBRARIES, StallError

LAST_WORDS_SECONDS = 5.0
DEBUGGERS = ("pdb", "bdb", "_pydevd", "pydevd")
"""Modules whose frames are on the stack while a debugger waits for its user."""


class Watchdog:
    """A context manager that watches the running loop from a daemon thread.

    It calls `fail` in the loop with a StallError. Before the process exits with status 1, it calls
    `last_words` in the thread with the last message. The guardian writes to `folder`/error.txt.
    """

    def __init__(
        self,
        *,
        stall: float,
        blocked: float,
        grace: float,
        fail: Callable[[StallError], None],
        last_words: Callable[[str], None],
        folder: Path | None = None,
    ) -> None:
        self._stall, self._blocked, self._grace = stall, blocked, grace
        self._fail, self._last_words, self._folder = fail, last_words, folder
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._stop = threading.Event()
        self._moved = self._answered = time.monotonic()
        self._ends_by: float | None = None
        self._waiting = 0

    def __enter__(self) -> Self:
        guardian.watch(self, self._blocked, self._folder)
        threading.Thread(target=self._watch, name="retrain-watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        guardian.unwatch(self)

    def progress(self) -> None:
        """Report progress."""
        self._moved = time.monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for the caller of train(), or in an outage: no progress meanwhile is no stall."""
        self._waiting += 1
        try:
            yield
        finally:
            self.progress()
            self._waiting -= 1

    def ending(self) -> None:
        """The run should end within `grace` seconds."""
        if self._ends_by is None:
            self._ends_by = time.monotonic() + self._grace

    def _watch(self) -> None:
        tick = min(1.0, self._stall / 4, self._blocked / 4, self._grace / 4)
        now = time.monotonic()
        while not self._stop.wait(tick):
            guardian.beat()
            before, now = now, time.monotonic()
            late = now - before - tick
            if debugging():
                self._excuse(now - before)
            elif late > 1.0:  # the whole process was stopped, as by Ctrl-Z
                self._excuse(late)
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                guardian.unwatch(self)
                return
            if now - self._answered > self._blocked:
                where = _place(sys._current_frames().get(self._loop_thread))
                self._exit(
                    f"the event loop has been blocked for {self._blocked} s by {where}; "
                    "use await, or move blocking work to a thread"
                )
            elif self._ends_by is not None and now > self._ends_by:
                self._exit(
                    f"shutdown timed out after {self._grace} s; still running: "
                    f"{describe(self._loop)}"
                )
            elif now - self._moved > self._stall and self._ends_by is None and not self._waiting:
                self.ending()
                error = StallError(
                    f"no progress for deadlines.stall = {self._stall} s; "
                    f"waiting: {describe(self._loop)}"
                )
                self._loop.call_soon_threadsafe(self._fail, error)

    def _excuse(self, seconds: float) -> None:
        """Don't count these last seconds."""
        self._answered += seconds
        self._moved += seconds
        if self._ends_by is not None:
            self._ends_by += seconds

    def _answer(self) -> None:
        self._answered = time.monotonic()

    def _exit(self, message: str) -> None:
        if self._stop.is_set():
            return
        guardian.leaving()
        # in a thread: the disk may be full, or the code that blocks may hold a lock
        words = threading.Thread(target=self._last_words, args=(message,), daemon=True)
        words.start()
        words.join(LAST_WORDS_SECONDS)
        os._exit(1)


def debugging(frame: FrameType | None = None) -> bool:
    """Whether a debugger, such as that of `breakpoint()`, has stopped the frame, or any thread."""
    frames = {0: frame} if frame is not None else sys._current_frames()
    # With our own frame, a cycle would keep what all frames hold: tensors of a backward pass.
    frames.pop(threading.get_ident(), None)
    return any(
        str(inner.f_globals.get("__name__")).startswith(DEBUGGERS)
        for outer in frames.values()
        for inner, _ in traceback.walk_stack(outer)
    )


def describe(loop: asyncio.AbstractEventLoop) -> str:
    """The tasks of the loop, counted by the place where they wait."""
    places: Counter[str] = Counter()
    for task in asyncio.all_tasks(loop):
        stack = _chain(task)
        name = task.get_name().partition("#")[0]
        places[f"{name} at {stack}"] += 1
    return ", ".join(
        f"{count} x {place}" if count > 1 else place for place, count in places.most_common(8)
    )


def _chain(task: asyncio.Task[object]) -> str:
    """The innermost frame of a task in user code, or else in any code."""
    frames: list[FrameType] = []
    awaited: object = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None)
        if frame is not None:
            frames.append(frame)
        awaited = getattr(awaited, "cr_await", None)
    return _spot(frames) or "its end"


def _place(frame: FrameType | None) -> str:
    """The innermost frame of a stack outside retrain and the standard library, or else any."""
    frames = [] if frame is None else [f for f, _ in traceback.walk_stack(frame)]
    return _spot(frames[::-1]) or "unknown code"


def _spot(frames: list[FrameType]) -> str:
    """The last of the frames in user code, or else of all; empty without a frame."""
    own = [f for f in frames if not f.f_code.co_filename.startswith((*LIBRARIES, "<frozen "))]
    return "".join(map(named, (own or frames)[-1:]))


def named(frame: FrameType) -> str:
    """The function of a frame, with its file and line."""
    code = frame.f_code
    return f"{code.co_qualname} ({Path(code.co_filename).name}:{frame.f_lineno})"
