"""HttpClient: calls to one service over an `httpx.AsyncClient`, retried by rule, with deadlines.

- A call is sent again only if the service can't have acted on it (refused connection, 429) or if
  the call is idempotent; otherwise it fails at once (`RemoteError.may_have_acted`).
- Each attempt and the whole call have a time limit (`Call.timeout`, `RetryPolicy.total`). Of a
  given httpx client they replace its own timeouts.
- Secrets are sent as headers and never appear in a repr, a log or an error.
"""

from __future__ import annotations

import asyncio
import json
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.errors import ConfigError, install_command
from retrain.wire.refusals import RemoteError, error_body, refused
from retrain.wire.retries import Outlook, RetryBudget, RetryPolicy
from retrain.wire.vendors import Vendor, checked_url

if TYPE_CHECKING:
    import httpx

T = TypeVar("T")
log = logging.getLogger(__name__)

LOUD_ATTEMPT = 3
"""From this failed attempt in a row on, a warning may be logged."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request; `path` is relative to the client's base URL."""

    method: str
    path: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    idempotent: bool = True
    """Sending it twice has the effect of sending it once."""
    timeout: float = 60.0
    """Seconds that one attempt may take."""
    policy: RetryPolicy | None = None
    """By default the client's."""
    accept: frozenset[int] = frozenset()
    """Statuses whose replies `decode` reads, beside those below 300."""

    @classmethod
    def json(cls, method: str, path: str, payload: Any, **rest: Any) -> Call:
        """A call with a JSON body; `rest` are further fields. Raises ValueError on NaN."""
        body = json.dumps(payload, separators=(",", ":"), allow_nan=False).encode()
        headers = {"Content-Type": "application/json", **rest.pop("headers", {})}
        return cls(method, path, body=body, headers=headers, **rest)


class HttpClient:
    """Sends calls to one service. An async context manager: leaving closes its connections."""

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        secrets: Mapping[str, str] | None = None,
        policy: RetryPolicy | None = None,
        http: httpx.AsyncClient | httpx.AsyncBaseTransport | None = None,
        vendor: Vendor | None = None,
        outlook: Outlook | None = None,
    ) -> None:
        """Connects to nothing yet.

        Raises ConfigError on a URL that is not http(s) or that holds a password.

        Args:
            secrets: further headers (API keys), whose values are kept out of every message.
            http: carries the requests in place of aiohttp's connections: a client, which stays
                open, or a transport, which is closed with this client.
            vendor: whose protocol the service should speak, for messages.
            outlook: by default that of a service that may not exist.
        """
        self.url = checked_url(url)
        self.policy = policy or RetryPolicy()
        self.secrets = dict(secrets or {})
        """Header name -> value; a renewed token is written here, and hidden (`hide`)."""
        self.refresh: Callable[[], Awaitable[None]] | None = None
        """Renews an expired token; awaited once per call, when the service says `invalid_token`."""
        self._outlook = outlook or Outlook()
        self._vendor = vendor
        self._hidden: set[str] = set()
        for secret in self.secrets.values():
            self.hide(secret)
        self._headers = dict(headers or {})
        try:
            import httpx

            from retrain.wire import network
        except ImportError as error:
            raise ConfigError(
                f"calling a service needs {error.name}, which is not installed: "
                f"{install_command('remote')}"
            ) from error
        self._owns_http = not isinstance(http, httpx.AsyncClient)
        if isinstance(http, httpx.AsyncClient):
            self._http = http
        else:
            self._http = network.open_client(self.url, http)
        self._unsent = network.UNSENT
        self._timeout = network.TIMEOUT
        self._url_of = lru_cache(maxsize=64)(lambda path: httpx.URL(f"{self.url}/{path}"))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    async def __aenter__(self) -> HttpClient:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close every connection, unless they belong to a client that was given."""
        if self._owns_http:
            await self._http.aclose()

    def hide(self, secret: str) -> None:
        """Keep `secret` out of every message from now on."""
        self._hidden |= {secret, secret.removeprefix("Bearer ")} - {""}

    def retry_budget(self, policy: RetryPolicy | None = None) -> RetryBudget:
        """The budget of a call that begins now."""
        return RetryBudget(policy or self.policy, self._outlook)

    def stop_retrying(self) -> None:
        """Retry no call for longer than `SHORT` seconds from now on."""
        self._outlook.stopping_since = min(self._outlook.stopping_since, time.monotonic())

    async def send(self, call: Call, decode: Callable[[httpx.Response], T]) -> T:
        """`decode` of the first good reply (status below 300).

        A ValueError of `decode` counts as a malformed reply, or as a lost one if the reply is
        empty. Raises RemoteError when the service refuses the call, or when attempts or time have
        run out.
        """
        budget = self.retry_budget(call.policy)
        refreshed = False
        while True:
            try:
                return await self._attempt(call, decode, budget.left)
            except RemoteError as error:
                own_key = self.secrets.keys() & call.headers.keys()  # as the renewal itself has
                expired = error.code == "invalid_token" and not own_key
                if expired and self.refresh and not refreshed:
                    refreshed = True
                    await self.refresh()
                    continue
                pause = budget.pause(error, safe=call.idempotent or not error.may_have_acted)
                loud = budget.failures >= LOUD_ATTEMPT and self._outlook.may_warn()
                level = logging.WARNING if loud else logging.DEBUG
                log.log(level, "%s; trying again for up to %.0f s", error, budget.left)
                await asyncio.sleep(pause)

    async def _attempt(self, call: Call, decode: Callable[[httpx.Response], T], left: float) -> T:
        what = f"{call.method} {call.path}"
        response = await self._exchange(call, what, min(call.timeout, max(left, 0.001)))
        if response.status_code >= 300 and response.status_code not in call.accept:
            raise self._refused(what, response)
        try:
            decoded = decode(response)
        except (ValueError, KeyError, TypeError) as error:
            why = f"no {error}" if isinstance(error, KeyError) else str(error)
            lost = not response.content.strip()
            problem = "it is empty" if lost else self._redacted(why)
            raise RemoteError(
                f"{what}: can't read the reply of {self.url}: {problem}{self._doubt()}",
                code="disconnect" if lost else "malformed",
                retryable=True,
                may_have_acted=True,
            ) from error
        self._outlook.reached = True
        return decoded

    async def _exchange(self, call: Call, what: str, limit: float) -> httpx.Response:
        import httpx

        try:
            async with asyncio.timeout(limit):
                request = self._http.build_request(
                    call.method,
                    self._url_of(call.path),
                    content=call.body,
                    headers={**self._headers, **self.secrets, **call.headers},
                    timeout=self._timeout,
                )
                return await self._http.send(request, follow_redirects=False)
        except TimeoutError as error:
            message = f"{what}: {self.url} did not answer within {limit:g} s"
            raise RemoteError(
                message, code="timeout", retryable=True, may_have_acted=True
            ) from error
        except (httpx.RequestError, httpx.InvalidURL) as error:
            raise self._unreachable(what, error) from error

    def _unreachable(self, what: str, error: Exception) -> RemoteError:
        sent = not isinstance(error, self._unsent)
        verb, code = ("lost", "disconnect") if sent else ("could not reach", "connect")
        detail = self._redacted(str(error) or type(error).__name__)
        # A first connection without TLS, or to another name, fails the same way every time.
        final = not sent and not self._outlook.reached and _is_tls(error)
        return RemoteError(
            f"{what}: {verb} {self.url}: {detail}",
            code=code,
            retryable=not final,
            may_have_acted=sent,
        )

    def _refused(self, what: str, response: httpx.Response) -> RemoteError:
        body = error_body(response.content)
        advice = ""
        if response.status_code in (401, 403):
            advice = "; check the API key"
            if self._vendor and not self.secrets:
                advice = f"; {self._vendor.key_variable} is not set"
        elif body.html:
            advice = self._doubt()
        message = self._redacted(body.message) or "nothing"
        return refused(f"{what}: {self.url} answered: {message}{advice}", response, body)

    def _doubt(self) -> str:
        return f"; is this a {self._vendor.name} server?" if self._vendor else ""

    def _redacted(self, text: str) -> str:
        for secret in self._hidden:
            text = text.replace(secret, "***")
        return text


def _is_tls(error: BaseException | None) -> bool:
    """Whether a failed TLS handshake is the cause."""
    while error is not None and not isinstance(error, ssl.SSLError):
        error = error.__cause__ or error.__context__
    return error is not None
