"""The model writes a query, which is right if its result is that of the row's query, the `answer`.

    {"prompt": "How many customers are there?", "answer": "SELECT count(*) FROM customers"}

Queries run on a read-only SQLite database, and are interrupted after some seconds. Those of the
model run in a process of their own, which is killed if that has no effect: SQLite looks for an
interruption between rows only, and one row may take hours. The order of the rows counts only if the
answer has an ORDER BY.
"""

from __future__ import annotations

import math
import re
import sqlite3
import sys
from asyncio import timeout
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from retrain import (
    Action,
    ConfigError,
    Environment,
    Message,
    Prompt,
    Row,
    StepResult,
    find_file,
    in_thread,
    program_in,
    run_program,
)

from . import _queries
from ._queries import WRONG, queried

SHOP = Path(__file__).resolve().parent.parent / "data" / "shop.sql"
START_SECONDS = 2.0
"""What the process of a query may take in addition, to start and to end."""
SHOWN = 5
"""Rows of a wrong result that the model sees."""
OUTPUT = 2**28
"""The most bytes that the process of a query prints."""
Rows = Sequence[Sequence[Any]]  # any: what SQLite stores


class Sql(Environment):
    """Compares the result of a query with that of the row's answer, on one database.

    Args:
        database: A SQLite file, or a file of SQL statements that create the database; by default a
            small shop.
        schema: Begin with a system message that shows the database's tables.
        attempts: The number of queries that the model may try; it sees the error or the wrong
            result of each.
        seconds: The time limit of a query in seconds.
        rows: The maximum number of rows that a query may return.
    """

    def __init__(
        self,
        *,
        database: str | None = None,
        schema: bool = True,
        attempts: int = 1,
        seconds: float = 5.0,
        rows: int = 10_000,
        base_dir: Path = Path(),
    ) -> None:
        for name, value in {"attempts": attempts, "seconds": seconds, "rows": rows}.items():
            if value <= 0:
                raise ConfigError(f"environment.{name}: got {value}, expected more than 0")
        path = SHOP if database is None else find_file(database, base_dir, "environment.database: ")
        self.database = opened(path)
        self.schema, self.attempts, self.seconds, self.rows = schema, attempts, seconds, rows

    def check_row(self, row: Row) -> None:
        self.solved(row)

    async def reset(self, prompt: Prompt) -> list[Message]:
        self.tried = 0
        self.expected = await in_thread(partial(self.solved, prompt))
        shown: Message = {"role": "system", "content": f"SQLite tables:\n{self.database.schema}"}
        return [shown, *prompt.messages] if self.schema else list(prompt.messages)

    async def step(self, action: Action) -> StepResult:
        self.tried += 1
        try:
            query = program_in(action.text)
            rows = await self.database.rows_apart(query, self.seconds, self.rows)
        except ValueError as error:
            right, reply = False, f"error: {error}"
        else:
            right = equal(rows, self.expected, is_ordered(str(self.prompt.answer)))
            more = "\n..." if len(rows) > SHOWN else ""
            lines = "\n".join(map(repr, rows[:SHOWN])) + more
            reply = f"This is not the expected result:\n{lines or 'no rows'}"
        over = right or self.tried == self.attempts
        observation: list[Message] = [] if over else [{"role": "user", "content": reply}]
        return StepResult(observation, float(right), over, False, {"queries": self.tried})

    def solved(self, row: Row | Prompt) -> Rows:
        """The result of the row's query; raises ValueError if it has none."""
        if not isinstance(row.answer, str):
            columns = ", ".join(map(str, row.metadata)) or "none"
            got = "no `answer`" if row.answer is None else f"the answer {row.answer!r}"
            raise ValueError(
                f"the row has {got}, expected an SQL query; its other columns are {columns}; set "
                "prompts.answer_column to the right one"
            )
        try:
            return self.database.rows(row.answer, self.seconds, self.rows)
        except WRONG as error:
            hint = f" after {self.seconds:g} s (seconds)" if "interrupted" in str(error) else ""
            raise ValueError(f"the answer {row.answer!r} of the row fails: {error}{hint}") from None


class Database:
    """A database of a file, which each query opens by itself."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError if the file is no database, or its SQL is wrong."""
        self.source = f"{path.resolve().as_uri()}?mode=ro"
        self.image = b""
        try:
            if path.suffix == ".sql":
                memory = sqlite3.connect(":memory:")
                memory.executescript(path.read_text(encoding="utf-8"))
                self.source, self.image = ":memory:", memory.serialize()
                memory.close()
            tables = "SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY rowid"
            self.schema = ";\n".join(text for (text,) in self.rows(tables, 5.0, 10_000))
        except (sqlite3.Error, OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"environment.database: {path}: {error}; expected an SQLite database or a .sql file"
            ) from error

    def rows(self, query: str, seconds: float, most: int) -> Rows:
        """The rows of a query of the data. Raises sqlite3.Error, or ValueError for too many."""
        return queried(self.source, self.image, query, seconds, most)

    async def rows_apart(self, query: str, seconds: float, most: int) -> Rows:
        """The rows of a query of the model, in its own process.

        Raises ValueError for a query that fails, and RuntimeError if a signal ended the process:
        the rollout fails and gets no score.
        """
        given = _queries.encoded((self.source, self.image, query, seconds, most))
        command = [sys.executable, "-I", "-S", "-B", _queries.__file__]
        try:
            async with timeout(seconds + START_SECONDS):
                done = await run_program(command, stdin=given, keep=OUTPUT)
        except TimeoutError:
            raise ValueError("interrupted") from None
        if done.exit_code < 0:
            raise RuntimeError(f"signal {-done.exit_code} ended the process of the query")
        if done.exit_code:
            raise ValueError(f"the query ended its process: {done.stderr[-200:]}")
        rows: Rows | str = _queries.decoded(done.stdout)
        if isinstance(rows, str):
            raise ValueError(rows)
        return rows


@lru_cache(maxsize=8)
def opened(path: Path) -> Database:
    return Database(path)


def equal(rows: Rows, expected: Rows, ordered: bool) -> bool:
    """Whether two results are equal."""
    if not ordered:
        rows, expected = sorted(rows, key=place), sorted(expected, key=place)
    return len(rows) == len(expected) and all(
        len(one) == len(other) and all(map(same, one, other))
        for one, other in zip(rows, expected, strict=True)
    )


def place(row: Sequence[Any]) -> Any:
    """The place of a row among others: the same for numbers that are equal to 12 digits."""
    rounded = [float(f"{value:.12g}") if is_number(value) else value for value in row]
    return [ranked(value) for value in rounded], [ranked(value) for value in row]


def ranked(value: Any) -> tuple[int, Any]:
    """A key by which SQLite's values can be sorted."""
    if value is None:
        return 0, 0
    return 1 + is_number(value) + 2 * isinstance(value, bytes), value


def same(one: Any, other: Any) -> bool:
    """Whether two values are equal: integers exactly, a float and a number to 12 digits."""
    if is_number(one) and is_number(other) and float in (type(one), type(other)):
        return math.isclose(one, other, rel_tol=1e-12)
    return type(one) is type(other) and bool(one == other)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float)


UNREAD = re.compile(
    r"""'[^']*' | "[^"]*" | `[^`]*` | \[[^]]*\] | --[^\n]* | /\*.*?(?:\*/|\Z)""",
    re.DOTALL | re.VERBOSE,
)
"""Strings, quoted names and comments."""


def is_ordered(query: str) -> bool:
    """Whether the outermost query has an ORDER BY: not in parentheses, quotes or comments."""
    text = UNREAD.sub(" ", query)
    while (shorter := re.sub(r"\([^()]*\)", " ", text)) != text:
        text = shorter
    return re.search(r"\border\s+by\b", text, re.IGNORECASE) is not None
