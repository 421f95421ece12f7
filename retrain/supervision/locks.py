"""One owner per folder: a lock that the kernel releases when the owner ends, even by kill -9.

The lock is `flock` on a file in the folder. It belongs to the open file, so a second lock fails in
the same process too. A forked child would keep the file open, and with it the lock, after its
parent is gone: each child closes its copies.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path

_NAME = ".lock"
_TRIES = 5
"""`holder` takes a shared lock for an instant: that is no reason to fail."""
_held: set[int] = set()
"""File descriptors of the locks that this process holds."""


class InUseError(Exception):
    """Another `FolderLock` holds the folder; the message names its process."""


class FolderLock:
    """The lock of an existing folder, held until `release`.

    Raises InUseError if it is already held, and OSError if the folder can't be written.
    """

    def __init__(self, folder: Path) -> None:
        file = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _take(file)
            os.ftruncate(file, 0)
            os.pwrite(file, f"process {os.getpid()}\n".encode(), 0)
        except (OSError, InUseError):
            os.close(file)
            raise
        _held.add(file)
        self._file = file

    def release(self) -> None:
        """Unlock; does nothing the second time, and in a forked child."""
        if self._file in _held:
            _held.remove(self._file)
            os.close(self._file)
        self._file = -1


def in_use(folder: Path) -> bool:
    """Whether a process, this one included, holds the lock of the folder."""
    return bool(holder(folder))


def holder(folder: Path) -> str:
    """The process that holds the lock of the folder, this one included; empty if none does."""
    with suppress(FileNotFoundError, NotADirectoryError), (folder / _NAME).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder_in(file.fileno())
    return ""


def _take(file: int) -> None:
    for left in reversed(range(_TRIES)):
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not left:
                raise InUseError(_holder_in(file)) from None
            time.sleep(0.01)
    return None


def _holder_in(file: int) -> str:
    return os.pread(file, 64, 0).decode(errors="replace").strip() or "another process"


def _forget() -> None:
    while _held:
        with suppress(OSError):
            os.close(_held.pop())


os.register_at_fork(after_in_child=_forget)
