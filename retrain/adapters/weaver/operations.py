"""Operations: what Weaver answers to anything slow. Submitted by POST, then asked about by GET.

- The first look comes soon and the pauses grow (`Pace`): a short step is not held up, and a long
  queue costs few requests.
- A wait ends: with the result, with the operation's error, or with its deadline.
- An operation is never submitted again from here. A failed one may have changed half a state, and
  whether to go on is for the caller to say.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from retrain.adapters.weaver import wire
from retrain.transport.client import Call, HttpClient
from retrain.transport.refusals import RemoteError

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
log = logging.getLogger(__name__)

TELL_AFTER = 30.0
"""Seconds of waiting after which the log says what the service waits for."""
TELL_EVERY = 60.0
LOST_LOOKS = 20
"""Looks in a row that may find the operation's store unreachable."""
USER_CODES = ("invalid", "unsupported", "quota", "unauthorized", "forbidden")
"""Words in an error code that put the fault on our side."""


@dataclass(frozen=True, slots=True)
class Pace:
    """The pauses between looks at an operation, in seconds."""

    first: float = 0.02
    factor: float = 1.5
    cap: float = 2.0

    def pause(self, look: int) -> float:
        """Before look number `look` (from 0)."""
        return float(min(self.first * self.factor ** min(look, 64), self.cap))


class Operation(Generic[T]):
    """One submitted operation; `result` waits for it, as often as asked."""

    def __init__(
        self,
        http: HttpClient,
        state: wire.OperationState,
        parse: Callable[[Any], T],
        *,
        what: str,
        deadline: float,
        pace: Pace,
    ) -> None:
        """`parse` makes the result of a response; its ValueError is a malformed reply."""
        self.id = state.id
        self.what = what
        self._http = http
        self._state = state
        self._parse = parse
        self._deadline = deadline
        self._ends = time.monotonic() + deadline
        self._pace = pace

    def __repr__(self) -> str:
        return f"Operation({self.what!r}, id={self.id!r}, {self._state.status})"

    @property
    def settled(self) -> bool:
        """Whether the service has finished it, well or badly, as far as we know."""
        return self._state.status in ("done", "error")

    async def result(self) -> T:
        """What the operation gave.

        Raises RemoteError when it failed, when the service can't be reached, or with the code
        `timeout` when it isn't done before its deadline.
        """
        await self.settle()
        if self._state.status == "error":
            raise self._failed()
        try:
            return self._parse(self._state.response)
        except (ValueError, TypeError) as error:
            raise RemoteError(
                f"{self.what}: the operation is done, but its result can't be read: {error}",
                code="malformed",
                may_have_acted=True,
                request_id=self.id,
                fault="server",
            ) from error

    async def settle(self) -> None:
        """Wait until the operation is done or failed; raises RemoteError as `result` does."""
        began = told = time.monotonic()
        look = lost = 0
        while not self.settled:
            pause = self._pace.pause(look)
            now = time.monotonic()
            if now + pause > self._ends:
                raise self._late()
            if now - began > TELL_AFTER and now - told > TELL_EVERY:
                told = now
                waits = self._state.waiting_for or self._state.status
                log.warning("%s: waiting for %.0f s (%s)", self.what, now - began, waits)
            await asyncio.sleep(pause)
            look += 1
            found = await self._look(may_be_lost=lost < LOST_LOOKS)
            lost = 0 if found else lost + 1

    async def _look(self, *, may_be_lost: bool) -> bool:
        call = Call("GET", f"api/v1/operations/{self.id}")
        try:
            async with asyncio.timeout_at(self._loop_deadline()):
                self._state = await self._http.send(call, decode_operation)
        except TimeoutError:
            raise self._late() from None
        except RemoteError as error:
            # The service reports a lost connection to its own store as "not found".
            if may_be_lost and error.status == 404 and "connection" in str(error).lower():
                return False
            raise
        return True

    def _loop_deadline(self) -> float:
        return asyncio.get_running_loop().time() + max(self._ends - time.monotonic(), 0.0)

    def _late(self) -> RemoteError:
        waits = self._state.waiting_for
        return RemoteError(
            f"{self.what} is still {self._state.status} after {self._deadline:g} s"
            + (f": {waits}" if waits else ""),
            code="timeout",
            retryable=True,
            may_have_acted=True,
            request_id=self.id,
            fault="server",
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
            fault="user" if any(word in facts["code"] for word in USER_CODES) else "server",
        )


def decode_json(response: httpx.Response) -> Any:
    """The reply's JSON value, {} for an empty body."""
    return json.loads(response.content) if response.content.strip() else {}


def decode_operation(response: httpx.Response) -> wire.OperationState:
    return wire.operation(decode_json(response))
