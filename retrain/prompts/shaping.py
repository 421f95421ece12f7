"""What the keys `filter`, `map`, `system`, `prompt_column` and `answer_column` make of a row."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from retrain.config import PromptsConfig
from retrain.config.plugins import find_function
from retrain.errors import PromptError, first_of, shown
from retrain.prompts.base import Raw, RowShape, as_row, parse_row
from retrain.types import Message, Row

_NAMED = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
"""{{name}}, for the braces themselves, or {name}."""
RANGE = {"min", "max", "not"}


class ShapedBy(RowShape):
    """Chooses and changes rows by the keys of a source."""

    def __init__(self, keys: PromptsConfig, base_dir: Path, where: str, opened: bool) -> None:
        self._keys, self._opened = keys, opened
        self._keeps, self._changed = (
            find_function(key, base_dir, f"{where}.{name}") if isinstance(key, str) else key
            for name, key in (("filter", keys.filter), ("map", keys.map))
        )
        first: Message = {"role": "system", "content": keys.system or ""}
        self._first = (first,) if keys.system is not None else ()
        self.plain = not (opened or self._first or keys.prompt_column or keys.answer_column)

    def keeps(self, raw: Raw) -> bool:
        """Whether `filter` keeps the row. Raises ValueError for a column that it lacks."""
        keeps = self._keeps
        if keeps is None:
            return True
        if callable(keeps):
            return bool(keeps(_columns(raw)))
        columns = _columns(raw)
        return all(_holds(_column(columns, name), wanted) for name, wanted in keeps.items())

    def filtered_values(self, raws: Iterable[Raw]) -> str:
        """For a message: some values of the columns that a `filter` of conditions reads."""
        if not isinstance(self._keeps, Mapping):
            return ""
        found: dict[str, dict[str, None]] = {name: {} for name in self._keeps}
        for raw in islice(raws, 1000):
            columns = _columns(raw)
            for name, values in found.items():
                if name in columns:
                    values[shown(columns[name])] = None
        parts = (f"{name} has {first_of(list(values))}" for name, values in found.items())
        return f"; {'; '.join(parts)}"

    def changed(self, raw: Raw) -> Raw:
        """What `map` makes of the row."""
        if self._changed is None:
            return raw
        columns = _columns(raw)
        if callable(self._changed):
            return self._changed(columns)
        new = {name: _made(columns, name, what) for name, what in self._changed.items()}
        replaced = {"prompt": "messages", "messages": "prompt"}
        dropped = {replaced[name] for name in new if name in replaced}
        return {**{k: v for k, v in columns.items() if k not in dropped}, **new}

    def row(self, raw: Raw) -> Row:
        """The Row of a changed row. Raises ValueError that says what was expected."""
        keys = self._keys
        if isinstance(raw, Row) or self._opened:
            row = as_row(raw, opened=self._opened)
        else:
            row = parse_row(raw, keys.prompt_column, keys.answer_column)
        return row._replace(messages=(*self._first, *row.messages)) if self._first else row


def _columns(raw: Raw) -> dict[str, Any]:
    """A row as a mapping."""
    if isinstance(raw, Row):
        return {"messages": list(raw.messages), "answer": raw.answer, **raw.metadata}
    if isinstance(raw, Mapping):
        return dict(raw)
    if isinstance(raw, str):
        return {"prompt": raw}
    raise ValueError(f"got {type(raw).__name__}, expected a string or a mapping")


def _column(columns: Mapping[str, Any], name: str) -> Any:
    if name not in columns:
        names = ", ".join(map(str, columns)) or "none"
        raise ValueError(f"column `{name}` is missing; its columns are {names}")
    return columns[name]


def _holds(value: Any, wanted: Any) -> bool:
    """Whether a column fits its condition: a value, a list of them, or {min, max, not}."""
    if not isinstance(wanted, Mapping):
        return any(_same(value, one) for one in (wanted if isinstance(wanted, list) else [wanted]))
    if not wanted or not wanted.keys() <= RANGE:
        raise PromptError(
            f"filter: got {shown(dict(wanted))}, expected a value, a list of values, or a mapping "
            "of min, max and not"
        )
    limits = {key: wanted[key] for key in ("min", "max") if wanted.get(key) is not None}
    if limits and not _within(value, limits):
        return False
    return ("not" not in wanted and bool(limits)) or not _holds(value, wanted.get("not"))


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    """Whether a column is a number from `min` to `max`, of which one may be missing."""
    number = _number(value)
    return number is not None and limits.get("min", number) <= number <= limits.get("max", number)


def _same(value: Any, wanted: Any) -> bool:
    """Equal, or the same number: csv has strings only."""
    if isinstance(value, str) and type(wanted) in (int, float):
        return bool(_number(value) == wanted)
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def _number(value: Any) -> float | None:
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _made(columns: Mapping[str, Any], name: str, what: Any) -> Any:
    """The new column `name`: another column, a template, or a part of a column."""
    if isinstance(what, str):
        if what in columns:
            return columns[what]
        if not _NAMED.search(what):
            return _column(columns, what)
        return _filled(what, columns)
    if isinstance(what, list):  # messages
        return [{key: _filled(text, columns) for key, text in message.items()} for message in what]
    if not isinstance(what, Mapping) or not {"after"} <= what.keys() <= {"after", "column"}:
        raise PromptError(
            f"map.{name}: got {shown(what)}, expected a column, a template such as "
            '"Question: {question}", or {after: "####"}'
        )
    column = what.get("column", name)
    return _after(_column(columns, column), what["after"], column, name)


def _after(text: Any, mark: str, column: str, name: str) -> str:
    """The text of `column` after the last `mark`, for the new column `name`."""
    if not isinstance(text, str):
        raise ValueError(f"column `{column}` is {shown(text)}, expected a string")
    _, found, tail = text.rpartition(mark)
    if not found:
        raise ValueError(f"{mark!r} is not in {shown(text)} (map.{name})")
    return tail.strip()


def _filled(text: str, columns: Mapping[str, Any]) -> str:
    """A template with the columns in place of their {names}."""

    def value(match: re.Match[str]) -> str:
        return f"{{{match[1]}}}" if match[1] else str(_column(columns, match[2]))

    return _NAMED.sub(value, text)
