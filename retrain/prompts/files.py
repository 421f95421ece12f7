"""Files of rows: jsonl, json (a list), csv, txt (one prompt per line) and parquet.

Every reader yields a row with its place, so that an error can name the line.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, get_args

from retrain.errors import PromptError
from retrain.prompts.base import Numbered

Format = Literal["jsonl", "json", "csv", "txt", "parquet"]
FORMATS: Mapping[str, Format] = {
    ".ndjson": "jsonl",
    **{f".{name}": name for name in get_args(Format)},
}
"""The formats by their file extensions."""


def read_rows(path: Path, format: Format | None = None) -> list[Numbered]:
    """All rows of a file; without `format` the file extension determines it.

    Raises PromptError with the file and the line.
    """
    read = _READERS[format or _format_of(path)]
    try:
        return list(read(path))
    except UnicodeDecodeError:
        raise PromptError(f"{path}{_undecodable(path)}: not UTF-8") from None
    except OSError as error:
        raise PromptError(f"can't read {path}: {error.strerror}") from None


def _undecodable(path: Path) -> str:
    """The place of the first line that is not UTF-8; a reader decodes many lines at once."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                line.decode("utf-8")
            except UnicodeDecodeError as error:
                return f", line {number}, byte {error.start + 1}"
    return ""


def _format_of(path: Path) -> Format:
    if found := FORMATS.get(path.suffix.lower()):
        return found
    known = ", ".join(sorted(get_args(Format)))
    raise PromptError(
        f"{path}: can't infer the format from the extension: set `format` to one of {known}"
    )


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """The lines of a file that are not blank, with their numbers."""
    with path.open(encoding="utf-8-sig") as lines:
        yield from ((number, line) for number, line in enumerate(lines, 1) if line.strip())


def _read_jsonl(path: Path) -> Iterator[Numbered]:
    for number, line in _lines(path):
        yield f"line {number}", _json(line.strip(), path, number)


def _read_txt(path: Path) -> Iterator[Numbered]:
    for number, line in _lines(path):
        yield f"line {number}", line.rstrip("\r\n")


def _read_json(path: Path) -> Iterator[Numbered]:
    rows = _json(path.read_text(encoding="utf-8-sig"), path, 1)
    if not isinstance(rows, list):
        raise PromptError(
            f"{path} contains a {type(rows).__name__}, expected a list of rows; for one object per "
            "line set `format` to jsonl"
        )
    yield from ((f"row {index}", row) for index, row in enumerate(rows))


def _json(text: str, path: Path, line: int) -> Any:
    if not text.strip():
        return []
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        where = f"{path}, line {line + error.lineno - 1}, column {error.colno}"
        raise PromptError(f"{where}: invalid JSON: {error.msg}") from None


def _read_csv(path: Path) -> Iterator[Numbered]:
    with path.open(encoding="utf-8-sig", newline="") as lines:
        reader = csv.DictReader(lines)
        try:
            for row in reader:
                if None in row or None in row.values():
                    raise PromptError(
                        f"{path}, line {reader.line_num}: expected as many fields as in the "
                        f"header ({', '.join(reader.fieldnames or ())})"
                    )
                yield f"line {reader.line_num}", row
        except csv.Error as error:
            raise PromptError(f"{path}, line {reader.line_num}: invalid CSV: {error}") from None


def _read_parquet(path: Path) -> Iterator[Numbered]:
    try:
        arrow = import_module("pyarrow")
        rows = import_module("pyarrow.parquet").read_table(path).to_pylist()
    except ImportError:
        raise PromptError(
            f"{path}: parquet needs pyarrow, which is not installed: pip install pyarrow"
        ) from None
    except arrow.ArrowException as error:
        raise PromptError(f"{path}: invalid parquet: {error}") from None
    yield from ((f"row {index}", row) for index, row in enumerate(rows))


_READERS: Mapping[str, Callable[[Path], Iterator[Numbered]]] = {
    "csv": _read_csv,
    "json": _read_json,
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "txt": _read_txt,
}
