"""The values of request bodies in both protocols, checked by kind, as pure functions.

Whatever leaves this module is safe to compute with, to store and to send back: integers fit into 64
bits, numbers into float32, strings are short. A missing or invalid value is a ServiceError (400)
that names it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, TypeVar, overload

from retrain.errors import shown
from retrain.service.errors import invalid

T = TypeVar("T")
Json = Mapping[str, Any]  # an object as it came off the wire
_REQUIRED: Any = object()  # no default
INT64 = -(2**63), 2**63 - 1
SEEDS = -(2**63), 2**64 - 1
"""What torch accepts."""
LARGEST = 3.4028234e38
"""Of float32."""
LONGEST = 4096
"""Characters of a string: a name, an id or a path."""
_LONGEST_METADATA = 64 * 1024
_DEEPEST_METADATA = 16
_LONGEST_TTL = 10 * 366 * 24 * 3600
_SURROGATE = re.compile("[\ud800-\udfff]")
"""Half a surrogate pair, which JSON can write and UTF-8 can't."""
KINDS: Mapping[type[Any], str] = {
    str: f"a string of at most {LONGEST} Unicode characters",
    int: "an integer of 64 bits",
    float: "a finite number",
    bool: "a boolean",
    list: "a list",
    dict: "an object",
}


@overload
def want(body: Json, name: str, kind: type[T]) -> T: ...
@overload
def want(body: Json, name: str, kind: type[T], default: None) -> T | None: ...
@overload
def want(body: Json, name: str, kind: type[T], default: T) -> T: ...
def want(body: Json, name: str, kind: type[T], default: Any = _REQUIRED) -> T | None:
    """`body[name]` of type `kind`; if missing or null, the default or else a ServiceError (400).

    An integer is also a float; a boolean is not a number.
    """
    value: Any = body.get(name)
    if value is None:
        if default is _REQUIRED:
            raise invalid(f"{name} is missing, expected {KINDS[kind]}")
        return default  # type: ignore[no-any-return]  # T or None by the overloads
    if not fits(value, kind):
        raise invalid(f"{name}: got {shown(value)}, expected {KINDS[kind]}")
    return kind(value) if kind is float else value  # type: ignore[call-arg]  # checked


def fits(value: object, kind: type[Any]) -> bool:
    """Whether a JSON value is of this kind and within its bounds."""
    if kind is float:
        return type(value) in (int, float) and -LARGEST <= value <= LARGEST  # type: ignore[operator]  # a number
    if type(value) is not kind:
        return False
    if isinstance(value, str):
        return len(value) <= LONGEST and not _SURROGATE.search(value)
    return not isinstance(value, int) or INT64[0] <= value <= INT64[1]


def integer(body: Json, name: str, low: int, high: int, default: int | None = None) -> int:
    """`body[name]`, an integer from `low` to `high`; if it is missing, the default or an error."""
    value = default if body.get(name) is None else body[name]
    if type(value) is not int or not low <= value <= high:
        raise invalid(f"{name}: got {shown(value)}, expected an integer from {low} to {high}")
    return value


def objects(body: Json, name: str) -> list[Json]:
    """`body[name]`, a list of objects."""
    found: list[Json] = want(body, name, list)
    for index, value in enumerate(found):
        if type(value) is not dict:
            raise invalid(f"{name}[{index}]: got {shown(value)}, expected an object")
    return found


def check_non_negative(where: str, values: Json) -> None:
    """Raise ServiceError unless all values are finite numbers >= 0."""
    for name, value in values.items():
        if not fits(value, float) or value < 0:
            raise invalid(f"{where}.{name}: got {shown(value)}, expected a finite number >= 0")


def metadata(body: Json) -> Json:
    """The client's own JSON object, which is stored and sent back."""
    found: Json = want(body, "user_metadata", dict, {})
    check_storable("user_metadata", found)
    return found


def check_storable(name: str, value: object) -> None:
    """Raise ServiceError unless a JSON value can be written as JSON again, and is small."""
    if _is_deeper(value, _DEEPEST_METADATA):
        raise invalid(f"{name} is nested too deeply, expected at most {_DEEPEST_METADATA} levels")
    try:
        size = len(json.dumps(value, allow_nan=False, ensure_ascii=False).encode())
    except ValueError as error:
        raise invalid(f"{name} can't be stored: {error}") from None
    if size > _LONGEST_METADATA:
        raise invalid(f"{name} has {size} bytes, expected at most {_LONGEST_METADATA}")


def ttl(body: Json) -> float | None:
    """Seconds to keep a checkpoint; None keeps it until it is deleted."""
    if body.get("ttl_seconds") is None:
        return None
    return integer(body, "ttl_seconds", 1, _LONGEST_TTL)


def iso(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _is_deeper(value: object, levels: int) -> bool:
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(one, levels - 1) for one in inner)


def all_finite(values: Any) -> bool:  # numbers, or None
    """Whether results can be sent: NaN and infinity are no JSON."""
    return all(value is None or math.isfinite(value) for value in values)
