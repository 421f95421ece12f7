"""How one request travels: over the network by aiohttp, or through an httpx transport.

The network's way uses aiohttp's client itself: carried by httpx objects, a request costs twice the
CPU, and httpx's own pool collapses near 300 requests in flight. An `httpx.AsyncBaseTransport` that
a caller brings (`httpx.ASGITransport(app)`, a test's) is served as well.
"""

from __future__ import annotations

import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from retrain.errors import ConfigError

if TYPE_CHECKING:
    import aiohttp
    import httpx

KEEPALIVE = 4.0
"""Seconds that an idle connection is kept: below the 5 s after which uvicorn closes its end."""
CONNECT = 10.0
"""Seconds that opening a connection may take."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What came back, whole."""

    status_code: int
    headers: Mapping[str, str]
    """Looked up in any case."""
    content: bytes


class Lost(Exception):
    """No reply came."""

    def __init__(self, detail: str, *, sent: bool, final: bool = False) -> None:
        super().__init__(detail)
        self.sent = sent
        """False when no byte of the request can have reached the service."""
        self.final = final
        """Another attempt would end like this one: no TLS is spoken there, or a wrong name."""


class Exchange(Protocol):
    async def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        """The reply, redirects and refusals included; raises Lost when none came."""
        ...

    async def close(self) -> None: ...


class NetworkExchange:
    """Connections to one host, opened when they are needed and kept for a while."""

    def __init__(self, url: str, max_connections: int) -> None:
        """Raises ConfigError when the `remote` extra is not installed."""
        _require_remote_extra()
        self._https = url.startswith("https:")
        self._proxy = _proxy(url)
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        import aiohttp

        session = self._session or self._open()
        unsent = (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError, aiohttp.InvalidURL)
        try:
            async with session.request(
                method, url, headers=headers, data=body, allow_redirects=False, proxy=self._proxy
            ) as reply:
                return Reply(reply.status, reply.headers, await reply.read())
        except (aiohttp.ClientError, OSError) as error:
            detail = str(error) or type(error).__name__
            sent = not isinstance(error, unsent)
            final = isinstance(error, aiohttp.ClientSSLError)
            raise Lost(detail, sent=sent, final=final) from error

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp
        import httpx

        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=self._max_connections,
                keepalive_timeout=KEEPALIVE,
                ssl=httpx.create_ssl_context() if self._https else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            # The transport sets the limits of a whole attempt.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        )
        return self._session


class HttpxExchange:
    """The face above on a transport of httpx."""

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def send(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None
    ) -> Reply:
        import httpx

        unsent = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.InvalidURL)
        try:
            request = httpx.Request(method, url, headers=dict(headers), content=body)
            response = await self._transport.handle_async_request(request)
            try:
                content = await response.aread()
            finally:
                await response.aclose()
        except (httpx.RequestError, httpx.InvalidURL) as error:
            detail = str(error) or type(error).__name__
            raise Lost(detail, sent=not isinstance(error, unsent)) from error
        return Reply(response.status_code, response.headers, content)

    async def close(self) -> None:
        await self._transport.aclose()


def _require_remote_extra() -> None:
    try:
        import aiohttp
        import httpx
    except ImportError as error:
        raise ConfigError(
            f"a remote backend needs {error.name}, which is not installed: "
            "pip install 'retrain[remote]'"
        ) from error
    del aiohttp, httpx


def _proxy(url: str) -> str | None:
    """The environment's proxy; looked up once, where aiohttp would do so for each request."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and urllib.request.proxy_bypass(parts.hostname or ""):
        return None
    return proxy
