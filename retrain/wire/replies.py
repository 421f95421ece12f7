"""ReplyCache: replies of a model by request, in memory or in a file of SQLite."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

MOST_IN_MEMORY = 100_000
"""Replies; the oldest one is dropped."""


class ReplyCache:
    """Stores strings by key; `open` it first. Several runs may use the file of one `path`."""

    def __init__(self, path: Path | None) -> None:
        """By default the replies are in memory."""
        self._path = path
        self._locks: dict[str, asyncio.Lock] = {}
        self._file: sqlite3.Connection | None = None

    def open(self) -> None:
        """Creates the file and its folder."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(self._path or ":memory:", isolation_level=None)
        self._do("PRAGMA journal_mode=WAL")
        self._do("PRAGMA synchronous=OFF")  # a reply that is lost is asked for again
        self._do("CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT)")

    def close(self) -> None:
        """Close the file; what was in memory is gone."""
        if self._file is not None:
            self._file.close()

    def lock(self, key: str) -> asyncio.Lock:
        """Held while a request is under way, so that an equal one waits for its reply."""
        if len(self._locks) > MOST_IN_MEMORY:
            self._locks = {k: lock for k, lock in self._locks.items() if lock.locked()}
        return self._locks.setdefault(key, asyncio.Lock())

    def get(self, key: str) -> str | None:
        """The reply to a request; None if there is none."""
        row = self._do("SELECT text FROM replies WHERE key = ?", key).fetchone()
        if row is None:
            return None
        [text] = row
        if isinstance(text, bytes):
            return text.decode("utf-8", "surrogatepass")
        return str(text)  # in a file of an older version

    def put(self, key: str, text: str) -> None:
        """Keep a reply. SQLite has no strings with lone surrogates, so it gets bytes."""
        self._do(
            "INSERT OR REPLACE INTO replies VALUES (?, ?)",
            key,
            text.encode("utf-8", "surrogatepass"),
        )
        if self._path is None:
            newest = "SELECT MAX(rowid) FROM replies"
            self._do(f"DELETE FROM replies WHERE rowid <= ({newest}) - {MOST_IN_MEMORY}")

    def _do(self, statement: str, *values: str | bytes) -> sqlite3.Cursor:
        assert self._file is not None, "open it first"
        return self._file.execute(statement, values)
