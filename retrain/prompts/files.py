"""Files of rows: jsonl, json (a list), csv, txt (one prompt per line) and parquet.

A file is read once to find where its rows are; a row is decoded when it is needed. So a large file
takes 8 bytes of memory per row. All errors name the line.
"""

from __future__ import annotations

import csv
import io
import json
import os
import weakref
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from retrain.errors import PromptError, install_command

Format = Literal["jsonl", "json", "csv", "txt", "parquet"]
FORMATS: Mapping[str, Format] = {
    ".ndjson": "jsonl",
    **{f".{name}": name for name in get_args(Format)},
}
"""The formats by their file extensions."""
IN_MEMORY = 64 * 2**20
"""Bytes. A smaller file is kept in memory, so that it may change during the run."""
CACHED = 256 * 2**20
"""Bytes of parquet row groups that are kept in memory, at least one."""
LONGEST = 2**31 - 1
"""Characters of a field of csv, whose limit is 131072 by default: less than a long context."""
BOM = b"\xef\xbb\xbf"
_DECODER = json.JSONDecoder()
_SCAN: Callable[[str, int], tuple[Any, int]] = vars(_DECODER)["scan_once"]


class Table(ABC):
    """The rows of a file, by index."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Any: ...

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def location(self, index: int) -> str:
        """Where a row is, such as "line 3"."""
        return f"row {index}"


def table_of(path: Path, format: Format | None = None) -> Table:
    """The rows of a file; without `format` the file extension determines it.

    Raises PromptError with the file and the line.
    """
    try:
        return _TABLES[format or _format_of(path)](path)
    except OSError as error:
        raise PromptError(f"can't read {path}: {error.strerror}") from None


def _format_of(path: Path) -> Format:
    if found := FORMATS.get(path.suffix.lower()):
        return found
    known = ", ".join(sorted(get_args(Format)))
    raise PromptError(
        f"{path}: can't infer the format from the extension: set `format` to one of {known}"
    )


class TextTable(Table):
    """A prompt per line, without blank lines."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file: BinaryIO = path.open("rb")
        self._state = self._stat()
        if self._state[0] <= IN_MEMORY:
            with self._file as file:
                self._file = io.BytesIO(file.read())
        weakref.finalize(self, self._file.close)
        self._starts = array("Q", self._found())

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        start = self._opened_at(index)
        return self._parsed(start, self._file.readline())

    def __iter__(self) -> Iterator[Any]:
        file, parsed = self._file, self._parsed
        at = 0
        file.seek(0)
        wanted = iter(self._starts)
        start = next(wanted, None)
        for line in file:
            if at == start:
                yield parsed(at, line)
                start = next(wanted, None)
            at += len(line)

    def location(self, index: int) -> str:
        return f"line {self._line(self._starts[index])}"

    def _opened_at(self, index: int) -> int:
        """Move to the start of a row, which is returned."""
        if not isinstance(self._file, io.BytesIO) and self._stat() != self._state:
            raise PromptError(f"{self.path} has changed during the run; restore it, then resume")
        start = self._starts[index]
        self._file.seek(start)
        return start

    def _found(self) -> Iterator[int]:
        """Where the rows begin."""
        at = 0
        for line in self._lines():
            if not line.isspace():
                yield at
            at += len(line)

    def _lines(self) -> Iterator[bytes]:
        self._file.seek(0)
        return iter(self._file)

    def _parsed(self, start: int, line: bytes) -> Any:
        return self._text(start, line).rstrip("\r\n")

    def _text(self, start: int, line: bytes) -> str:
        try:
            return line.removeprefix(BOM if not start else b"").decode()
        except UnicodeDecodeError as error:
            where = f"{self.path}, line {self._line(start)}, byte {error.start + 1}"
            raise PromptError(f"{where}: not UTF-8") from None

    def _line(self, start: int) -> int:
        """The number of the line that begins at this byte; only for messages."""
        before = self._file.tell()  # the rows may be read meanwhile
        self._file.seek(0)
        number, left = 1, start
        while left > 0 and (block := self._file.read(min(left, 2**20))):
            number, left = number + block.count(b"\n"), left - len(block)
        self._file.seek(before)
        return number

    def _stat(self) -> tuple[int, int]:
        state = os.stat(self.path)
        return state.st_size, state.st_mtime_ns


class JsonLinesTable(TextTable):
    """A JSON value per line."""

    def _parsed(self, start: int, line: bytes) -> Any:
        text = self._text(start, line).strip()
        try:
            value, end = _SCAN(text, 0)  # `decode` takes twice as long
            if end == len(text):
                return value
        except (StopIteration, json.JSONDecodeError, RecursionError):
            pass
        try:
            return _DECODER.decode(text)
        except (json.JSONDecodeError, RecursionError) as error:
            where = f"{self.path}, line {self._line(start)}"
            why = str(error).replace("line 1 column", "column")
            raise PromptError(f"{where}: invalid JSON: {why}") from None


class CsvTable(TextTable):
    """A header, then a mapping of strings per record, which may have several lines.

    An empty field is None.
    """

    def __getitem__(self, index: int) -> dict[str, str | None]:
        start = self._opened_at(index)
        record = next(csv.reader(self._text(start, line) for line in self._file))
        return dict(zip(self._header, (field or None for field in record), strict=True))

    __iter__ = Table.__iter__

    def _found(self) -> Iterator[int]:
        self._header: Sequence[str] = ()
        csv.field_size_limit(LONGEST)
        start = end = 0

        def texts() -> Iterator[str]:
            nonlocal end
            for line in self._lines():
                end += len(line)
                yield self._text(end - len(line), line)

        try:
            for record in csv.reader(texts()):
                if record and not self._header:
                    self._header = record
                    if len(set(record)) < len(record):
                        names = ", ".join(record)
                        raise PromptError(f"{self.path}: two columns have the same name: {names}")
                elif len(record) == len(self._header):
                    yield start
                elif record:
                    raise PromptError(
                        f"{self.path}, line {self._line(start)}: expected as many fields as in "
                        f"the header ({', '.join(self._header)})"
                    )
                start = end  # what the reader has consumed so far
        except csv.Error as error:
            where = f"{self.path}, line {self._line(start)}"
            raise PromptError(f"{where}: invalid CSV: {error}") from None


class JsonTable(Table):
    """A list of rows, all of which are in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            text = path.read_text(encoding="utf-8-sig")
            rows = json.loads(text) if text.strip() else []
        except UnicodeDecodeError:
            raise PromptError(f"{path}: not UTF-8") from None
        except (json.JSONDecodeError, RecursionError) as error:
            raise PromptError(f"{path}: invalid JSON: {error}") from None
        if not isinstance(rows, list):
            raise PromptError(
                f"{path} contains a {type(rows).__name__}, expected a list of rows; for one object "
                "per line set `format` to jsonl"
            )
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class ParquetTable(Table):
    """The row groups of a parquet file, of which the last used ones are in memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        try:
            arrow = import_module("pyarrow")
            self._file: Any = import_module("pyarrow.parquet").ParquetFile(path)
        except ImportError:
            raise PromptError(
                f"{path}: parquet needs pyarrow, which is not installed: {install_command('data')}"
            ) from None
        except arrow.ArrowException as error:
            raise PromptError(f"{path}: invalid parquet: {error}") from None
        about = self._file.metadata
        sizes = (about.row_group(group).num_rows for group in range(about.num_row_groups))
        self._starts: array[int] = array("Q", accumulate(sizes, initial=0))
        self._groups: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, index: int) -> Any:
        group, within = place_in(self._starts, index)
        if group not in self._groups:
            self._groups[group] = self._file.read_row_group(group)
            while len(self._groups) > 1 and sum(t.nbytes for t in self._groups.values()) > CACHED:
                self._groups.popitem(last=False)
        self._groups.move_to_end(group)
        return self._groups[group].slice(within, 1).to_pylist()[0]

    def __iter__(self) -> Iterator[Any]:
        for batch in self._file.iter_batches(batch_size=1024):
            yield from batch.to_pylist()


def place_in(starts: Sequence[int], index: int) -> tuple[int, int]:
    """The part that has a row, and the row's index in it; `starts` ends with the number of rows."""
    part = bisect_right(starts, index) - 1
    return part, index - starts[part]


_TABLES: Mapping[str, type[Table]] = {
    "csv": CsvTable,
    "json": JsonTable,
    "jsonl": JsonLinesTable,
    "parquet": ParquetTable,
    "txt": TextTable,
}
