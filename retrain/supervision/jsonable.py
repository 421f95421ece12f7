"""The values of users as JSON values, whatever they are: for files, checkpoints and queues."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from typing import Any, Self

MAX_DEPTH = 32


class Named(str):
    """The name of a class or function that Python code put into a config."""

    value: Any

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)  # another process finds it by its name, or not at all


class Filled(str):
    """A string from an environment variable, perhaps a secret: files and reprs have `written`."""

    written: str

    def __new__(cls, value: str, written: str = "") -> Self:
        made = super().__new__(cls, value)
        made.written = written
        return made

    def __repr__(self) -> str:
        return f"{self.written!r} (filled in)"


def plain(value: Any) -> Any:  # any: users' values in, JSON values out
    """`value` as a copy of JSON values: NaN becomes None, other objects their `repr`."""
    return plain_with(value, "", {})


def plain_with(value: Any, path: str, nonfinite: dict[str, str], depth: int = 0) -> Any:
    """`plain`, which adds the paths of NaN and infinities, below `path`, to `nonfinite`."""
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        nonfinite[path] = repr(value)
        return None
    if depth >= MAX_DEPTH:
        return _shown(value)
    try:
        return _plain_inside(value, path, nonfinite, depth + 1)
    except Exception:  # noqa: BLE001 - a method of the user's object
        return _shown(value)


def _plain_inside(value: Any, path: str, nonfinite: dict[str, str], depth: int) -> Any:
    if isinstance(value, Mapping):
        items = [(_text(k) if isinstance(k, str) else _shown(k), v) for k, v in value.items()]
        return {key: plain_with(item, f"{path}.{key}", nonfinite, depth) for key, item in items}
    if isinstance(value, list | tuple):
        return [plain_with(v, f"{path}.{i}", nonfinite, depth) for i, v in enumerate(value)]
    return plain_with(default(value), path, nonfinite, depth)


def default(value: Any) -> Any:
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


def _text(value: str) -> str:
    """An exact str, without what was filled in."""
    return value.written if isinstance(value, Filled) else str.__str__(value)


def _shown(value: Any) -> str:
    try:
        return str.__str__(repr(value))
    except Exception as error:  # noqa: BLE001 - a user's __repr__ may raise anything
        return f"<{type(value).__name__}: its repr raised {type(error).__name__}>"
