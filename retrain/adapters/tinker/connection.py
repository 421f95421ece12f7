"""Calls to one Tinker service, and the results of the jobs that they start.

A job is submitted by a POST, which returns a request id; `Future` then polls for the result. Every
wait has a deadline, a queue that the service reports is logged, and a sample that nobody waits for
any more is cancelled if the service supports it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import time
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeVar

from retrain.adapters.tinker.limits import Backpressure
from retrain.errors import DeadlineError
from retrain.wire.client import Call, HttpClient
from retrain.wire.refusals import RemoteError, error_body
from retrain.wire.retries import NO_RETRY
from retrain.wire.tinker.messages import PROTOBUF

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
Wire = Literal["proto", "json"]
log = logging.getLogger(__name__)

POLL_TIMEOUT = 45.0
"""Seconds; the service answers a poll within about 30."""
PATIENT: frozenset[int | str | None] = frozenset({402, 429, "timeout"})
"""No payment, no capacity, or a poll that the service held for longer than we waited: only the
deadline of a job ends its polls."""
REPORT_AFTER = 60.0
"""Seconds between two log lines about a job that is still waiting."""


@dataclass(frozen=True, slots=True)
class Flags:
    """The settings in `client/config` and `client/dynamic_config`; defaults for servers without."""

    pjwt_auth_enabled: bool = False
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    sample_max_concurrent_requests: int = 2000
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    sample_cancel_enabled: bool = False

    @classmethod
    def read(cls, *bodies: Mapping[str, Any]) -> Flags:
        """The settings known here; other names and values of another type are ignored."""
        merged = {name: value for body in bodies for name, value in body.items()}
        known = {f.name: type(f.default) for f in fields(cls)}
        return cls(**{n: merged[n] for n, kind in known.items() if type(merged.get(n)) is kind})


@dataclass(frozen=True, slots=True)
class JobKind(Generic[T]):
    """A kind of job: its name in the poll's header, and the decoders of its result."""

    name: str
    from_json: Callable[[Mapping[str, Any]], T]
    from_proto: Callable[[bytes], T] | None = None


@dataclass(frozen=True, slots=True)
class _Pending:
    """The job is waiting or running."""

    queue_state: str = "active"
    reason: str = ""


class TinkerConnection:
    """What the objects of one client share."""

    def __init__(self, http: HttpClient, *, wire: Wire, result_timeout: float) -> None:
        self.http = http
        self.wire: Wire = wire
        self.result_timeout = result_timeout
        """Seconds that a job may take, unless a call has its own timeout."""
        self.configure(Flags())
        self._clean_up: set[asyncio.Task[None]] = set()

    def configure(self, flags: Flags) -> None:
        """Apply the service's settings."""
        self.flags = flags
        self.backpressure = Backpressure(
            flags.sample_max_concurrent_requests, flags.sample_dispatch_bytes_semaphore_size
        )

    async def post(
        self, endpoint: str, payload: Mapping[str, Any], *needed: str, **rest: Any
    ) -> dict[str, Any]:
        """The JSON reply of an endpoint; `rest` are further fields of `Call`.

        Raises RemoteError with the code `malformed` when a `needed` key is missing.
        """

        def read(reply: httpx.Response) -> dict[str, Any]:
            body = json_object(reply)
            return body | {key: str(body[key]) for key in needed}

        return await self.http.send(_post(endpoint, payload, **rest), read)

    async def submit(self, call: Call, kind: JobKind[T]) -> Future[T]:
        """Submit a job. The call may be sent twice, so it needs a seq_id."""
        request_id = await self.http.send(call, lambda reply: str(json_object(reply)["request_id"]))
        return Future(self, request_id, kind)

    async def submit_json(
        self, endpoint: str, payload: Mapping[str, Any], kind: JobKind[T], **rest: Any
    ) -> Future[T]:
        return await self.submit(_post(endpoint, payload, **rest), kind)

    def cancel(self, request_id: str) -> None:
        """Cancel a sample on the service, if it supports that; `drain` waits for the call."""
        if not self.flags.sample_cancel_enabled:
            return

        async def run() -> None:
            payload = {"request_id": request_id}
            try:
                await self.post("cancel_future", payload, timeout=30.0, policy=NO_RETRY)
            except RemoteError as error:
                log.info("clean-up on the service failed: %s", error)

        task = asyncio.create_task(run())
        self._clean_up.add(task)
        task.add_done_callback(self._clean_up.discard)

    async def drain(self, timeout: float) -> None:
        """Wait up to `timeout` seconds for the clean-up tasks, then cancel them."""
        tasks = list(self._clean_up)
        if tasks:
            await asyncio.wait(tasks, timeout=timeout)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Future(Generic[T]):
    """A job that the service accepted. Await it for its result, any number of times."""

    def __init__(self, connection: TinkerConnection, request_id: str, kind: JobKind[T]) -> None:
        self.request_id = request_id
        self.queue_state = "active"
        """`active`, `paused_capacity` or `paused_rate_limit`, by the last poll."""
        self._connection = connection
        self._kind = kind
        self._result: list[T] = []
        self._reported = 0.0

    def __await__(self) -> Generator[Any, None, T]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> T:
        """The job's result, within `timeout` seconds (by default the connection's; inf: no limit).

        Raises RemoteError when the job failed or was lost, DeadlineError when it is not done in
        time. A sample whose waiter is cancelled or late is cancelled on the service.
        """
        if self._result:
            return self._result[0]
        limit = self._connection.result_timeout if timeout is None else timeout
        started = self._reported = time.monotonic()
        try:
            async with asyncio.timeout(None if limit == math.inf else limit):
                self._result.append(await self._wait(started))
        except (TimeoutError, asyncio.CancelledError) as error:
            if self._kind.name == "Sample":
                self._connection.cancel(self.request_id)
            if isinstance(error, asyncio.CancelledError):
                raise
            raise DeadlineError(
                f"{self._kind.name} {self.request_id} has no result after {limit:g} s "
                f"(queue: {self.queue_state}); {self._connection.http.url} still answers, so "
                "it is slow or overloaded. Raise the deadline, or lower the load."
            ) from error
        return self._result[0]

    async def _wait(self, started: float) -> T:
        iteration = quick = 0
        while True:
            asked = time.monotonic()
            reply = await self._poll(iteration)
            if not isinstance(reply, _Pending):
                return reply
            iteration += 1
            self._report(reply, started)
            # A service that answers polls at once would be polled in a busy loop.
            quick = quick + 1 if time.monotonic() - asked < 0.05 else 0
            if quick:
                await asyncio.sleep(min(0.005 * 2.0 ** min(quick, 10), 1.0))

    async def _poll(self, iteration: int) -> T | _Pending:
        headers = {
            "X-Tinker-Request-Iteration": str(iteration),
            "X-Tinker-Request-Type": self._kind.name,
        }
        if self._kind.from_proto and self._connection.wire == "proto":
            headers["Accept"] = f"{PROTOBUF}, application/json"
        payload = {"request_id": self.request_id, "allow_metadata_only": False}
        call = Call.json(
            "POST",
            "api/v1/retrieve_future",
            payload,
            headers=headers,
            timeout=POLL_TIMEOUT,
            policy=replace(self._connection.http.policy, patient=PATIENT),
            accept=frozenset({400, 408}),
        )
        return await self._connection.http.send(call, self._read)

    def _read(self, response: httpx.Response) -> T | _Pending:
        if response.headers.get("content-type", "").startswith(PROTOBUF):
            if self._kind.from_proto is None:
                raise ValueError(f"{self._kind.name} came as protobuf, expected JSON")
            return self._kind.from_proto(response.content)
        body = self._body(response)
        if response.status_code == 408 or body.get("type") == "try_again":
            return _Pending(
                body.get("queue_state") or "active", body.get("queue_state_reason") or ""
            )
        if body.get("status") == "complete_metadata":
            return _Pending()
        if response.status_code == 400 or "error" in body or "error_message" in body:
            raise self._failed(response)
        return self._kind.from_json(body)

    def _body(self, response: httpx.Response) -> dict[str, Any]:
        try:
            return json_object(response)
        except ValueError:
            if response.status_code < 300:
                raise
            if response.status_code == 408:
                return {}
        # A proxy in front of the service sometimes answers with an empty 400.
        raise RemoteError(
            f"{self._kind.name} {self.request_id}: got a 400 without a JSON body",
            status=400,
            code="bare",
            retryable=True,
        )

    def _failed(self, response: httpx.Response) -> RemoteError:
        body = error_body(response.content)
        return RemoteError(
            f"{self._kind.name} failed on the service: {body.message}",
            status=response.status_code if response.status_code >= 300 else None,
            code=body.code or "job_failed",
            request_id=self.request_id,
        )

    def _report(self, pending: _Pending, started: float) -> None:
        self.queue_state = pending.queue_state
        now = time.monotonic()
        if now - self._reported >= REPORT_AFTER:
            self._reported = now
            why = f" ({pending.reason})" if pending.reason else ""
            log.warning(
                "%s %s has been waiting for %.0f s; queue: %s%s",
                self._kind.name,
                self.request_id,
                now - started,
                pending.queue_state,
                why,
            )


def json_object(response: httpx.Response) -> dict[str, Any]:
    """The reply's JSON object; raises ValueError on anything else."""
    body = json.loads(response.content)
    if not isinstance(body, dict):
        raise ValueError(f"got {type(body).__name__}, expected a JSON object")
    return body


def _post(endpoint: str, payload: Mapping[str, Any], **rest: Any) -> Call:
    """A POST of the keys that are not None: the service's schema rejects null."""
    given = {name: value for name, value in payload.items() if value is not None}
    return Call.json("POST", f"api/v1/{endpoint}", given, **rest)
