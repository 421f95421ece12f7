"""HTTP of the endpoint: request bodies, answers, clients that disconnect or stop sending."""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Awaitable, Iterable, Mapping
from contextlib import suppress
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from retrain.agents.api import Event, invalid
from retrain.agents.calls import CallError
from retrain.config import EndpointConfig
from retrain.errors import RunError
from retrain.wire.serving import BACKLOG

T = TypeVar("T")
MAX_BODY = 16 * 2**20
"""Bytes of a request."""
IDLE_SECONDS = 30.0
"""Seconds for a client to send each part of a body."""
LOOPBACK = ("127.", "::1", "localhost")


def bound(config: EndpointConfig, *, listens: bool = False) -> socket.socket:
    """A socket with the endpoint's address; raises RunError if that is not available.

    Several processes may hold it, as the ranks of a run do at their start, until one `listens`.
    """
    found = socket.socket(socket.AF_INET6 if ":" in config.host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        found.bind((config.host, config.port))
        if listens:
            found.listen(BACKLOG)
    except OSError as error:
        found.close()
        raise RunError(
            f"endpoint: can't listen on {config.host}:{config.port}: "
            f"{error.strerror or error}. Set endpoint.port to 0 for a free port."
        ) from error
    return found


def url_of(listening: socket.socket) -> str:
    """The URL under which this machine reaches a socket."""
    host, port = listening.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def has_key(http: Request, key: str) -> bool:
    """Whether a request has this API key, as OpenAI's or as Anthropic's clients send it."""
    scheme, _, token = http.headers.get("authorization", "").partition(" ")
    given = http.headers.get("x-api-key") or (token if scheme.lower() == "bearer" else "")
    return hmac.compare_digest(given.encode(), key.encode())


async def body_of(http: Request) -> Mapping[str, Any]:
    """The object that a request has as its body; raises CallError."""
    body = bytearray()
    try:
        async with asyncio.timeout(IDLE_SECONDS) as limit:
            async for chunk in http.stream():
                limit.reschedule(asyncio.get_running_loop().time() + IDLE_SECONDS)
                body += chunk
                if len(body) > MAX_BODY:
                    message = f"the body is over the limit of {MAX_BODY} bytes"
                    raise CallError(413, "request_too_large", message)
    except ClientDisconnect:
        raise CallError(499, "client_disconnected", "the client disconnected") from None
    except TimeoutError:
        message = f"no part of the body arrived for {IDLE_SECONDS:g} s"
        raise CallError(408, "timeout", message) from None
    try:
        value = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise invalid(f"the body is a {type(value).__name__}, expected an object")
    return value


async def while_connected(http: Request, call: Awaitable[T]) -> T:
    """The result of a call, which is cancelled if the client disconnects."""
    task = asyncio.ensure_future(call)
    left = asyncio.ensure_future(http.receive())  # the body was read: only a disconnect is left
    try:
        await asyncio.wait([task, left], return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            raise CallError(499, "client_disconnected", "the client disconnected")
        return task.result()
    finally:
        left.cancel()
        task.cancel()


def as_json(value: Any, status: int = 200) -> Response:
    """In ASCII: what an agent sent may have half of a surrogate pair, which has no UTF-8 form.

    SDKs may not repeat a call that failed: its reason is still there, and each would be a turn.
    """
    headers = {} if status == 200 else {"x-should-retry": "false"}
    if status == 408:  # the rest of its body may never come
        headers["connection"] = "close"
    return Response(json.dumps(value), status, headers, "application/json")


def as_stream(events: Iterable[Event]) -> Response:
    """Server-sent events, all at once: they are written when the reply is complete."""
    return Response("".join(map(event_of, events)), media_type="text/event-stream")


def event_of(event: Event) -> str:
    """An event as it is sent."""
    name, data = event
    text = data if isinstance(data, str) else json.dumps(data)
    return f"event: {name}\ndata: {text}\n\n" if name else f"data: {text}\n\n"
