"""Calls to one Weaver service, the operations that they start, and clean-up.

- Weaver answers slow requests with an operation: submitted by POST, then polled by GET. The first
  poll comes soon and the pauses grow (`PACE`), so a short step loses little time and a long queue
  costs few requests.
- A wait ends with the result, with the operation's error, or at the deadline. A failed operation is
  never submitted again here: it may have changed part of the model.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import anyio

from retrain.adapters.weaver import wire
from retrain.wire.client import Call, HttpClient
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import RetryPolicy

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
log = logging.getLogger(__name__)

CLEAN_UP = 5.0
"""Seconds that removing something from the service may take."""
REPORT_EVERY = 60.0
"""Seconds between two log lines about an operation that is still waiting."""
PACE = RetryPolicy(first=0.02, cap=2.0)
"""The pauses between polls of an operation."""
LOST_POLLS = 20
"""Polls in a row that may fail because the service has lost its own store."""


def _operation(response: httpx.Response) -> wire.OperationState:
    return wire.operation(json.loads(response.content))


class Operation(Generic[T]):
    """A submitted operation; `result` waits for it and may be called any number of times."""

    def __init__(
        self,
        connection: WeaverConnection,
        state: wire.OperationState,
        parse: Callable[[Any], T],
        *,
        what: str,
    ) -> None:
        """`parse` reads the result from the response; its ValueError means a malformed reply."""
        self.id = state.id
        self.what = what
        self._connection = connection
        self._state = state
        self._parse = parse
        self._ends = time.monotonic() + connection.deadline

    @property
    def settled(self) -> bool:
        """Whether the last poll found the operation done or failed."""
        return self._state.status in ("done", "error")

    async def result(self) -> T:
        """The operation's result.

        Raises RemoteError when the operation failed, when the service can't be reached, or, with
        the code `timeout`, at the deadline.
        """
        await self.settle()
        if self._state.status == "error":
            raise self._failed()
        try:
            return self._parse(self._state.response)
        except (ValueError, TypeError) as error:
            raise RemoteError(
                f"{self.what}: can't read the result of the finished operation: {error}",
                code="malformed",
                may_have_acted=True,
                request_id=self.id,
            ) from error

    async def settle(self) -> None:
        """Wait until the operation is done or failed.

        Raises RemoteError when the service can't be reached, or at the deadline.
        """
        began = reported = time.monotonic()
        polls = lost = 0
        while not self.settled:
            pause = self._connection.pace.pause(polls)
            now = time.monotonic()
            if now + pause > self._ends:
                raise self._late()
            if now - reported > REPORT_EVERY:
                reported = now
                waits = self._state.waiting_for or self._state.status
                log.warning("%s: still waiting after %.0f s (%s)", self.what, now - began, waits)
            await asyncio.sleep(pause)
            polls += 1
            found = await self._poll(may_be_lost=lost < LOST_POLLS)
            lost = 0 if found else lost + 1

    async def _poll(self, *, may_be_lost: bool) -> bool:
        call = Call("GET", f"api/v1/operations/{self.id}")
        try:
            async with asyncio.timeout(max(self._ends - time.monotonic(), 0.0)):
                self._state = await self._connection.http.send(call, _operation)
        except TimeoutError:
            raise self._late() from None
        except RemoteError as error:
            # The service reports a lost connection to its own store as "not found".
            if may_be_lost and error.status == 404 and "connection" in str(error).lower():
                return False
            raise
        return True

    def _late(self) -> RemoteError:
        waits = self._state.waiting_for
        return RemoteError(
            f"{self.what} is still {self._state.status} after {self._connection.deadline:g} s"
            + (f": {waits}" if waits else ""),
            code="timeout",
            retryable=True,
            may_have_acted=True,
            request_id=self.id,
        )

    def _failed(self) -> RemoteError:
        facts = self._state.error
        stage = wire.read(facts["details"], "stage")
        return RemoteError(
            f"{self.what} failed{f' in {stage}' if stage else ''}: {facts['message']}",
            code=facts["code"],
            retryable=facts["retryable"],
            may_have_acted=True,
            request_id=self.id,
        )


@dataclass(frozen=True, slots=True)
class WeaverConnection:
    """What the objects of one client share."""

    http: HttpClient
    deadline: float = 3600.0
    """Seconds that one operation may take."""
    pace: RetryPolicy = PACE
    resend: bool = False
    """The service recognises a repeated seq_id, so a training call may be sent again."""

    async def call(
        self, method: str, path: str, payload: Any = None, parse: Callable[[Any], T] | None = None
    ) -> T:
        """`parse` of the reply's JSON.

        A lost reply, or one that isn't JSON, is asked for again; only without `parse` may it be
        empty. One that `parse` can't read is a RemoteError at once: the service has acted, and
        might create a second session or model.
        """

        def read(response: httpx.Response) -> Any:
            empty = parse is None and not response.content.strip()
            return None if empty else json.loads(response.content)

        where = f"api/v1/{path}"
        call = Call(method, where) if payload is None else Call.json(method, where, payload)
        reply = await self.http.send(call, read)
        try:
            return parse(reply) if parse is not None else reply
        except (ValueError, KeyError, TypeError) as error:
            raise RemoteError(
                f"{method} {where}: the reply can't be read: {error}",
                code="malformed",
                may_have_acted=True,
            ) from error

    async def submit(
        self,
        path: str,
        payload: Mapping[str, Any],
        parse: Callable[[Any], T],
        *,
        what: str,
        idempotent: bool = True,
    ) -> Operation[T]:
        """The operation that a POST of `payload` starts; `parse` reads its result.

        Raises ValueError on NaN and infinity, which JSON can't represent.
        """
        call = Call.json("POST", f"api/v1/{path}", payload, idempotent=idempotent)
        return Operation(self, await self.http.send(call, _operation), parse, what=what)


async def or_undo(make: Coroutine[Any, Any, T], undo: Callable[[T], Awaitable[object]]) -> T:
    """The result of `make`; if cancelled while it runs, `undo` what it makes."""
    making = asyncio.ensure_future(make)
    try:
        return await asyncio.shield(making)
    except asyncio.CancelledError:

        async def undo_made() -> None:
            await undo(await making)

        await clean_up(undo_made())
        making.cancel()
        raise


async def clean_up(ending: Awaitable[object]) -> None:
    """Await `ending` for at most `CLEAN_UP` seconds, even while being cancelled.

    A failure is only logged: the service ends a silent session by itself.
    """
    with anyio.move_on_after(CLEAN_UP, shield=True):
        try:
            await ending
        except RemoteError as error:
            log.warning("could not clean up on the service: %s", error)
