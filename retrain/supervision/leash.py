"""A small process that outlives this one: it ends a held interpreter (P12) and our children.

While code holds the interpreter (GIL), such as a slow regular expression, no Python thread runs.
The process in `watcher.py` then misses the beats of the watch thread and ends the run with SIGABRT:
`faulthandler` writes the stacks of all threads to error.txt. It also kills the process groups that
are left when this process has ended, even by `kill -9`. It starts with the first run or child.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import faulthandler
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

WATCHER = Path(__file__).with_name("watcher.py")


class _Leash:
    """This process's side."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._watched: list[tuple[float, Path]] = []
        self._groups: set[int] = set()
        self.loops: WeakSet[asyncio.AbstractEventLoop] = WeakSet()
        """Those that a fork must not run, since it shares their files and sockets."""
        os.register_at_fork(after_in_child=self._forked)
        atexit.register(self._forget)

    @contextmanager
    def watch(self, seconds: float, file: Path) -> Iterator[None]:
        """End this process if no `beat` follows for `seconds`; its stacks go to `file`."""
        with open(file, "ab") as stacks:
            enables = not faulthandler.is_enabled()  # else somebody wants them elsewhere
            if enables:
                _end_at_signals()
                faulthandler.enable(stacks)
                faulthandler.register(signal.SIGQUIT, stacks, chain=True)  # then it ends us
            watched = (seconds, file.absolute())  # user code may lose the working directory
            self._watched.append(watched)
            self._send(self._watch())
            try:
                yield
            finally:
                with suppress(ValueError):  # `let_go` has forgotten it
                    self._watched.remove(watched)
                self._send(self._watch())
                if enables:
                    faulthandler.disable()
                    faulthandler.unregister(signal.SIGQUIT)
        with suppress(OSError):
            if not file.stat().st_size:
                file.unlink()

    def beat(self) -> None:
        """Python code runs."""
        self._send(b"beat")

    def let_go(self) -> None:
        """The process is about to exit on purpose."""
        self._watched.clear()
        self._send(self._watch())

    def add_child(self, group: int) -> None:
        """Kill this process group when the process ends."""
        self._groups.add(group)
        self._send(b"child %d" % group)

    def drop_child(self, group: int) -> None:
        """The group has ended."""
        self._groups.discard(group)
        self._send(b"ended %d" % group)

    def _watch(self) -> bytes:
        seconds, file = min(self._watched, default=(0.0, Path()))
        return b"watch %f %s" % (seconds, os.fsencode(file).hex().encode())

    def _send(self, message: bytes) -> None:
        with self._lock, suppress(OSError):  # no process can be started, or it is suspended
            if self._process is None or self._process.poll() is not None:
                self._close()
                self._process = _started()
                known = (b"child %d" % group for group in self._groups)
                message = b"\n".join([*known, self._watch(), message])
            assert self._process.stdin is not None
            os.write(self._process.stdin.fileno(), message + b"\n")

    def _forked(self) -> None:
        """End a fork, which has no watcher, when it returns from user code to a loop of ours."""
        self._lock = threading.RLock()  # a thread that the fork lacks may have held it
        self._forget()
        for loop in self.loops:
            vars(loop).update(call_soon_threadsafe=_exit)  # threads call it with their results
            with suppress(RuntimeError):  # in debug mode, from a thread
                loop.call_soon(_exit)
                vars(loop)["_ready"].rotate(1)  # before what else is ready

    def _forget(self) -> None:
        """Close the pipe."""
        self._close()
        self._watched, self._groups = [], set()

    def _close(self) -> None:
        if self._process is not None and self._process.stdin is not None:
            self._process.returncode = 0  # no warning that it still runs
            self._process.stdin.close()
        self._process = None


def _started() -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", str(WATCHER), str(os.getpid())],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,  # no terminal's Ctrl-C or hang-up reaches it
    )
    assert process.stdin is not None
    os.set_blocking(process.stdin.fileno(), False)
    return process


def _exit(*_: object) -> None:
    os._exit(1)


def _end_at_signals() -> None:
    """Exit at SIGABRT and SIGQUIT even as the first process of a container."""
    if os.getpid() == 1:
        libc = ctypes.CDLL(None)
        for number in (signal.SIGABRT, signal.SIGQUIT):
            libc.signal(number, ctypes.cast(libc._exit, ctypes.c_void_p))


leash = _Leash()
"""The leash of this process."""
