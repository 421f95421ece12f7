"""Slow, many, foreign and noisy clients of `retrain serve`, over real sockets."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
from contextlib import AsyncExitStack, asynccontextmanager
from urllib.parse import urlsplit

import httpx
import pytest

from retrain.service import http_server as module
from retrain.service.app import ServiceApp
from retrain.service.http_server import OncePerSecond, fit_connections
from retrain.service.serve import LOOPBACK
from retrain.service.state import HttpLimits, ServiceSettings
from tests.service_kit import on_a_port

QUICK, LONG = 0.2, 60.0
HEALTH = b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"


def post(length, path="create_session"):
    head = f"POST /api/v1/{path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n"
    return head.encode()


@asynccontextmanager
async def connected(url):
    parts = urlsplit(url)
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def closed(reader):
    """All that still comes, until the service closes the connection."""
    try:
        return await asyncio.wait_for(reader.read(), 20)
    except ConnectionResetError:
        return b""


async def answer(reader):
    """Status and body of one reply."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode().lower()
    length = int(head.partition("content-length: ")[2].partition("\r\n")[0])
    return int(head.split()[1]), await reader.readexactly(length)


async def healthy(url):
    async with httpx.AsyncClient(base_url=url) as http:
        return (await http.get("/api/v1/healthz", timeout=10)).status_code == 200


async def test_a_request_that_does_not_arrive_is_hung_up(tmp_path):
    limits = HttpLimits(header_timeout=QUICK, body_timeout=QUICK, shutdown=2)
    with on_a_port(tmp_path, front=limits, api_key="k") as url:
        async with AsyncExitStack() as stack:
            half = [b"", b"GET /api/v1/he", b"\r\n", post(9)[:-2], post(9) + b"{"]
            half += [HEALTH + piece for piece in (b"\r\n", HEALTH[:9])]
            for sent in half:
                reader, writer = await stack.enter_async_context(connected(url))
                writer.write(sent)
                if sent.startswith(HEALTH):
                    assert (await answer(reader))[0] == 200
                    writer.write(b"\r\n")
                assert b"200" not in await closed(reader), sent


async def test_a_slow_body_that_goes_on_arriving_is_read(tmp_path):
    limits = HttpLimits(header_timeout=QUICK, body_timeout=QUICK, shutdown=2)
    body = json.dumps({"tags": ["x" * 20_000]}).encode()
    with on_a_port(tmp_path, front=limits) as url:
        async with connected(url) as (reader, writer), connected(url) as (stalled, other):
            writer.write(post(len(body)) + body[:-5])
            other.write(post(len(body)) + body[:5])
            assert b"200" not in await closed(stalled)
            writer.write(body[-5:])
            assert (await answer(reader))[0] == 200


async def test_at_the_limit_of_connections_those_that_wait_make_room(tmp_path):
    limits = HttpLimits(LONG, LONG, max_connections=3, shutdown=1)
    with on_a_port(tmp_path, front=limits) as url:
        async with AsyncExitStack() as stack:
            idle = [await stack.enter_async_context(connected(url)) for _ in range(3)]
            for _, writer in idle[:2]:
                writer.write(HEALTH[:9])
            reader, writer = idle[2]
            writer.write(HEALTH)
            assert (await answer(reader))[0] == 200
            busy = []
            for number in range(3):  # heads first, then the connection that has had its reply
                reader, writer = await stack.enter_async_context(connected(url))
                writer.write(b"POST /api/v1/create_session HTTP/1.1\r\nHost: localhost\r\n")
                writer.write(b"Expect: 100-continue\r\nContent-Length: 2\r\n\r\n")
                assert b"100" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)
                busy.append((reader, writer))
                assert await closed(idle[number][0]) == b""
            assert await healthy(url)
            async with httpx.AsyncClient(base_url=url) as http:
                refused = await http.post("/api/v1/create_session", json={})
            assert (refused.status_code, refused.json()["retryable"]) == (503, True)
            for reader, writer in busy:
                writer.write(b"{}")
                assert (await answer(reader))[0] == 200


async def ask(settings, method, path, headers):
    """What the app answers without a model: nothing that is refused may reach the service."""
    transport = httpx.ASGITransport(ServiceApp(settings), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost:1") as http:
        reply = await http.request(method, path, headers=headers)
    return reply.status_code


WITH_KEY = [  # and the status without one
    ("GET", "/api/v1/healthz", 200, 200),
    ("GET", "/api/v1/healthz/", 401, 307),
    ("GET", "/healthz", 401, 404),
    ("GET", "/api/v1/unknown", 401, 404),
    ("GET", "/", 401, 404),
    ("OPTIONS", "/api/v1/asample", 401, 405),
    ("DELETE", "/api/v1/training_runs/m/checkpoints/weights/healthz", 401, 500),
]


async def test_every_path_but_one_needs_the_key(tmp_path):
    settings = ServiceSettings(folder=tmp_path, api_key="right")
    for method, path, without, with_key in WITH_KEY:
        for headers in ({}, {"x-api-key": b"wrong\xe9"}, {"x-api-key": ""}):
            assert await ask(settings, method, path, headers) == without, path
        for name in ("x-api-key", "x-weaver-api-key"):
            assert await ask(settings, method, path, {name: "right"}) == with_key, path
    assert "right" not in repr(settings)


BY_HEADERS = [
    ({}, 200),
    ({"host": "LOCALHOST.:99"}, 200),
    ({"host": "127.0.0.1"}, 200),
    ({"host": "[::1]:8765"}, 200),
    ({"host": "gpu-machine:1"}, 200),
    ({"host": "evil.example"}, 403),
    ({"host": "localhost.evil.example"}, 403),
    ({"host": "evil.example:80@localhost"}, 403),
    ({"host": "[::1"}, 403),
    ({"host": ""}, 403),
    ({"origin": "http://localhost:1"}, 200),
    ({"origin": "http://localhost:2"}, 403),
    ({"origin": "https://evil.example"}, 403),
    ({"origin": "null"}, 403),
    ({"origin": "http://[::1"}, 403),
    ({"sec-fetch-site": "none"}, 200),
    ({"sec-fetch-site": "cross-site"}, 403),
    ({"sec-fetch-site": "same-site"}, 403),
]


async def test_web_pages_of_others_do_not_reach_the_service(tmp_path):
    settings = ServiceSettings(folder=tmp_path, hosts=(*LOOPBACK, "gpu-machine"))
    for headers, expected in BY_HEADERS:
        assert await ask(settings, "GET", "/api/v1/healthz", headers) == expected, headers


def test_one_cause_writes_one_line_per_second(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    handler.addFilter(OncePerSecond())
    log = logging.Logger("x")
    log.addHandler(handler)
    for now[0] in (0.0, 0.5, 0.9, 1.5):
        log.warning("socket.accept() out of system resource\nsocket: %s", now[0])
        log.warning("another %s", "cause")
        for error in (ValueError("1"), KeyError(now[0])):
            try:
                raise error
            except (ValueError, KeyError):
                log.exception("failed")
    first = ["socket.accept() out of system resource\nsocket: 0.0", "another cause"]
    assert lines[:4] == [*first, "failed", "failed"]
    assert lines[4:] == [
        "socket.accept() out of system resource\nsocket: 1.5 (2 more like this)",
        "another cause (2 more like this)",
        "failed (2 more like this)",
        "failed (2 more like this)",
    ]


@pytest.mark.parametrize(
    ("soft", "hard", "fitting", "raised"),
    [(256, 256, 128, 256), (1024, 4000, 3744, 4000), (1024, -1, 4096, 4352), (9000, 9000, 4096, 0)],
)
def test_connections_fit_the_file_descriptors(soft, hard, fitting, raised, monkeypatch, caplog):
    set_to = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: set_to.append(limits))
    assert fit_connections(4096) == fitting
    assert set_to == ([(raised, hard)] if raised else [])
    assert bool(caplog.messages) == (fitting < 4096)


async def test_a_body_that_is_no_http_gets_one_reply_and_no_traceback(tmp_path, caplog):
    head = post(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    with on_a_port(tmp_path, api_key="k") as url:
        for sent in (head + b"no chunk\r\n", head + b"2\r\n{}xx"):
            async with connected(url) as (reader, writer):
                writer.write(sent)
                assert (await closed(reader)).startswith(b"HTTP/1.1 400")
        assert await healthy(url)
    assert "Traceback" not in caplog.text
