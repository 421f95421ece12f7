"""Run a query that can only read, within limits; also as a program, for queries of the model.

The program gets the arguments of `queried` on its standard input, and prints the rows, or what is
wrong with the query, both as `encoded`. It imports only what it needs, and so starts within
milliseconds.
"""

from __future__ import annotations

import marshal
import sqlite3
import sys
import threading

TYPE_CHECKING = False  # `typing` takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

READS = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
"""What a query may do; everything else, such as ATTACH, PRAGMA and writing, is denied."""
LENGTH = 2**20
"""The most bytes of one value."""
MOST = 2**24
"""The most bytes of the values of a result."""
WRONG = (sqlite3.Error, sqlite3.Warning, ValueError)
"""What a wrong query raises."""


def queried(source: str, image: bytes, query: str, seconds: float, most: int) -> list[Any]:
    """The rows of a query. Raises sqlite3.Error, or ValueError if there are too many."""
    connection = sqlite3.connect(source, uri=True, isolation_level=None)
    # SQLite looks for an interruption at every row. A progress handler is called after many
    # instructions, of which each may take a second.
    timer = threading.Timer(seconds, connection.interrupt)
    timer.daemon = True
    timer.start()
    try:
        if image:
            connection.deserialize(image)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LENGTH)
        connection.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, 100)
        connection.set_authorizer(_allowed)
        cursor = connection.execute(query)
        if cursor.description is None:
            raise ValueError("this is not a SELECT")
        return _read(cursor, most)
    except UnicodeEncodeError as error:
        raise ValueError("the query is not UTF-8") from error
    finally:
        timer.cancel()
        timer.join()
        connection.close()


def encoded(value: Any) -> str:
    return marshal.dumps(value).hex()


def decoded(text: str) -> Any:
    return marshal.loads(bytes.fromhex(text))


def _read(cursor: sqlite3.Cursor, most: int) -> list[Any]:
    """All rows; raises ValueError if there are more than `most`, or they are too large."""
    rows: list[Any] = []
    size = 0
    for row in cursor:
        size += sum(len(value) for value in row if isinstance(value, str | bytes))
        if len(rows) == most or size > MOST:
            what = f"{most} rows" if size <= MOST else f"{MOST} bytes"
            raise ValueError(f"the result has more than {what}")
        rows.append(row)
    return rows


def _allowed(action: int, _first: Any, name: Any, *_: Any) -> int:
    good = action in READS and name != "load_extension"
    return sqlite3.SQLITE_OK if good else sqlite3.SQLITE_DENY


if __name__ == "__main__":
    try:
        result: Any = queried(*decoded(sys.stdin.read()))
    except WRONG as error:
        result = str(error)
    sys.stdout.write(encoded(result))
