"""Append-only files of JSON lines: after a crash, complete lines remain in the order written.

- Lines are buffered and reach the OS in large writes: `flush` survives a kill -9, and `sync` a
  power cut. A file may end with an incomplete line; `repair` removes it and `read_lines` skips it.
- Every line is valid JSON, whatever an environment puts into it: NaN and infinities become null and
  are listed in the line's `nonfinite`; other values are written as their `repr`.
- Any thread may write; lines are never interleaved.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import threading
import time
from collections.abc import Iterator, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from retrain.errors import RunError

CHUNK_LINES = 512
"""Lines are written out when there are this many ..."""
CHUNK_SECONDS = 1.0
"""... or after this time, which bounds the lag of readers."""
MAX_DEPTH = 32


class Journal:
    """One append-only file; raises RunError if it can't be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        except OSError as error:
            raise _refused(path, error) from error
        self._lock = threading.Lock()
        self._lines: list[str] = []
        self._unwritten = b""
        self._flushed = time.monotonic()

    def write(self, *lines: Mapping[str, Any] | str) -> None:  # any: users' values become JSON here
        """Append lines in order; a string is a line that `encode` made."""
        texts = [line if isinstance(line, str) else encode(line) for line in lines]
        with self._lock:
            self._lines += texts
            if len(self._lines) >= CHUNK_LINES or time.monotonic() - self._flushed >= CHUNK_SECONDS:
                self._flush()

    def flush(self) -> None:
        """Pass all lines so far to the OS."""
        with self._lock:
            self._flush()

    def sync(self) -> None:
        """Write all lines so far to the disk; blocks. Other threads may write meanwhile."""
        self.flush()
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _refused(self.path, error) from error

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        if self._file.closed:
            return
        try:
            self.flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        self._flushed = time.monotonic()
        if self._lines:
            # a lone surrogate becomes its JSON escape, so the bytes stay valid UTF-8 and JSON
            text = "\n".join(self._lines) + "\n"
            self._unwritten += text.encode("utf-8", "backslashreplace")
            self._lines = []
        try:
            while self._unwritten:  # the rest after a full disk is written by the next flush
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            raise _refused(self.path, error) from error


def encode(line: Mapping[str, Any]) -> str:  # any: see Journal.write
    """`line` as one line of valid JSON."""
    try:
        return _ENCODER.encode(line)
    except (ValueError, TypeError, RecursionError):  # NaN, odd keys, cycles: slow path
        nonfinite: dict[str, str] = {}
        plain = {str(key): _plain(value, str(key), nonfinite) for key, value in line.items()}
        if nonfinite:
            plain["nonfinite"] = nonfinite
        return _ENCODER.encode(plain)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:  # any: JSON values
    """The complete lines of a journal, which may be in use; none if there is no such file.

    Skips an incomplete last line; raises RunError for any other line that is not JSON.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield json.loads(line)
            except ValueError as error:
                raise RunError(
                    f"{path}, line {number}: got {line[:80]!r}, expected a JSON object; the file "
                    "is damaged, remove that line to read the rest"
                ) from error


def repair(path: Path) -> int:
    """Remove an incomplete last line; returns the number of bytes removed."""
    if not path.exists() or not path.stat().st_size:
        return 0
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            size, end = len(content), content.rfind(b"\n") + 1
        file.truncate(end)
    return size - end


def plain(value: Any) -> Any:  # any: users' values in, JSON values out
    """`value` as JSON values: NaN becomes None, other objects their `repr`."""
    return _plain(value, "", {})


def _plain(value: Any, path: str, nonfinite: dict[str, str], depth: int = 0) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        nonfinite[path] = str(float(value))
        return None
    if depth >= MAX_DEPTH:
        return _shown(value)
    if isinstance(value, Mapping):
        return {
            key if isinstance(key, str) else _shown(key): _plain(
                item, f"{path}.{key}", nonfinite, depth + 1
            )
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [
            _plain(item, f"{path}.{index}", nonfinite, depth + 1)
            for index, item in enumerate(value)
        ]
    return _plain(_default(value), path, nonfinite, depth + 1)


def _default(value: Any) -> Any:
    """A JSON value for one that the encoder doesn't support."""
    if isinstance(value, Integral):  # including numpy's
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return _shown(value)


def _shown(value: Any) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"


def _refused(path: Path, error: OSError) -> RunError:
    return RunError(
        f"can't write {path}: {error.strerror or error}; free some space or choose another "
        "run directory, then continue with --resume"
    )


_ENCODER = json.JSONEncoder(
    separators=(",", ":"),
    ensure_ascii=False,
    allow_nan=False,
    check_circular=False,  # a cycle is a RecursionError
    default=_default,
)
