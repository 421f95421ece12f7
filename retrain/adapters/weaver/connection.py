"""Calls on one Weaver service: JSON in, JSON or an Operation out, and the undoing of calls.

`or_undo` is what keeps a promise on cancellation: a call that makes something on the service is
never abandoned half-way; it is waited for, for a few seconds, and what it made is removed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio

from retrain.adapters.weaver import wire
from retrain.adapters.weaver.operations import Operation, Pace, decode_json, decode_operation
from retrain.transport.client import Call, HttpClient
from retrain.transport.refusals import RemoteError

T = TypeVar("T")
log = logging.getLogger(__name__)

CLEAN_UP = 5.0
"""Seconds that undoing something on the service may take."""


@dataclass(frozen=True, slots=True)
class Connection:
    """Where the calls of one client go, and how long its operations may take."""

    http: HttpClient
    deadline: float = 3600.0
    """Seconds that one operation may take."""
    pace: Pace = field(default_factory=Pace)
    resend: bool = False
    """The service recognises a repeated seq_id: a training call may be sent again."""

    async def call(self, method: str, path: str, payload: Any = None) -> Any:
        """The reply's JSON value. Repeated when the reply is lost: meant for harmless calls."""
        where = f"api/v1/{path}"
        call = Call(method, where) if payload is None else Call.json(method, where, payload)
        return await self.http.send(call, decode_json)

    async def submit(
        self,
        path: str,
        body: bytes,
        parse: Callable[[Any], T],
        *,
        what: str,
        idempotent: bool = True,
    ) -> Operation[T]:
        """The operation that a POST of `body` starts; `parse` makes its result."""
        call = Call(
            "POST",
            f"api/v1/{path}",
            body=body,
            headers={"Content-Type": "application/json"},
            idempotent=idempotent,
        )
        return self.watch(await self.http.send(call, decode_operation), parse, what=what)

    def watch(
        self, state: wire.OperationState, parse: Callable[[Any], T], *, what: str
    ) -> Operation[T]:
        """An operation that the service has told us of."""
        return Operation(self.http, state, parse, what=what, deadline=self.deadline, pace=self.pace)


async def or_undo(make: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """`make`, and when cancelled meanwhile, `undo` of what it made."""
    making = asyncio.ensure_future(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:
        await clean_up(_undo_made(making, undo))
        making.cancel()
        raise


async def _undo_made(making: asyncio.Future[T], undo: Callable[[T], Awaitable[object]]) -> None:
    await undo(await making)


async def clean_up(ending: Awaitable[object]) -> None:
    """Run `ending` to its end, or for `CLEAN_UP` seconds, through a cancellation.

    Its failure is logged and no more: the service ends a silent session by itself.
    """
    with anyio.move_on_after(CLEAN_UP, shield=True):
        try:
            await ending
        except RemoteError as error:
            log.warning("could not clean up on the service: %s", error)


def understood(parse: Callable[[Any], T], reply: Any) -> T:
    """`parse(reply)`; a reply that it can't read is a RemoteError, the service's fault."""
    try:
        return parse(reply)
    except ValueError as error:
        raise RemoteError(
            f"the service's reply can't be read: {error}",
            code="malformed",
            may_have_acted=True,
            fault="server",
        ) from error
