"""aiohttp behind httpx's face: proxies and TLS by the environment, and a client of the caller's."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from retrain.errors import ConfigError
from retrain.wire.client import Call, HttpClient
from retrain.wire.network import NetworkTransport, environment_proxy
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import NO_RETRY, RetryPolicy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
VARIABLES = (
    *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"),
    *("SSL_CERT_FILE", "SSL_CERT_DIR"),
)
GET = Call("GET", "x")


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


@asynccontextmanager
async def listening(handle: Handler, tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    server = await asyncio.start_server(handle, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield server.sockets[0].getsockname()[1]


async def service(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nSet-Cookie: a=b\r\n\r\nok")
    writer.close()


class Proxy:
    """A real one: CONNECT opens a tunnel, another method is answered by the proxy itself."""

    def __init__(self, refuse: bytes = b"") -> None:
        self.refuse = refuse
        self.heads: list[str] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        self.heads.append(head)
        method, target, _ = head.split("\r\n")[0].split(" ")
        if self.refuse or method != "CONNECT":
            writer.write(self.refuse or b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nproxy")
            writer.close()
            return
        there = await asyncio.open_connection("127.0.0.1", int(target.rpartition(":")[2]))
        writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await asyncio.gather(self.pump(reader, there[1]), self.pump(there[0], writer))

    async def pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(4096):
            sink.write(data)
            await sink.drain()
        sink.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private authority, and a server and a client certificate signed by it."""
    if shutil.which("openssl") is None:
        pytest.skip("making certificates needs the openssl command")
    folder = tmp_path_factory.mktemp("authority")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    ca = ("-addext", "keyUsage=critical,keyCertSign", "-keyout", "ca.key", "-out", "ca.pem")
    openssl("req", "-x509", *key, "-subj", "/CN=a private authority", "-days", "2", *ca)
    for name in ("server", "client"):
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr")
        openssl("req", "-new", *key, "-subj", f"/CN={name}", *files)
        (folder / "names").write_text("subjectAltName=DNS:localhost,DNS:service.test\n")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2")
        made = ("-in", f"{name}.csr", "-out", f"{name}.pem", "-extfile", "names")
        openssl("x509", "-req", *signing, *made)
    (folder / "hashed").mkdir()
    shutil.copy(folder / "ca.pem", folder / "hashed")
    openssl("rehash", "hashed")
    return folder


def server_side(authority: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(authority / "server.pem", authority / "server.key")
    return context


async def fetched(url: str, **keys: object) -> bytes:
    keys = {"policy": NO_RETRY, **keys}
    async with HttpClient(url, **keys) as client:  # type: ignore[arg-type] - varied
        return await client.send(GET, lambda reply: reply.content)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
async def test_a_private_authority_is_trusted_where_the_environment_names_it(
    variable: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with listening(service, server_side(authority)) as port:
        url = f"https://localhost:{port}"
        with pytest.raises(RemoteError, match="certificate verify failed") as raised:
            await fetched(url, policy=RetryPolicy(first=0.0))
        assert (raised.value.retryable, raised.value.may_have_acted) == (False, False)
        named = "ca.pem" if variable == "SSL_CERT_FILE" else "hashed"
        monkeypatch.setenv(variable, str(authority / named))
        assert await fetched(url) == b"ok"


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "ALL_PROXY"])
async def test_https_goes_through_the_tunnel_of_a_proxy(
    variable: str, authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name resolves nowhere: only the proxy can have made the connection."""
    monkeypatch.setenv("SSL_CERT_FILE", str(authority / "ca.pem"))
    proxy = Proxy()
    async with listening(service, server_side(authority)) as port, listening(proxy) as through:
        monkeypatch.setenv(variable, f"http://user:pass@127.0.0.1:{through}")
        assert await fetched(f"https://service.test:{port}") == b"ok"
    assert proxy.heads[0].startswith(f"CONNECT service.test:{port} HTTP/1.1")
    assert "Proxy-Authorization: Basic dXNlcjpwYXNz" in proxy.heads[0]


async def test_plain_http_goes_to_the_proxy_unless_no_proxy_names_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    proxy = Proxy()
    async with listening(service) as port, listening(proxy) as through:
        monkeypatch.setenv("HTTP_PROXY", f"127.0.0.1:{through}")
        monkeypatch.setenv("NO_PROXY", "elsewhere.test")
        assert await fetched(f"http://127.0.0.1:{port}") == b"proxy"
        monkeypatch.setenv("NO_PROXY", "elsewhere.test, 127.0.0.1")
        assert await fetched(f"http://127.0.0.1:{port}") == b"ok"
    assert proxy.heads[0].startswith(f"GET http://127.0.0.1:{port}/x HTTP/1.1")


async def test_a_tunnel_that_the_proxy_refuses_cannot_have_acted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse = b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n"
    async with listening(Proxy(refuse)) as through:
        monkeypatch.setenv("HTTPS_PROXY", f"http://user:secret@127.0.0.1:{through}")
        with pytest.raises(RemoteError, match="407") as raised:
            await fetched("https://service.test")
    assert (raised.value.code, raised.value.may_have_acted) == ("connect", False)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize(
    ("url", "excluded", "proxy"),
    [
        ("http://x", "", "http://a:1"),
        ("https://x", "", "http://b:2"),
        ("https://x", "*", None),
        ("https://x.a.b:80/y", ".a.b", None),
        ("https://x.a.b:80", "a.b:80", None),
        ("https://a.bc", "a.b, localhost,,", "http://b:2"),
        ("http://[::1]:80", "10.0.0.1,::1", None),
        ("http://[::1]", "[::1]", None),
    ],
)
def test_the_environment_names_the_proxy_of_a_service(
    url: str, excluded: str, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert environment_proxy(url) is None
    for name, value in (("HTTP_PROXY", "http://a:1"), ("ALL_PROXY", "b:2"), ("NO_PROXY", excluded)):
        monkeypatch.setenv(name, value)
    assert environment_proxy(url) == proxy


def test_a_proxy_that_cannot_be_used_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ALL_PROXY", "gopher://here:1")
    with pytest.raises(ConfigError, match="gopher"):
        HttpClient("http://service")


async def test_a_client_of_the_callers_carries_the_requests_and_stays_open() -> None:
    seen: list[httpx.Request] = []

    async def hook(request: httpx.Request) -> None:
        seen.append(request)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(302, headers={"Location": "http://elsewhere"})

    async with httpx.AsyncClient(
        transport=httpx.MockTransport(answer),
        headers={"X-Trace": "t-1"},
        event_hooks={"request": [hook]},
        follow_redirects=True,
        timeout=0.0,
    ) as own:
        with pytest.raises(RemoteError) as raised:
            await fetched("http://service", http=own)
        assert raised.value.status == 302, "a redirect would take the key elsewhere"
        assert not own.is_closed
        assert [r.headers["x-trace"] for r in seen] == ["t-1"]
        assert seen[0].extensions["timeout"]["read"] is None, "calls have limits of their own"


async def test_a_transport_of_the_callers_is_closed_with_the_client() -> None:
    closed: list[bool] = []

    class Own(httpx.MockTransport):
        async def aclose(self) -> None:
            closed.append(True)

    own = Own(lambda request: httpx.Response(200, content=b"mine"))
    assert await fetched("http://service", http=own) == b"mine"
    assert closed == [True]


async def test_mutual_tls_through_a_transport_with_a_context_of_the_callers(
    authority: Path,
) -> None:
    strict = server_side(authority)
    strict.load_verify_locations(authority / "ca.pem")
    strict.verify_mode = ssl.CERT_REQUIRED
    context = ssl.create_default_context(cafile=authority / "ca.pem")
    async with listening(service, strict) as port:
        url = f"https://localhost:{port}"
        with pytest.raises(RemoteError):
            await fetched(url, http=NetworkTransport(verify=context))
        context.load_cert_chain(authority / "client.pem", authority / "client.key")
        assert await fetched(url, http=NetworkTransport(verify=context)) == b"ok"


async def test_a_compressed_reply_is_read_and_no_cookie_is_kept() -> None:
    heads: list[bytes] = []
    body = gzip.compress(b"squeezed")

    async def squeeze(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            heads.append(await reader.readuntil(b"\r\n\r\n"))
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nSet-Cookie: a=b\r\n")
            writer.write(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        writer.close()

    async with (
        listening(squeeze) as port,
        HttpClient(f"http://127.0.0.1:{port}", policy=NO_RETRY) as client,
    ):
        for _ in range(2):
            assert await client.send(GET, lambda reply: reply.content) == b"squeezed"
    assert len(heads) == 2, "one connection, kept alive"
    assert not any(b"cookie" in head.lower() for head in heads)
