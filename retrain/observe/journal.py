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
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

from pydantic_core import to_json

from retrain.errors import RunError
from retrain.supervision.jsonable import plain_with

Row = Mapping[str, Any]  # a JSON object of a journal
T = TypeVar("T")

CHUNK_LINES = 512
"""Lines are written out when there are this many ..."""
CHUNK_SECONDS = 1.0
"""... or after this time, which bounds the lag of readers."""


class Journal:
    """One append-only file; raises RunError if it can't be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115 - lives as long as the run
        except OSError as error:
            raise _refused(path, error) from error
        self._lock = threading.Lock()
        self._lines: list[bytes] = []
        self._unwritten = b""
        self._flushed = time.monotonic()

    def write(self, *lines: bytes) -> None:
        """Append lines that `encode` made, in order."""
        with self._lock:
            self._lines += lines
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
            self._unwritten += b"\n".join([*self._lines, b""])
            self._lines = []
        try:
            while self._unwritten:  # the rest after a full disk is written by the next flush
                self._unwritten = self._unwritten[self._file.write(self._unwritten) :]
        except OSError as error:
            raise _refused(self.path, error) from error


def encode(line: Mapping[str, Any]) -> bytes:  # any: what is not JSON takes longer
    """`line`, nearly always of JSON values, as one line of valid JSON in UTF-8."""
    try:
        text = to_json(line)
        if b"NaN" not in text and b"Infinity" not in text:
            return text
    except Exception:  # noqa: BLE001 - a lone surrogate, or what is not JSON
        pass
    return encode_any(line)


def encode_any(line: Mapping[str, Any]) -> bytes:  # any: values of users become JSON here
    """`line` with any values as one line of valid JSON in UTF-8; iterators are not consumed."""
    nonfinite: dict[str, str] = {}
    values = {str(key): plain_with(value, str(key), nonfinite) for key, value in line.items()}
    if nonfinite:
        values["nonfinite"] = nonfinite
    whole = json.dumps(values, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    # a lone surrogate becomes its JSON escape
    return whole.encode("utf-8", "backslashreplace")


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


def repair(path: Path) -> None:
    """Remove an incomplete last line."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            end = content.rfind(b"\n") + 1
        file.truncate(end)


def _refused(path: Path, error: OSError) -> RunError:
    return RunError(
        f"can't write {path}: {error.strerror or error}; free some space or choose another "
        "run directory, then continue with --resume"
    )


def known(value: object) -> TypeGuard[float]:
    """Whether `value` is a finite number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def shares(items: Sequence[T], most: int) -> list[Sequence[T]]:
    """`items` in at most `most` equal parts, none of them empty."""
    count = min(most, len(items))
    edges = [round(i * len(items) / count) for i in range(count + 1)] if count else []
    return [items[a:b] for a, b in pairwise(edges)]
