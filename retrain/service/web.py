"""HTTP for both protocols: request bodies, error responses, the API key, size limits."""

from __future__ import annotations

import asyncio
import hmac
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from retrain.errors import shown
from retrain.service.errors import ServiceError, invalid

T = TypeVar("T")
B = TypeVar("B", bytes, bytearray)
Json = Mapping[str, Any]  # an object as it came off the wire
IN_THREAD = 64 * 1024
"""Larger bodies, in bytes, are decoded in a thread to keep the event loop free."""
_REQUIRED: Any = object()  # no default


async def read_body(request: Request, limit: int) -> bytes:
    """The decompressed body; raises ServiceError (413) if it has more than `limit` bytes."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            _within(limit, body)
    except ClientDisconnect:
        raise invalid("the connection closed before the end of the body") from None
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await asyncio.to_thread(_unzstd, bytes(body), limit)
    if encoding != "identity":
        raise ServiceError(415, f"Content-Encoding: got {encoding!r}, expected zstd")
    return bytes(body)


async def decoded(parse: Callable[[bytes], T], body: bytes) -> T:
    """`parse(body)`, in a thread if it is large; raises ServiceError (400) if it fails."""
    try:
        if len(body) > IN_THREAD:
            return await asyncio.to_thread(parse, body)
        return parse(body)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise invalid(f"the body can't be read: {type(error).__name__}: {error}") from None


def json_object(body: bytes) -> dict[str, Any]:
    """Raises ValueError unless the body is empty or a JSON object; NaN is not valid JSON."""
    value = json.loads(body, parse_constant=_no_constant) if body else {}
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


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
            raise invalid(f"{name} is missing, expected {_article(kind)}")
        return default  # type: ignore[no-any-return]  # T or None by the overloads
    wide: Any = (int, float) if kind is float else kind  # isinstance takes both
    if not isinstance(value, wide) or (isinstance(value, bool) and kind is not bool):
        raise invalid(f"{name}: got {shown(value)}, expected {_article(kind)}")
    return value  # type: ignore[no-any-return]  # checked above


async def answer_error(_: Request, error: Exception) -> Response:
    """Starlette's handler for all exceptions: clients always get the same error body."""
    if isinstance(error, HTTPException):
        error = ServiceError(error.status_code, error.detail)
    elif not isinstance(error, ServiceError):
        error = ServiceError(500, f"{type(error).__name__}: {error}")
    text = str(error)  # Tinker's clients read `detail`, Weaver's the rest
    content = {"error": error.code, "message": text, "retryable": False, "detail": text}
    return JSONResponse(content, status_code=error.status)


def check_key(request: Request, key: str) -> None:
    """Raise ServiceError (401) unless the request has the key."""
    given = request.headers.get("x-api-key") or request.headers.get("x-weaver-api-key") or ""
    if not hmac.compare_digest(given.encode("latin-1"), key.encode()):
        raise ServiceError(401, "the API key is missing or wrong")


def _unzstd(body: bytes, limit: int) -> bytes:
    try:
        import zstandard
    except ImportError:
        raise ServiceError(
            415, "zstd needs zstandard on the service; send it uncompressed"
        ) from None
    try:
        with zstandard.ZstdDecompressor().stream_reader(body) as reader:
            plain: bytes = reader.read(limit + 1)
    except zstandard.ZstdError as error:
        raise invalid(f"the body is not valid zstd: {error}") from None
    return _within(limit, plain)


def _within(limit: int, body: B) -> B:
    if len(body) > limit:
        raise ServiceError(413, f"the body has more than {limit} bytes; send less data per request")
    return body


def _no_constant(name: str) -> float:
    raise ValueError(f"got {name}, expected finite numbers")


def _article(kind: type[Any]) -> str:
    names = {str: "a string", int: "an integer", float: "a number", bool: "a boolean"}
    return names.get(kind, "a list" if kind is list else "an object")
