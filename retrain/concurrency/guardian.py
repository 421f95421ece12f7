"""The guardian ends a run that can't end itself: code holds the interpreter, or the process died.

While code holds the interpreter (GIL), such as a slow regular expression, neither Python's threads
nor its signal handlers run. So a small process watches this one (`guardian_process.py`). It is
started once per process, with the first run or child, and ends with the process.

- `watch` covers a run. The watchdog calls `beat`; without a beat for `limit` seconds the guardian
  writes all stacks to error.txt and kills the process (P12). If the process ends during a run
  without `leaving`, as after a segmentation fault, the guardian writes that to error.txt.
- `signals` passes Ctrl-C on. A second one that nothing answers kills the process.
- `add_child` and `drop_child` name the process groups that end with this process.
"""

from __future__ import annotations

import atexit
import faulthandler
import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from retrain.concurrency import guardian_process
from retrain.errors import LIBRARIES

LAST_RESORT_SECONDS = 5.0


class _Guardian:
    """This process's side. Signal handlers may call `heard` and `leaving`: they take no lock."""

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._close)

    def _reset(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._messages = self._signals = self._faults = -1
        self._watches: dict[object, tuple[float, Path | None]] = {}
        self._groups: set[int] = set()
        self._enabled = False
        self._handler: object = None

    # --- runs

    def watch(self, owner: object, limit: float, folder: Path | None) -> None:
        """Watch a run until `unwatch(owner)`; `limit` in seconds, `folder` for error.txt."""
        with self._lock:
            self._watches[owner] = limit, folder
            if self._start():
                self._send(self._watching())
                self._catch_faults()
        self.beat()

    def unwatch(self, owner: object) -> None:
        """The run is over; a second call does nothing."""
        with self._lock:
            if self._watches.pop(owner, None) is None:
                return
            self._send(self._watching())
            if not self._watches:
                self._release_faults()

    def beat(self) -> None:
        """Python code runs. Restarts a guardian that was killed."""
        if not self._send(b"beat") and self._messages >= 0:
            with self._lock:
                self._start()
        if self._handler and signal.getsignal(signal.SIGINT) is not self._handler:
            self.heard()  # somebody else answers Ctrl-C, as a debugger does
        if os.getpid() == 1 and self._watches and self._faults >= 0:
            # The kernel protects the first process of a container from its children's SIGKILL.
            limits = [limit for limit, _ in list(self._watches.values())]
            limit = min(limits, default=0.0) + LAST_RESORT_SECONDS
            faulthandler.dump_traceback_later(limit, exit=True, file=self._faults)

    def leaving(self) -> None:
        """The process is about to exit on purpose: nothing to report, unless it doesn't."""
        self._send(b"leaving")

    # --- signals

    @contextmanager
    def signals(self, handler: Callable[..., object]) -> Iterator[None]:
        """Show the guardian each signal that `handler` handles. In the main thread only.

        The handler must call `heard`.
        """
        with self._lock:
            started = self._start()
        before = signal.set_wakeup_fd(self._signals, warn_on_full_buffer=False) if started else -1
        self._handler = handler if started else None
        try:
            yield
        finally:
            self._handler = None
            if started:
                signal.set_wakeup_fd(before)

    def heard(self) -> None:
        """A signal handler of Python has run, so the guardian need not act."""
        self._send(b"heard")

    # --- children

    def add_child(self, group: int) -> None:
        """End this process group when the process ends."""
        with self._lock:
            self._groups.add(group)
            if self._start():
                self._send(b"child %d" % group)

    def drop_child(self, group: int) -> None:
        """The group has ended."""
        with self._lock:
            self._groups.discard(group)
            self._send(b"ended %d" % group)

    # --- the process

    def _start(self) -> bool:
        """Start the guardian if it doesn't run; False if it can't be started."""
        if self._process is not None and self._process.poll() is None:
            return True
        reads, writes = zip(*(os.pipe() for _ in range(3)), strict=True)
        arguments = [os.getpid(), *reads[1:], *LIBRARIES]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", guardian_process.__file__, *map(str, arguments)],
                stdin=reads[0],
                stdout=subprocess.DEVNULL,
                pass_fds=reads[1:],
                cwd="/",
                start_new_session=True,  # no terminal's Ctrl-C or hang-up reaches it
            )
        except OSError:
            for fd in writes:
                os.close(fd)
            return False
        finally:
            for fd in reads:
                os.close(fd)
        for fd in writes[:2]:  # a crash may wait until its stacks are read
            flags = fcntl.fcntl(fd, fcntl.F_GETFL)
            fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_NONBLOCK)
        self._adopt(*writes)
        self._send(self._watching())
        for group in self._groups:
            self._send(b"child %d" % group)
        return True

    def _adopt(self, *pipes: int) -> None:
        """Write to these pipes. A restart keeps the numbers: C code of the interpreter has them."""
        if self._messages < 0:
            self._messages, self._signals, self._faults = pipes
            return
        for new, old in zip(pipes, (self._messages, self._signals, self._faults), strict=True):
            os.dup2(new, old, inheritable=False)
            os.close(new)

    def _watching(self) -> bytes:
        limit = min((limit for limit, _ in self._watches.values()), default=0.0)
        folders = {folder for _, folder in self._watches.values() if folder}
        words = [str(limit), *(os.fsencode(folder.absolute()).hex() for folder in folders)]
        return f"watch {' '.join(words)}".encode()

    def _send(self, message: bytes) -> bool:
        """Write a message at once; False if nobody reads it."""
        try:
            os.write(self._messages, message + b"\n")
        except BlockingIOError:  # the guardian is suspended
            return True
        except OSError:
            return False
        return True

    # --- crashes

    def _catch_faults(self) -> None:
        """Send the stacks of a crash to the guardian, unless somebody else wants them."""
        faulthandler.register(guardian_process.DUMP, file=self._faults, all_threads=True)
        if not faulthandler.is_enabled():
            faulthandler.enable(file=self._faults)
            self._enabled = True

    def _release_faults(self) -> None:
        faulthandler.unregister(guardian_process.DUMP)
        if self._enabled:
            faulthandler.disable()
            self._enabled = False
        if os.getpid() == 1:
            faulthandler.cancel_dump_traceback_later()

    # --- the end

    def _forked(self) -> None:
        """In a forked child, which must not hold the pipes, nor report its signals and crashes."""
        if self._handler:
            signal.set_wakeup_fd(-1)
        if self._watches:
            self._release_faults()
        self._close()
        self._reset()

    def _close(self) -> None:
        """Let the guardian end the children that are left, and then itself."""
        if self._process is None:
            return
        self._process.returncode = 0  # no warning that it still runs
        for fd in (self._messages, self._signals, self._faults):
            with suppress(OSError):
                os.close(fd)
        self._process, self._messages = None, -1


guardian = _Guardian()
"""The guardian of this process."""
