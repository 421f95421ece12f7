"""The HTTP transport of the remote adapters: one typed call, retried by rule, inside a deadline.

- A call is sent again only if the service can't have acted on it (refused connection, 429) or if
  its caller marked it idempotent; everything else fails at once (`RemoteError.may_have_acted`).
- Each attempt and the whole call have a time limit (`Call.timeout`, `RetryPolicy.total`). A service
  that never gave a good reply is given up soon (`SHORT`): the address is likely wrong.
- Secrets are sent as headers and never appear in a repr, a log or an error (`_redacted`).

How a request travels is the matter of exchange.py, what a refusal says that of refusals.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.errors import AdapterError
from retrain.transport.exchange import Exchange, HttpxExchange, Lost, NetworkExchange, Reply
from retrain.transport.refusals import Fault, error_body, retry_after
from retrain.transport.vendors import Vendor, checked_url

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
log = logging.getLogger(__name__)

MAX_RETRY_AFTER = 60.0
"""Seconds; a service that asks for a longer pause is asked again after this one."""


class RemoteError(AdapterError):
    """A service refused a call, failed it, or could not be reached."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str = "",
        retryable: bool = False,
        may_have_acted: bool = False,
        request_id: str = "",
        fault: Fault = "unknown",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; None when no reply came, or when a job failed behind a good reply."""
        self.code = code
        """`timeout`, `connect`, `disconnect`, `malformed`, or the service's own word."""
        self.retryable = retryable
        """The same call may succeed later."""
        self.may_have_acted = may_have_acted
        """The service may have done what was asked: only an idempotent call is sent again."""
        self.request_id = request_id
        """The service's name of the request, for its support; empty when it gave none."""
        self.fault = fault
        self.retry_after = retry_after
        """Seconds the service asked to wait; None when it did not."""

    def __str__(self) -> str:
        facts = [str(self.status) if self.status else "", self.code]
        facts += [f"request {self.request_id}" if self.request_id else ""]
        known = ", ".join(fact for fact in facts if fact)
        return f"{self.args[0]} [{known}]" if known else str(self.args[0])


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How long, and after which pauses, a call is sent again."""

    attempts: int | None = None
    """None: as many as `total` leaves time for."""
    first: float = 0.5
    """Seconds before the second attempt; doubled each time, with 25 % of jitter."""
    cap: float = 10.0
    total: float = 300.0
    """Seconds that all attempts of one call may take together."""

    def pause(self, attempt: int, asked: float | None = None) -> float:
        """Seconds to wait after attempt number `attempt` (from 0)."""
        if asked is not None:
            return min(max(asked, 0.0), MAX_RETRY_AFTER)
        doubled: float = self.first * 2.0 ** min(attempt, 30)
        return min(doubled, self.cap) * random.uniform(0.75, 1.25)


class Patience:
    """The failures of a call that begins now, and whether a further attempt is worth it."""

    def __init__(self, transport: Transport, policy: RetryPolicy) -> None:
        self.failures = 0
        self._transport = transport
        self._policy = policy
        self._began = time.monotonic()
        total = policy.total if transport.reached else min(policy.total, SHORT)
        self._ends = self._began + total

    @property
    def left(self) -> float:
        """Seconds."""
        in_a_hurry = max(self._began, self._transport.hurried_at) + SHORT
        return min(self._ends, in_a_hurry) - time.monotonic()

    def pause(self, error: RemoteError, *, safe: bool = True) -> float:
        """Seconds to the next attempt; raises `error` where none can help, or none is `safe`."""
        pause = self._policy.pause(self.failures, error.retry_after)
        self.failures += 1
        most = self._policy.attempts or math.inf
        if error.code == "malformed":
            most = min(most, MALFORMED_ATTEMPTS)
        if error.retryable and safe and self.failures < most and pause < self.left:
            return pause
        if self.failures > 1:
            error.add_note(f"gave up after {self.failures} attempts")
        raise error


NO_RETRY = RetryPolicy(attempts=1)
SHORT = 20.0
"""Seconds until a service is given up that never gave a good reply, or when the run is to stop."""
MALFORMED_ATTEMPTS = 3
"""A torn reply comes whole the next time; one in another form never does."""
LOUD_ATTEMPT = 4
"""The failed attempt in a row that a user is told of."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `path` is relative to the transport's base URL."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True
    """Sending it twice has the effect of sending it once."""
    timeout: float = 60.0
    """Seconds that one attempt may take."""
    policy: RetryPolicy | None = None
    """By default the transport's."""
    accept: frozenset[int] = frozenset()
    """Statuses whose replies `decode` reads, beside those below 300."""

    @classmethod
    def json(cls, method: str, path: str, payload: Any, **rest: Any) -> Call:
        """A call with a JSON body; `rest` are further fields. NaN and infinity are refused."""
        body = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
        headers = {"Content-Type": "application/json", **rest.pop("headers", {})}
        return cls(method, path, body=body, headers=headers, **rest)


class Transport:
    """Sends calls to one service. An async context manager: leaving closes its connections."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
        vendor: Vendor | None = None,
        max_connections: int = 1000,
    ) -> None:
        """`secrets` are headers too (API keys), kept out of every message.

        `vendor` says in messages whose protocol the service should speak. Raises ConfigError on a
        URL that is not http(s) or that holds a password.
        """
        self.url = checked_url(url)
        self.policy = policy or RetryPolicy()
        self.secrets = dict(secrets or {})
        """Header name -> value; a renewed token is written here, and hidden (`hide`)."""
        self.refresh: Callable[[], Awaitable[None]] | None = None
        """Renews an expired token; awaited once a call, when the service says `invalid_token`."""
        self.retries: Counter[str] = Counter()
        """Attempts that were repeated, by code or status."""
        self.reached = False
        """Whether the service has given a good reply."""
        self.hurried_at = math.inf
        """When `hurry` was called, by `time.monotonic`."""
        self._vendor = vendor
        self._hidden: set[str] = set()
        for secret in self.secrets.values():
            self.hide(secret)
        self._headers = dict(headers or {})
        self._exchange: Exchange = (
            HttpxExchange(transport) if transport else NetworkExchange(self.url, max_connections)
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> Transport:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection."""
        await self._exchange.close()

    def hide(self, secret: str) -> None:
        """Keep `secret` out of every message from now on."""
        self._hidden |= {secret, secret.removeprefix("Bearer ")} - {""}

    async def send(self, call: Call, decode: Callable[[Reply], T]) -> T:
        """`decode` of the first good reply (status below 300).

        A ValueError of `decode` counts as a malformed reply. Raises RemoteError when the service
        refuses the call, or when attempts or time have run out.
        """
        patience = Patience(self, call.policy or self.policy)
        refreshed = False
        while True:
            try:
                return await self._attempt(call, decode, patience.left)
            except RemoteError as error:
                own_key = self.secrets.keys() & call.headers.keys()  # as the renewal itself has
                expired = error.code == "invalid_token" and not own_key
                if expired and self.refresh and not refreshed:
                    refreshed = True
                    await self.refresh()
                    continue
                pause = patience.pause(error, safe=call.idempotent or not error.may_have_acted)
                self.retries[error.code or str(error.status)] += 1
                loud = patience.failures == LOUD_ATTEMPT
                level = logging.WARNING if loud else logging.DEBUG
                log.log(level, "%s; trying again for up to %.0f s", error, patience.left)
                await asyncio.sleep(pause)

    def hurry(self) -> None:
        """Outlast no failures for long any more, those under way neither."""
        self.hurried_at = min(self.hurried_at, time.monotonic())

    async def _attempt(self, call: Call, decode: Callable[[Reply], T], left: float) -> T:
        limit = min(call.timeout, max(left, 0.001))
        what = f"{call.method} {call.path}"
        try:
            async with asyncio.timeout(limit):
                headers = {**self._headers, **self.secrets, **call.headers}
                url = f"{self.url}/{call.path}"
                response = await self._exchange.send(call.method, url, headers, call.body)
        except (TimeoutError, Lost) as error:
            raise self._unreachable(what, error, limit) from error
        if response.status_code >= 300 and response.status_code not in call.accept:
            raise self._refused(what, response)
        try:
            decoded = decode(response)
        except (ValueError, KeyError, TypeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            raise RemoteError(
                f"{what}: {self.url} sent a reply that can't be read: {self._redacted(why)}"
                f"{self._doubt()}",
                code="malformed",
                retryable=True,
                may_have_acted=True,
                fault="server",
            ) from error
        self.reached = True
        return decoded

    def _unreachable(self, what: str, error: TimeoutError | Lost, limit: float) -> RemoteError:
        if isinstance(error, TimeoutError):
            message = f"{what}: {self.url} did not answer within {limit:g} s"
            return RemoteError(message, code="timeout", retryable=True, may_have_acted=True)
        verb, code = ("lost", "disconnect") if error.sent else ("could not reach", "connect")
        message = f"{what}: {verb} {self.url}: {self._redacted(str(error))}"
        again = self.reached or not error.final
        return RemoteError(message, code=code, retryable=again, may_have_acted=error.sent)

    def _refused(self, what: str, response: Reply) -> RemoteError:
        body = error_body(response.content)
        status = response.status_code
        headers = response.headers
        broken = status == 408 or (status >= 500 and status != 501)  # 501: it doesn't know the call
        retryable = broken or status in (425, 429)
        if body.retryable is not None:
            retryable = body.retryable
        if "x-should-retry" in headers:
            retryable = headers["x-should-retry"] == "true"
        # A service that says "503, try again" turned the call away before it did anything.
        turned_away = status == 503 and body.retryable is True
        code = body.code
        if 'error="invalid_token"' in headers.get("www-authenticate", ""):
            code = "invalid_token"
        advice = self._about_key() if status in (401, 403) else self._doubt() if body.html else ""
        return RemoteError(
            f"{what}: {self.url} answered: {self._redacted(body.message) or 'nothing'}{advice}",
            status=status,
            code=code,
            retryable=retryable,
            may_have_acted=broken and not turned_away,
            request_id=headers.get("x-request-id") or headers.get("request-id") or body.request_id,
            fault=body.fault or ("server" if broken else "user"),
            retry_after=body.retry_after if (asked := retry_after(headers)) is None else asked,
        )

    def _doubt(self) -> str:
        """What to ask a user whose service says something else."""
        return f"; is this a {self._vendor.name} server?" if self._vendor else ""

    def _about_key(self) -> str:
        if self._vendor and not self.secrets:
            return f"; {self._vendor.key_variable} is not set"
        return "; check the API key"

    def _redacted(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return text
