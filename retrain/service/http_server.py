"""The HTTP server: uvicorn, with limits on clients that are slow, many or noisy.

- A request must arrive in time, its head and its body, or its connection is closed.
- At the limit of connections, a new one replaces the connection that has waited longest for a
  request. If all are at work, the new one gets status 503; `/api/v1/healthz` still answers.
- One cause writes at most one line per second to the log.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import h11
import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from retrain.service.access import HEALTH
from retrain.service.state import HttpLimits
from retrain.wire.serving import BACKLOG, allow_files, settings_of

MIN_RATE = 1000.0
"""Bytes per second: a body that arrives faster is never too slow."""
OTHER_FILES = 256
"""File descriptors that connections leave to the rest of the process."""
ACCEPTS = 16
"""Connections that are accepted at once: asyncio would take the whole backlog before it closes one,
and run out of file descriptors."""
log = logging.getLogger(__name__)


def make_server(app: ASGIApp, settings: HttpLimits) -> uvicorn.Server:
    """A server for an app that has been started already."""
    http = partial(GuardedProtocol, _Door(settings))
    return _HttpServer(settings_of(app, http, shutdown=settings.shutdown, backlog=ACCEPTS))


class _HttpServer(uvicorn.Server):
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        for listening in sockets or []:
            # Connections inherit it. asyncio sets it only on sockets with an explicit protocol, and
            # without it each reply waits 40 ms for the client's acknowledgement.
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        await super().startup(sockets)
        for listening in sockets or []:
            listening.listen(BACKLOG)


class _Door:
    """What all connections of a server share."""

    def __init__(self, settings: HttpLimits) -> None:
        self.settings = settings
        self.heads: dict[GuardedProtocol, None] = {}
        """Connections without a complete request, the one that has waited longest first."""
        self.idle: dict[GuardedProtocol, None] = {}
        """Connections that have got their reply, the oldest first."""

    def evict(self) -> bool:
        """Close the connection that is missed least, if there is one."""
        found = next(iter(self.heads), None) or next(iter(self.idle), None)
        if found is not None:
            found.drop("too many connections: closing one without a complete request")
        return found is not None


class GuardedProtocol(H11Protocol):
    """One connection."""

    def __init__(self, door: _Door, **uvicorns: Any) -> None:  # any: uvicorn's own arguments
        super().__init__(**uvicorns)
        self._door = door
        self._phase = ""
        self._since = 0.0
        self._received = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._door.settings.max_connections and not self._door.evict():
            log.warning("too many connections: answering 503")
            self.app = _busy(self.app)
        self._enter("head")

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._look("head")
        self._received += len(data)  # after `_enter`: the data may have begun a body

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look("idle")

    def send_400_response(self, msg: str) -> None:
        """Reply to what is no HTTP. If it is the body of a request, that gets no other reply."""
        super().send_400_response(msg)
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._enter("")
        super().connection_lost(exc)

    def drop(self, reason: str) -> None:
        """Close the connection at once."""
        log.warning(reason)
        self._enter("")
        self.connections.discard(self)
        self.transport.abort()

    def _look(self, between: str) -> None:
        """Find out what the connection waits for; `between` requests, it is as given."""
        state, responding = self.conn.their_state, self.cycle and not self.cycle.response_complete
        if self.transport.is_closing():
            self._enter("")
        elif state is h11.SEND_BODY:
            self._enter("body" if responding else "rest")
        else:
            self._enter(between if state is h11.IDLE and not responding else "")

    def _enter(self, phase: str) -> None:
        """Phases: head, body, rest (of a body that nobody reads), idle, or none."""
        if phase == self._phase:
            return
        self._phase, self._since, self._received = phase, self.loop.time(), 0
        for phases, waiting in ((("head", "rest"), self._door.heads), (("idle",), self._door.idle)):
            waiting.pop(self, None)
            if phase in phases:
                waiting[self] = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if phase in ("head", "body", "rest"):
            self._timer = self.loop.call_later(self._allowed(), self._check)

    def _allowed(self) -> float:
        """Seconds that this phase may take."""
        settings = self._door.settings
        if self._phase == "head":
            return settings.header_timeout
        return settings.body_timeout + self._received / MIN_RATE

    def _check(self) -> None:
        left = self._since + self._allowed() - self.loop.time()
        if left > 0:
            self._timer = self.loop.call_later(left, self._check)
        else:
            part = "head" if self._phase == "head" else "body"
            self.drop(f"closing a connection: the {part} of its request did not arrive in time")


def _busy(app: Callable[..., Any]) -> ASGIApp:  # any: uvicorn's and starlette's types differ
    """The app of a connection above the limit."""
    text = "the service has too many connections; try again later"
    content = {"error": "busy", "message": text, "retryable": True, "detail": text}
    refusal = JSONResponse(content, 503, {"connection": "close", "retry-after": "1"})

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await (app if scope["path"] == HEALTH else refusal)(scope, receive, send)

    return answer


def fit_connections(wanted: int) -> int:
    """The number of connections, at most `wanted`, that this process has file descriptors for.

    Raises the soft limit of the process if that is necessary.
    """
    needed = wanted + OTHER_FILES
    files = allow_files(needed)
    fitting = min(wanted, max(files - OTHER_FILES, files // 2))
    if fitting < wanted:
        log.warning(
            "--max-connections %d needs %d open files; using %d connections. Raise the limit "
            "with `ulimit -n`",
            *(wanted, needed, fitting),
        )
    return fitting


def log_to_stderr() -> None:
    """Write the warnings of the whole process to stderr, through `OncePerSecond`."""
    handler = logging.StreamHandler()
    handler.addFilter(OncePerSecond())
    logging.basicConfig(
        level=logging.WARNING, format="%(levelname)s: %(message)s", handlers=[handler]
    )


class OncePerSecond(logging.Filter):
    """Passes one record per second and cause: the same first line and class of exception."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: dict[object, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info and record.exc_info[0]
        cause = record.name, record.getMessage().partition("\n")[0], error
        since, more = self._seen.get(cause, (float("-inf"), 0))
        now = time.monotonic()
        if now - since < 1:
            self._seen[cause] = since, more + 1
            return False
        if len(self._seen) > 1000:
            self._seen.clear()
        self._seen[cause] = now, 0
        if more:
            record.msg, record.args = f"{record.getMessage()} ({more} more like this)", ()
        return True
