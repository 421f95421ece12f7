"""The watch: a thread that reports what blocks the loop, and ends a run without progress (P4).

It detects these cases, also while the event loop is blocked:

- User code blocks the loop for a while: nothing else runs meanwhile, so the place is reported.
- The loop doesn't answer for `deadlines.blocked` seconds. The message names the blocking line.
- The loop answers, but there is no progress (`deadlines.stall`).
- The run should end and doesn't.

Nothing can fix the second and the last from outside, so the process exits, after the files were
flushed. While code holds the interpreter, this thread doesn't run either: `leash` has the answer.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Self

from retrain.errors import INCLUDED, LIBRARIES, StallError
from retrain.supervision.leash import leash

LAST_WORDS_SECONDS = 5.0
ADVICE = (
    "While it is blocked, no other rollout continues and no deadline applies. Use `await`, or move "
    "the work to a thread: `await asyncio.to_thread(...)`."
)
OURS = (LIBRARIES[0], str(Path(asyncio.__file__).parent))
"""The folders of code that calls user code, or waits for it."""
DEBUGGERS = ("pdb", "bdb", "_pydevd", "pydevd")
"""Modules whose frames are on the stack while a debugger waits for its user."""


class Watch:
    """A context manager that watches the running loop from one daemon thread.

    - `found` is called in the loop with the place in user code that blocked it for more than `slow`
      seconds, for how long, and in at least how many calls, one directly after the other.
    - `fail` is called in the loop with a StallError after `stall` seconds without `progress`.
    - Blocked for `blocked` seconds, or `grace` seconds after `ending`, the process exits with
      status 1; before, `last_words` is called in a thread with the reason.

    With the file `errors`, a process outside ends a held interpreter, and stacks are written there
    (see `leash`). Time in a debugger, or while the process is suspended, doesn't count.
    """

    def __init__(
        self,
        *,
        slow: float,
        found: Callable[[str, float, int], None],
        stall: float = math.inf,
        blocked: float = math.inf,
        grace: float = math.inf,
        fail: Callable[[StallError], None] = lambda error: None,
        last_words: Callable[[str], None] = lambda message: None,
        errors: Path | None = None,
    ) -> None:
        self._slow, self._stall, self._blocked, self._grace = slow, stall, blocked, grace
        self._found, self._fail, self._last_words, self._errors = found, fail, last_words, errors
        self._loop = asyncio.get_running_loop()
        leash.loops.add(self._loop)
        self._thread = threading.get_ident()
        clock = getattr(time, "pthread_getcpuclockid", None)  # macOS has none
        self._clock: int | None = clock(self._thread) if clock else None
        self._stop = threading.Event()
        self._open = ExitStack()
        self._tick = min(slow / 5, stall / 4, blocked / 4, grace / 4)
        self._looked = self._moved = self._answered = time.monotonic()
        self._computed = 0.0
        self._asked = False
        """Whether the loop owes an answer."""
        self._spent: Counter[str] = Counter()
        """The milliseconds that it spent in each place since it was asked."""
        self._tasks: dict[str, set[int]] = {}
        """The tasks that were there: each runs at most once before the answer."""
        self._ends_by = math.inf
        self._waiting = 0

    def __enter__(self) -> Self:
        if self._errors is not None:
            self._open.enter_context(leash.watch(self._blocked, self._errors))
        threading.Thread(target=self._run, name="retrain-watch", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._open.close()

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
        self._ends_by = min(self._ends_by, time.monotonic() + self._grace)

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._tick):
                if self._errors is not None:
                    leash.beat()
                self._look(time.monotonic())
        except RuntimeError:
            if not self._loop.is_closed():
                raise
            self._open.close()  # nobody leaves the context, and the process may go on

    def _look(self, now: float) -> None:
        """What there is to see `now`; called by the thread at every tick."""
        passed, computed = now - self._looked, self._cpu_seconds()
        late = passed > 2 * self._tick
        # If the loop's thread held the interpreter, so that this one had to wait too, it computed
        # all that time. Otherwise another thread held it, or the process was suspended.
        held = late and computed - self._computed > passed / 4
        self._looked, self._computed = now, computed
        if late and not held:  # a tick counts: a busy thread may make every look a late one
            self._excuse(passed - self._tick)
        elif (held or self._asked) and debugging():
            self._excuse(passed)
        elif held or self._asked:
            place = _user_code(sys._current_frames().get(self._thread))
            self._spent[place] += round(1000 * passed)
            self._tasks.setdefault(place, set()).add(id(asyncio.current_task(self._loop)))
        if not self._asked:
            self._asked, self._answered = True, now
            self._loop.call_soon_threadsafe(self._answer)
        self._judge(now)

    def _judge(self, now: float) -> None:
        blocked = self._asked and now - self._answered > self._blocked
        late, still = now > self._ends_by, self._is_still(now)
        if (blocked or still or late) and debugging():
            self._excuse(now - min(self._moved, self._answered))
        elif blocked:
            where = _place(sys._current_frames().get(self._thread))
            self._exit(
                f"the event loop has been blocked for {self._blocked} s by {where}; "
                "use await, or move blocking work to a thread"
            )
        elif late:
            self._exit(
                f"shutdown timed out after {self._grace} s; still running: {describe(self._loop)}"
            )
        elif still:
            self.ending()
            error = StallError(
                f"no progress for deadlines.stall = {self._stall} s; "
                f"waiting: {describe(self._loop)}"
            )
            self._loop.call_soon_threadsafe(self._fail, error)

    def _is_still(self, now: float) -> bool:
        ending = self._ends_by < math.inf
        return now - self._moved > self._stall and not ending and not self._waiting

    def _excuse(self, seconds: float) -> None:
        """Don't count these last seconds."""
        self._answered += seconds
        self._moved += seconds
        self._ends_by += seconds

    def _cpu_seconds(self) -> float:
        """The CPU time of the loop's thread, or always 0 if the platform doesn't measure it."""
        with suppress(OSError):  # it has ended
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        return 0.0

    def _answer(self) -> None:
        if self._stop.is_set():
            return
        self._asked = False
        spent, self._spent = self._spent, Counter()
        tasks, self._tasks = self._tasks, {}
        if (seconds := spent.total() / 1000) > self._slow:
            place = max(spent, key=spent.__getitem__)
            if place:
                self._found(place, seconds, max(1, len(tasks.get(place, ()))))

    def _exit(self, message: str) -> None:
        if self._stop.is_set():
            return
        leash.let_go()
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
