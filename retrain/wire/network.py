"""The network under an `httpx.AsyncClient`: aiohttp's connections behind httpx's transport face.

httpx's own connection pool spends its time on itself once 300 requests are in flight; aiohttp's
serves thousands. This module imports both libraries, so it is imported when a client is opened.
"""

from __future__ import annotations

import re
import ssl
import urllib.parse
import urllib.request
from typing import Any

import aiohttp
import httpx
from multidict import CIMultiDict

from retrain.errors import ConfigError

KEEPALIVE = 4.0
"""Seconds that an idle connection is kept: below the 5 s after which uvicorn closes its end."""
MAX_CONNECTIONS = 1000
"""Connections of one transport."""
CONNECT = 10.0
"""Seconds that opening a connection may take."""
TIMEOUT = httpx.Timeout(None, connect=CONNECT)
"""Of one request; `HttpClient` limits the time of a whole attempt."""
UNSENT = (
    httpx.ConnectError,
    httpx.ConnectTimeout,
    httpx.InvalidURL,
    httpx.PoolTimeout,
    httpx.ProxyError,
    httpx.UnsupportedProtocol,
)
"""Errors after which no byte of the request can have reached the service."""
_AS_HTTPX: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ClientHttpProxyError, httpx.ProxyError),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.InvalidURL, httpx.UnsupportedProtocol),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (aiohttp.ServerDisconnectedError, httpx.RemoteProtocolError),
    (Exception, httpx.ReadError),
)
"""aiohttp's errors as httpx's; the first row that fits decides."""
_HIDDEN = re.compile(r"(?<=//)[^/@\s]*@| ssl:(?:<[^>]*>|\S+)")
"""What an error does not show: the credentials of a proxy, and the client's setting of TLS."""


class NetworkTransport(httpx.AsyncBaseTransport):
    """HTTP/1.1 over aiohttp, with keep-alive; a reply is read whole before it is returned."""

    def __init__(
        self,
        *,
        verify: ssl.SSLContext | None = None,
        proxy: str | None = None,
    ) -> None:
        """`verify` is by default httpx's context: SSL_CERT_FILE or SSL_CERT_DIR, else certifi's."""
        self._verify = verify
        self._proxy = proxy
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        session = self._session or self._open()
        tls = request.url.scheme == "https" or (self._proxy or "").startswith("https:")
        if tls and self._verify is None:
            self._verify = httpx.create_ssl_context()
        headers = CIMultiDict([(k.decode(), v.decode("latin-1")) for k, v in request.headers.raw])
        try:
            async with session.request(
                request.method,
                str(request.url),
                headers=headers,
                data=await request.aread() or None,
                allow_redirects=False,
                proxy=self._proxy,
                ssl=self._verify or True,
            ) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, OSError) as error:
            raise _as_httpx(error) from error
        return httpx.Response(reply.status, headers=reply.raw_headers, content=content)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=MAX_CONNECTIONS, keepalive_timeout=KEEPALIVE)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # httpx does it
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT),
        )
        return self._session


def _as_httpx(error: Exception) -> httpx.TransportError:
    kind = next(ours for theirs, ours in _AS_HTTPX if isinstance(error, theirs))
    return kind(_HIDDEN.sub("", str(error)) or type(error).__name__)


class _NoCookies(httpx.Cookies):
    def extract_cookies(self, response: httpx.Response) -> None:
        """Keep none."""


_NO_COOKIES = _NoCookies()


class _Client(httpx.AsyncClient):
    """Without cookies and settings to merge into each request: they cost a third of its CPU."""

    @property  # type: ignore[misc]  # nobody sets them
    def cookies(self) -> httpx.Cookies:
        return _NO_COOKIES

    def build_request(self, method: str, url: httpx.URL | str, **parts: Any) -> httpx.Request:
        """A request of `content`, `headers` and `timeout`."""
        url, content = httpx.URL(url), parts["content"]
        raw = [(name.encode(), value.encode()) for name, value in parts["headers"].items()]
        raw.append((b"Host", url.netloc))
        if content is not None:
            raw.append((b"Content-Length", b"%d" % len(content)))
        request = httpx.Request(
            method,
            url,
            headers=raw,
            stream=httpx.ByteStream(content or b""),
            extensions={"timeout": parts["timeout"].as_dict()},
        )
        request.read()
        return request


def open_client(url: str, transport: httpx.AsyncBaseTransport | None) -> httpx.AsyncClient:
    """A client of `url` over `transport`, by default over the network or its proxy.

    Raises ConfigError on a proxy of an unknown kind.
    """
    if transport is None:
        proxy = environment_proxy(url)
        try:
            transport = _through(proxy) if proxy else NetworkTransport()
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise ConfigError(f"can't use a proxy that the environment names: {error}") from error
    return _Client(transport=transport)


def environment_proxy(url: str) -> str | None:
    """The proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY, unless NO_PROXY names the host of `url`.

    httpx ignores these variables once a client has a transport.
    """
    parts, found = urllib.parse.urlsplit(url), urllib.request.getproxies()
    proxy = found.get(parts.scheme) or found.get("all")
    if not proxy or any(map(urllib.request.proxy_bypass, (parts.netloc, parts.hostname or ""))):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _through(proxy: str) -> httpx.AsyncBaseTransport:
    if proxy.startswith(("http:", "https:")):
        return NetworkTransport(proxy=proxy)
    # aiohttp has no SOCKS; httpx's own pool has it, where httpx[socks] is installed.
    limits = httpx.Limits(max_connections=MAX_CONNECTIONS, keepalive_expiry=KEEPALIVE)
    return httpx.AsyncHTTPTransport(proxy=proxy, limits=limits)
