"""The Tinker client against a server that keeps the protocol, with and without its faults."""

from __future__ import annotations

import asyncio
import inspect
import logging
import re
from typing import Any

import httpx
import pytest
from starlette.responses import JSONResponse, Response

from retrain.adapters import tinker as tinker_package
from retrain.adapters import weaver as weaver_package
from retrain.adapters.remote.published import until_kept
from retrain.adapters.tinker import (
    AdamParams,
    Datum,
    LoraConfig,
    SamplingParams,
    Tensor,
    TinkerClient,
)
from retrain.adapters.tinker import client as client_module
from retrain.adapters.weaver import WeaverClient
from retrain.errors import AdapterError, DeadlineError
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import RetryPolicy
from tests.tinker_server import HOSTED, OPEN_RL, SKYRL, Faulty, Peer, TinkerServer, logprob

SOON = RetryPolicy(attempts=4, first=0.0, cap=0.0, total=30.0)
ADAM = AdamParams(learning_rate=0.1)
PEERS = {"hosted": HOSTED, "skyrl": SKYRL, "open_rl": OPEN_RL}


def tinker(server: TinkerServer, **keys: Any) -> TinkerClient:
    keys = {"http": server.transport(), "policy": SOON, "api_key": "tml-k", **keys}
    if not server.peer.proto:
        keys["wire"] = "json"
    return TinkerClient("http://server", **keys)


def datum(*tokens: int) -> Datum:
    inputs = {
        "target_tokens": Tensor(list(tokens[1:]), "int64"),
        "weights": Tensor([1.0] * (len(tokens) - 1)),
    }
    return Datum(list(tokens[:-1]), inputs)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
async def test_a_round_of_training_works_on_every_kind_of_server(peer: Peer) -> None:
    server = TinkerServer(peer)
    async with tinker(server) as client:
        assert list(await client.context_lengths()) == ["org/base"]
        model = await client.create_model("org/base", LoraConfig(rank=8, seed=1))
        before = await (await model.forward([datum(3, 4, 5)]))
        passed = await model.forward_backward([datum(3, 4, 5), datum(6, 7)], "cross_entropy")
        stepped = await model.optim_step(ADAM)
        assert (await passed).logprobs == [*before.logprobs, [logprob(7, 0)]]
        assert await stepped == peer.optim_metrics
        old = await client.sampler_of(model)
        await (await model.optim_step(ADAM))
        result = await old.sample([1, 2], SamplingParams(max_tokens=2), n=3)
        assert len(result.sequences) == 3
        (first, *_) = result.sequences
        assert first.logprobs == [logprob(t, 1) for t in first.tokens], "the snapshot moved on"
        path = await (await model.save_weights("one"))
        again = await client.load_model(path)
        assert server.models[again.model_id].steps == 2
        assert server.models[again.model_id].adam == server.models[model.model_id].adam
    (made, _) = server.models.values()
    assert made.applied == [2, 0]
    assert made.lora["rank"] == 8
    assert [seq_id for seq_id, _ in made.arrivals] == list(range(1, len(made.arrivals) + 1))
    assert server.finished == (["success"] if peer.finishes else [])
    assert server.unloaded == ([] if peer.finishes else list(server.models))


AMBIGUOUS: list[httpx.Response | Exception] = [
    httpx.ReadError("lost"),
    httpx.Response(500),
    httpx.Response(503, headers={"Retry-After": "0"}),
    httpx.Response(200, content=b"{torn"),
]


@pytest.mark.parametrize("fault", AMBIGUOUS, ids=["lost", "500", "503", "torn"])
@pytest.mark.parametrize("when", ["before", "after"])
async def test_no_fault_applies_a_training_call_twice_or_loses_it(
    fault: httpx.Response | Exception, when: str
) -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        for name in ("forward_backward", "optim_step", "save_weights", "retrieve_future"):
            getattr(transport, when)[name] += [fault, fault]
        passed = await model.forward_backward([datum(3, 4)], "cross_entropy")
        stepped = await model.optim_step(ADAM)
        saved = await model.save_weights("a")
        await passed, await stepped, await saved
    made = server.models[model.model_id]
    assert made.applied == [1]
    assert [name for _, name in made.arrivals] == ["forward_backward", "optim_step", "save_weights"]
    assert not any(getattr(transport, when).values())


async def test_calls_made_at_once_arrive_in_the_order_of_the_calls() -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    transport.before["forward_backward"] += [httpx.Response(429), httpx.ReadError("lost")]
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        await asyncio.gather(
            model.forward_backward([datum(3, 4)], "cross_entropy"),
            model.optim_step(ADAM),
            model.forward_backward([datum(3, 4), datum(5, 6)], "cross_entropy"),
            model.optim_step(ADAM),
            model.save_weights("x"),
        )
    assert server.models[model.model_id].applied == [1, 2]
    assert server.models[model.model_id].arrivals[-1] == (5, "save_weights")


async def test_a_model_whose_call_may_or_may_not_have_been_accepted_is_not_used_again() -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        transport.after["optim_step"] += [httpx.ReadError("lost")] * SOON.attempts
        with pytest.raises(RemoteError, match="lost"):
            await model.optim_step(ADAM)
        with pytest.raises(AdapterError, match="OptimStep"):
            await model.forward_backward([datum(3, 4)], "cross_entropy")


async def test_a_refused_call_takes_no_seq_id() -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        transport.before["save_weights"] += [httpx.Response(422, json={"detail": "bad name"})]
        with pytest.raises(RemoteError, match="bad name"):
            await model.save_weights("..")
        await (await model.optim_step(ADAM))
    assert server.models[model.model_id].arrivals == [(1, "optim_step")]


async def test_half_a_batch_makes_the_model_unusable() -> None:
    server = TinkerServer(Peer(flags={"fwdbwd_max_chunk_len": 1}))
    transport = Faulty(server.transport())
    refusal = httpx.Response(422, json={"detail": "no"})
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        data = [datum(3, 4), datum(3, 4)]

        async def refuse_second(request: httpx.Request) -> httpx.Response:
            reply = await Faulty.handle_async_request(transport, request)
            if request.url.path.endswith("forward_backward"):
                transport.before["forward_backward"] = [refusal]
            return reply

        transport.handle_async_request = refuse_second  # type: ignore[method-assign]
        with pytest.raises(RemoteError):
            await model.forward_backward(data, "cross_entropy")
        with pytest.raises(AdapterError, match="only part of a batch"):
            await model.optim_step(ADAM)


async def test_a_large_batch_goes_out_in_chunks_and_comes_back_as_one() -> None:
    server = TinkerServer(Peer(flags={"fwdbwd_max_chunk_len": 2, "proto_compress_fwdbwd": True}))
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        data = [datum(1, token) for token in range(5)]
        output = await (await model.forward_backward(data, "cross_entropy"))
        await (await model.optim_step(ADAM))
    assert output.logprobs == [[logprob(token, 0)] for token in range(5)]
    assert output.metrics == {"loss:sum": 5.0}
    assert server.calls["forward_backward"] == 3
    assert server.models[model.model_id].applied == [5]


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
async def test_a_failed_job_is_an_error_that_says_whose_fault_it_is(peer: Peer) -> None:
    server = TinkerServer(peer)
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        server.fail_jobs["optim_step"] = "learning rate too high"
        with pytest.raises(RemoteError, match="learning rate too high") as raised:
            await (await model.optim_step(ADAM))
    assert not raised.value.retryable


async def test_a_job_is_polled_through_every_kind_of_not_yet() -> None:
    server = TinkerServer()
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        server.polls["OptimStep"] += [
            JSONResponse({"type": "try_again", "queue_state": "paused_capacity"}),
            JSONResponse({"queue_state": "paused_rate_limit"}, 408),
            Response(status_code=408),
            JSONResponse({"status": "complete_metadata", "response_payload_size": 9}),
            Response(status_code=400),
            Response(status_code=502),
            JSONResponse({}, 429, {"Retry-After": "0"}),
            JSONResponse({}, 402, {"Retry-After": "0"}),
        ]
        future = await model.optim_step(ADAM)
        assert await future == {}
        assert await future == {}, "a future may be awaited twice"
    assert not server.polls["OptimStep"]


async def test_a_job_that_never_ends_is_a_deadline_error_that_names_its_queue(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.adapters.tinker.connection.REPORT_AFTER", 0.0)
    server = TinkerServer()
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        waiting = {"type": "try_again", "queue_state": "paused_capacity"}
        server.polls["OptimStep"] += [JSONResponse(waiting)] * 999
        future = await model.optim_step(ADAM)
        with caplog.at_level(logging.WARNING), pytest.raises(DeadlineError, match="paused_cap"):
            await future.result(timeout=0.05)
    assert "queue: paused_capacity" in caplog.text


async def test_a_lost_result_is_an_error_and_a_lost_sample_is_sampled_anew() -> None:
    server = TinkerServer()
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        server.polls["OptimStep"] += [Response(status_code=410)]
        with pytest.raises(RemoteError):
            await (await model.optim_step(ADAM))
        sampler = await client.sampler_of(model)
        server.polls["Sample"] += [Response(status_code=410)] * 2
        once = lambda: sampler.sample([1], SamplingParams(max_tokens=1))  # noqa: E731
        await until_kept(once)
        assert [body["seq_id"] for body in server.bodies["asample"]] == [0, 1, 2]
        server.polls["Sample"] += [Response(status_code=410)] * 3
        with pytest.raises(RemoteError):
            await until_kept(once)


async def test_a_sample_that_may_have_been_lost_is_sent_again_as_the_same_request() -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        sampler = await client.sampler_of(model)
        transport.after["asample"] += [httpx.ReadError("lost"), httpx.Response(500)]
        await sampler.sample([1], SamplingParams(max_tokens=1))
        (session,) = server.sessions.values()
    assert len(session.seen) == 1
    assert server.calls["asample"] == 3


async def test_a_full_service_pauses_every_sample_and_loses_none() -> None:
    server = TinkerServer()
    transport = Faulty(server.transport())
    async with tinker(server, http=transport) as client:
        model = await client.create_model("org/base")
        sampler = await client.sampler_of(model)
        full = httpx.Response(429, headers={"Retry-After": "0.01"})
        transport.before["asample"] += [full] * 7
        async with asyncio.TaskGroup() as group:
            for token in range(20):
                group.create_task(sampler.sample([token], SamplingParams(max_tokens=1)))
        (session,) = server.sessions.values()
    assert sorted(session.seen) == list(range(20))


async def test_a_cancelled_sample_is_cancelled_on_the_service() -> None:
    server = TinkerServer(Peer(flags={"sample_cancel_enabled": True}))
    server.hold.clear()
    async with tinker(server) as client:
        model = await client.create_model("org/base")
        sampler = await client.sampler_of(model)
        task = asyncio.create_task(sampler.sample([1], SamplingParams(max_tokens=1)))
        await server.called("retrieve_future", 3)  # the model, the snapshot, the sample
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(DeadlineError):
            await sampler.sample([1], SamplingParams(max_tokens=1), timeout=0.01)
    assert len(server.cancelled) == 2


async def test_the_heartbeat_ends_with_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT", 0.0)
    server = TinkerServer()

    async def run() -> None:
        async with tinker(server):
            await server.called("session_heartbeat", 3)
            raise RuntimeError("the run broke")

    with pytest.raises(RuntimeError, match="the run broke"):
        await run()
    assert server.finished == ["errored"]
    assert not [t for t in asyncio.all_tasks() if t is not asyncio.current_task()]


async def test_a_session_that_the_service_ended_gets_no_more_heartbeats(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "HEARTBEAT", 0.0)
    server = TinkerServer()
    transport = Faulty(server.transport())
    transport.before["session_heartbeat"] += [httpx.Response(410)]
    async with tinker(server, http=transport) as client:
        await asyncio.wait(client._tasks)
    assert "was ended by the service" in caplog.text


async def test_a_token_is_traded_for_the_key_and_renewed_when_it_expires() -> None:
    tokens = iter(["jwt-1", "jwt-2"])
    seen: list[tuple[str, str]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        name, key = request.url.path.rpartition("/")[2], request.headers["x-api-key"]
        seen.append((name, key))
        if name == "config":
            return httpx.Response(200, json={"pjwt_auth_enabled": True})
        if name == "token":
            return httpx.Response(200, json={"jwt": next(tokens)})
        if name == "weights_info" and key == "jwt-1":
            expired = {"WWW-Authenticate": 'Bearer error="invalid_token"'}
            return httpx.Response(401, headers=expired)
        return httpx.Response(200, json={"session_id": "s", "base_model": "b"})

    server = TinkerServer()
    async with tinker(server, http=httpx.MockTransport(answer)) as client:
        await client.saved_model("tinker://x")
        assert "tml-k" not in repr(client)
    assert [pair for pair in seen if pair[0] in ("token", "weights_info")] == [
        ("token", "tml-k"),
        ("weights_info", "jwt-1"),
        ("token", "tml-k"),
        ("weights_info", "jwt-2"),
    ]


async def test_another_server_is_told_at_once() -> None:
    """One that says 200 to everything, and one that knows no POST."""
    unknown = httpx.Response(501, text="<html><title>Error response</title>" + "<p>" * 500)
    for reply, message in (
        (httpx.Response(200, json={"hello": 1}), "no 'session_id'"),
        (unknown, r"an HTML page \(Error response\)"),
    ):
        seen: list[str] = []

        def answer(request: httpx.Request, reply=reply, seen=seen) -> httpx.Response:
            seen.append(request.url.path.rpartition("/")[2])
            return reply

        client = TinkerClient("http://x", http=httpx.MockTransport(answer), policy=SOON)
        with pytest.raises(RemoteError, match=f"{message}; is this a Tinker server"):
            await client.__aenter__()
        tries = 1 if reply is unknown else 3
        assert seen == ["config", "dynamic_config", *["create_session"] * tries]


async def test_an_outage_is_outlasted_as_long_as_there_is_time() -> None:
    server = TinkerServer()
    faulty = Faulty(server.transport())
    async with tinker(server, http=faulty, policy=RetryPolicy(first=0.0)) as client:
        sampler = await client.sampling_session(base_model="org/base")
        for name in ("asample", "retrieve_future"):
            faulty.before[name] += [httpx.ConnectError("refused")] * 40
        assert (await sampler.sample([1, 2], SamplingParams(max_tokens=1))).sequences


def test_help_shows_how_a_client_is_used() -> None:
    for package, client in ((tinker_package, TinkerClient), (weaver_package, WeaverClient)):
        example = inspect.getdoc(client) or ""
        assert f"async with {client.__name__}(" in example
        assert set(re.findall(r"\b([A-Z][A-Za-z]+)\(", example)) <= set(package.__all__)


def test_a_plain_list_among_the_inputs_of_a_loss_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"'weights'\]"):
        Datum([1, 2], {"weights": [1.0, 1.0]})  # type: ignore[dict-item] - as a newcomer has it


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
async def test_logprobs_of_a_text_have_one_value_a_token(peer: Peer) -> None:
    server = TinkerServer(peer)
    async with tinker(server) as client:
        sampler = await client.sampling_session(base_model="org/base")
        assert await sampler.compute_logprobs([4, 5, 6]) == [None, logprob(5, 0), logprob(6, 0)]


async def test_paths_of_the_wrong_kind_are_refused_before_they_are_sent() -> None:
    server = TinkerServer()
    async with tinker(server) as client:
        with pytest.raises(ValueError, match="sampler's"):
            await client.load_model("tinker://m:train:0/sampler_weights/a")
        with pytest.raises(ValueError, match="expected one"):
            await client.sampling_session()
