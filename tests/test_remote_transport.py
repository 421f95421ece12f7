"""The transport of the remote adapters: what is sent again, what never is, and what is told."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable
from contextlib import nullcontext

import httpx
import pytest

from retrain.errors import ConfigError
from retrain.wire.client import Call, HttpClient
from retrain.wire.refusals import RemoteError, error_body, retry_after
from retrain.wire.retries import NO_RETRY, Outlook, RetryPolicy
from retrain.wire.vendors import TINKER, WEAVER, Vendor, checked_url
from tests.test_network import listening

SOON = RetryPolicy(attempts=4, first=0.0, cap=0.0, total=30.0)
Answer = Callable[[httpx.Request], httpx.Response]


def transport(answer: Answer, **keys: object) -> HttpClient:
    return HttpClient(
        "http://service/base/",
        http=httpx.MockTransport(answer),
        **{"policy": SOON, **keys},  # type: ignore[arg-type] - a test passes what it varies
    )


def scripted(*answers: httpx.Response | Exception) -> tuple[Answer, list[httpx.Request]]:
    """Answers in order, the last one for ever; the requests that came."""
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        next_one = answers[min(len(seen), len(answers)) - 1]
        if isinstance(next_one, Exception):
            raise next_one
        return next_one

    return answer, seen


def body(response: httpx.Response) -> object:
    return json.loads(response.content)


async def test_a_call_carries_its_path_body_and_headers() -> None:
    answer, seen = scripted(httpx.Response(200, json={"ok": 1}))
    async with transport(answer, headers={"A": "b"}, secrets={"X-API-Key": "k"}) as remote:
        assert await remote.send(Call.json("POST", "api/x", {"y": 2}), body) == {"ok": 1}
    assert str(seen[0].url) == "http://service/base/api/x"
    assert json.loads(seen[0].content) == {"y": 2}
    assert (seen[0].headers["a"], seen[0].headers["x-api-key"]) == ("b", "k")
    assert seen[0].headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("failure", "may_have_acted"),
    [
        (httpx.Response(500), True),
        (httpx.Response(503), True),
        (httpx.Response(408), True),
        (httpx.ReadError("lost"), True),
        (httpx.RemoteProtocolError("lost"), True),
        (httpx.Response(200, content=b"{half"), True),
        (httpx.Response(200), True),
        (httpx.Response(429), False),
        (httpx.ConnectError("refused"), False),
    ],
)
async def test_a_call_is_sent_again_if_it_is_idempotent_or_cannot_have_acted(
    failure: httpx.Response | Exception, may_have_acted: bool
) -> None:
    for idempotent in (True, False):
        answer, seen = scripted(failure, httpx.Response(200, json=1))
        final = may_have_acted and not idempotent
        async with transport(answer) as remote:
            with pytest.raises(RemoteError) if final else nullcontext():
                assert await remote.send(Call("POST", "x", idempotent=idempotent), body) == 1
        assert len(seen) == (1 if final else 2)


@pytest.mark.parametrize("status", [301, 302, 400, 401, 403, 404, 409, 410, 422, 500, 501])
async def test_a_refusal_is_final(status: int) -> None:
    headers = {"x-should-retry": "false"} if status == 500 else {}
    refusal = httpx.Response(status, json={"detail": "no such loss"}, headers=headers)
    answer, seen = scripted(refusal)
    async with transport(answer) as remote:
        with pytest.raises(RemoteError, match="no such loss") as raised:
            await remote.send(Call("GET", "x"), body)
    assert (raised.value.status, len(seen)) == (status, 1)


async def test_attempts_end_and_the_error_says_how_many_there_were() -> None:
    answer, seen = scripted(httpx.Response(502, headers={"x-request-id": "r7"}))
    async with transport(answer) as remote:
        with pytest.raises(RemoteError, match="request r7") as raised:
            await remote.send(Call("GET", "x"), body)
    assert len(seen) == SOON.attempts
    assert raised.value.__notes__ == ["gave up after 4 attempts"]


async def test_by_default_the_time_ends_the_attempts_but_a_reply_in_another_form_does_it_soon() -> (
    None
):
    patient = RetryPolicy(first=0.0, total=60.0)
    for failure in (httpx.Response(503), httpx.Response(200)):
        answer, _ = scripted(*[failure] * 40, httpx.Response(200, json=1))
        async with transport(answer, policy=patient) as remote:
            assert await remote.send(Call("GET", "x"), body) == 1
    answer, seen = scripted(httpx.Response(200, json={"hello": 1}))
    async with transport(answer, policy=patient, vendor=TINKER) as remote:
        with pytest.raises(RemoteError, match="'id'") as raised:
            await remote.send(Call("GET", "x"), lambda reply: json.loads(reply.content)["id"])
    assert (raised.value.code, len(seen)) == ("malformed", 3)


async def test_an_outage_is_not_waited_out_once_the_end_is_near(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted_one, seen = scripted(httpx.Response(200, json=1), httpx.ConnectError("refused"))
    outage = asyncio.Event()

    def answer(request: httpx.Request) -> httpx.Response:
        if len(seen) > 8:
            outage.set()
        return scripted_one(request)

    async with transport(answer, policy=RetryPolicy(first=0.0)) as remote:
        await remote.send(Call("GET", "x"), body)
        sending = asyncio.create_task(remote.send(Call("GET", "x"), body))
        await outage.wait()
        monkeypatch.setattr("retrain.wire.retries.SHORT", 0.0)
        remote.stop_retrying()
        for call in (sending, remote.send(Call("GET", "x"), body)):
            with pytest.raises(RemoteError, match="could not reach"):
                await call
    assert len(seen) < 20


async def test_a_pause_that_would_outlive_the_deadline_ends_the_call_at_once() -> None:
    answer, seen = scripted(httpx.Response(429, headers={"Retry-After": "59"}))
    async with transport(answer, policy=RetryPolicy(total=5.0)) as remote:
        with pytest.raises(RemoteError) as raised:
            await remote.send(Call("GET", "x"), body)
    assert len(seen) == 1
    assert raised.value.retry_after == 59.0


async def test_a_silent_service_is_a_timeout_not_a_hang() -> None:
    async def never(request: httpx.Request) -> httpx.Response:
        await asyncio.Event().wait()
        raise AssertionError

    async with transport(never, policy=NO_RETRY) as remote:
        with pytest.raises(RemoteError, match=r"did not answer within 0\.01 s") as raised:
            await remote.send(Call("GET", "x", timeout=0.01), body)
    assert (raised.value.code, raised.value.may_have_acted) == ("timeout", True)


async def test_an_expired_token_is_renewed_once() -> None:
    expired = httpx.Response(401, headers={"WWW-Authenticate": 'Bearer error="invalid_token"'})
    answer, seen = scripted(expired, httpx.Response(200, json=1), expired)
    async with transport(answer, secrets={"X-API-Key": "old"}) as remote:

        async def refresh() -> None:
            remote.secrets["X-API-Key"] = "new"

        remote.refresh = refresh
        await remote.send(Call("POST", "x", idempotent=False), body)
        assert [r.headers["x-api-key"] for r in seen] == ["old", "new"]
        with pytest.raises(RemoteError):
            await remote.send(Call("GET", "x"), body)
    assert len(seen) == 4


async def test_a_refused_key_is_in_no_repr_and_no_error_which_says_where_it_belongs() -> None:
    def echo(request: httpx.Request) -> httpx.Response:
        return httpx.Response(401, text=f"bad key {request.headers.get('authorization')}")

    for secrets, error in (
        ({}, "bad key None; WEAVER_API_KEY is not set"),
        ({"Authorization": "Bearer tml-secret"}, r"bad key .*\*\*\*; check the API key"),
    ):
        async with transport(echo, secrets=secrets, vendor=WEAVER) as remote:
            with pytest.raises(RemoteError, match=error) as raised:
                await remote.send(Call("GET", "x"), body)
        assert "tml-secret" not in f"{raised.value!r}{raised.value}{remote!r}"


@pytest.mark.parametrize("vendor", [TINKER, WEAVER])
def test_a_key_is_checked_before_a_header_is_made_of_it(
    vendor: Vendor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(vendor.key_variable, raising=False)
    assert vendor.api_key("http://elsewhere") == ""
    assert vendor.api_key(vendor.url, "") == "", "its caller says that there is none"
    with pytest.raises(ConfigError, match=f"{vendor.key_variable} is not set"):
        vendor.api_key(vendor.url)
    monkeypatch.setenv(vendor.key_variable, " k-1\n")
    assert vendor.api_key(vendor.url) == "k-1"
    for bad in ("k-1\nk-2", "k-1 \u2026"):
        monkeypatch.setenv(vendor.key_variable, bad)
        for given, where in ((None, vendor.key_variable), (bad, "api_key")):
            with pytest.raises(ConfigError, match=f"{where} contains a line break") as raised:
                vendor.api_key("http://elsewhere", given)
            assert "k-1" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    ["service:80", "ftp://x", "https://", "http://u:p@x", "local", "http://x:99999", "http://x:0"],
)
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigError) as raised:
        checked_url(url)
    assert "u:p" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "message", "code"),
    [
        (b'{"detail": "a"}', "a", ""),
        (b'{"error": {"message": "a", "code": "c"}}', "a", "c"),
        (b'{"error": "a", "category": "user"}', "a", ""),
        (b'{"type": "RequestFailedResponse", "error_message": "a"}', "a", ""),
        (b'{"detail": [{"loc": 1}]}', '[{"loc": 1}]', ""),
        (b"<html>", "an HTML page", ""),
        (b"<!DOCTYPE><title>No\n way</title><p>", "an HTML page (No way)", ""),
        (b"[1]", "[1]", ""),
        (b"", "", ""),
    ],
)
def test_error_bodies_of_every_shape_are_read(content: bytes, message: str, code: str) -> None:
    read = error_body(content)
    assert (read.message, read.code) == (message, code)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"retry-after": "2.5"}, 2.5),
        ({"retry-after-ms": "250"}, 0.25),
        ({"retry-after": "Thu, 01 Jan 1970 00:01:40 GMT"}, 90.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "nan"}, None),
        ({"retry-after-ms": "nan"}, None),
        ({"retry-after": "Fri, 31 Dec 9999 23:59:59 -1400"}, 253402351189.0),
    ],
)
def test_retry_after_is_read_in_its_three_forms(
    headers: dict[str, str], seconds: float | None
) -> None:
    assert retry_after(headers, now=10.0) == seconds


@pytest.mark.parametrize(
    ("asked", "seconds"), [("NaN", None), ("1e999", math.inf), ("9" * 400, math.inf)]
)
def test_a_pause_in_the_body_that_is_no_finite_number(asked: str, seconds: float | None) -> None:
    details = f'{{"details": {{"retry_after_seconds": {asked}}}}}'
    assert error_body(details.encode()).retry_after == seconds


def test_pauses_double_up_to_the_cap_and_obey_the_service() -> None:
    policy = RetryPolicy(first=1.0, cap=4.0)
    for attempt, middle in enumerate([1.0, 2.0, 4.0, 4.0]):
        assert 0.75 * middle <= policy.pause(attempt) <= 1.25 * middle
    assert policy.pause(3, asked=0.2) == 0.2
    assert policy.pause(0, asked=1e9) == 60.0


async def test_a_connection_lost_after_the_request_was_sent_may_have_acted() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with (
        listening(hang_up) as port,
        HttpClient(f"http://127.0.0.1:{port}", policy=NO_RETRY) as remote,
    ):
        with pytest.raises(RemoteError) as raised:
            await remote.send(Call("POST", "x", idempotent=False), body)
    assert (raised.value.code, raised.value.may_have_acted) == ("disconnect", True)


@pytest.mark.parametrize("scheme", ["http", "https"])
async def test_a_refused_connection_cannot_have_acted(scheme: str) -> None:
    async with listening(lambda reader, writer: asyncio.sleep(0)) as port:
        pass  # closed again: nobody listens on that port
    async with HttpClient(f"{scheme}://127.0.0.1:{port}", policy=NO_RETRY) as remote:
        with pytest.raises(RemoteError, match="could not reach") as raised:
            await remote.send(Call("POST", "x", idempotent=False), body)
    assert (raised.value.code, raised.value.may_have_acted) == ("connect", False)
    assert "ssl:" not in str(raised.value)
    assert "object at" not in str(raised.value)


async def test_https_to_a_plain_port_is_told_at_once() -> None:
    met: list[int] = []

    async def plain(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        met.append(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async with (
        listening(plain) as port,
        HttpClient(f"https://127.0.0.1:{port}", policy=SOON) as remote,
    ):
        with pytest.raises(RemoteError, match="SSL"):
            await remote.send(Call("GET", "x"), body)
    assert len(met) == 1


async def test_a_service_that_never_answered_is_given_up_soon(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that gave a good reply has the whole of the policy's time."""
    monkeypatch.setattr("retrain.wire.retries.SHORT", 0.0)
    patient = RetryPolicy(attempts=9, first=0.0, total=60.0)
    down, good = httpx.ConnectError("refused"), httpx.Response(200, json=1)
    unknown = httpx.Response(404)  # of another server, for all we know
    answer, seen = scripted(unknown, down, good, *[down] * 5, good)
    async with transport(answer, policy=patient) as remote:
        for error in ("404", "could not reach"):
            with pytest.raises(RemoteError, match=error):
                await remote.send(Call("GET", "x"), body)
        assert len(seen) == 2, "tried once each"
        for _ in range(2):
            await remote.send(Call("GET", "x"), body)
    assert len(seen) == 9
    answer, _ = scripted(*[down] * 45, good)
    async with transport(answer, policy=patient, outlook=Outlook(reached=True)) as remote:
        await asyncio.gather(*(remote.send(Call("GET", "x"), body) for _ in range(9)))
    assert [r.levelname for r in caplog.records] == ["WARNING"] * 2, "one per client, not per call"
