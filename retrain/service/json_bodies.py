"""From the bytes of a request to a JSON object, in bounded time and memory.

A few bytes can stand for much more memory: `[],` is 3 bytes and 72 in Python, and zstd packs zeros
10,000 times. The bytes are therefore counted before they are decoded.
"""

from __future__ import annotations

import json
from typing import Any

import zstandard

from retrain.service.errors import ServiceError, invalid

CONTAINERS = 2**19
"""Lists, objects and members of objects in a body: a datum has about 15."""
_SMALL = 16 * 2**20
_RATIO = 200
"""A decompressed body is at most `_SMALL` bytes or `_RATIO` times the compressed ones."""
_WINDOW = 2**25


def json_object(body: bytes, values: int) -> dict[str, Any]:
    """The JSON object of a body, empty for an empty body.

    Raises ServiceError (413) if there are more than `values` values, and ValueError for anything
    but a JSON object in UTF-8 without NaN.
    """
    check_counts(body.count(b",") + 1, values)
    containers = sum(body.count(sign) for sign in (b"[", b"{", b":"))
    if containers > CONTAINERS:
        raise ServiceError(
            413,
            f"the body has {containers} lists, objects and members, expected at most {CONTAINERS}",
        )
    value = json.loads(body.decode(), parse_constant=_no_constant) if body else {}
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def check_counts(count: int, values: int) -> None:
    if count > values:
        raise ServiceError(
            413,
            f"the body has about {count} values, expected at most {values}; send less data "
            "per request",
        )


def check_size(size: int, limit: int) -> None:
    if size > limit:
        raise ServiceError(413, f"the body has more than {limit} bytes; send less data per request")


def unzstd(body: bytes, limit: int) -> bytes:
    """The decompressed body; raises ServiceError (413) if it is too large for its bytes."""
    allowed = min(limit, max(_SMALL, _RATIO * len(body)))
    try:
        with zstandard.ZstdDecompressor(max_window_size=_WINDOW).stream_reader(body) as reader:
            plain: bytes = reader.read(allowed + 1)
    except zstandard.ZstdError as error:
        raise invalid(f"the body is not valid zstd: {error}") from None
    check_size(len(plain), allowed)
    return plain


def _no_constant(name: str) -> float:
    raise ValueError(f"got {name}, expected finite numbers")
