"""The Weaver client against a service on loopback that can be broken in every way."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from retrain.adapters.weaver import AdamParams, LoraConfig, TrainingRow, WeaverClient
from retrain.sampler import SamplingParams
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import RetryPolicy
from tests.fake_weaver import KEY, FakeWeaver, Fault, serve

SOON = RetryPolicy(attempts=4, first=0.0, cap=0.0, total=20.0)
ROWS = [TrainingRow([1, 2, 3], {"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]})]
ADAM = AdamParams(learning_rate=0.1, weight_decay=0.0, grad_clip_norm=0.0)


@pytest.fixture
async def fake() -> FakeWeaver:
    return FakeWeaver()


@pytest.fixture
async def url(fake: FakeWeaver) -> AsyncIterator[str]:
    async with serve(fake) as address:
        yield address
        fake.released.set()


def client(url: str, **keys: Any) -> WeaverClient:
    defaults: dict[str, Any] = {
        "api_key": KEY,
        "policy": SOON,
        "pace": RetryPolicy(first=0.0, cap=0.001),
        "deadline": 20.0,
    }
    return WeaverClient(url, **{**defaults, **keys})


async def test_the_whole_way_from_a_session_to_a_sample(fake: FakeWeaver, url: str) -> None:
    async with client(url) as weaver:
        model = await weaver.create_model("tiny", lora=LoraConfig(rank=4, seed=1))
        losses = []
        for _ in range(10):
            passed = await model.forward_backward(ROWS, "cross_entropy")
            stepped = await model.optim_step(ADAM)
            losses.append(-sum((await passed.result())[0][1:]))
            assert (await stepped.result())["grad_norm"] > 0
        assert losses == sorted(losses, reverse=True)
        path = await (await model.save_for_sampler("step_10")).result()
        session = await weaver.sampling_session(path=path, model=model)
        greedy = SamplingParams(max_tokens=2, seed=1)
        first, second = await session.sample([2], greedy, n=2)
        assert len(first.tokens) == len(first.logprobs) == 2
        assert await session.sample([2], greedy, n=2) == [first, second]
        scored = await session.compute_logprobs([2, 3, 4])
        assert scored[0] is None
        assert scored[2] == pytest.approx((await logprobs(model))[2])
        await session.close()
        assert fake.deleted == [session.id]
    assert fake.applied["forward_backward"] == fake.applied["optim_step"] == 10
    assert fake.terminated == [model.id]


async def logprobs(model: Any) -> list[float]:
    return list((await (await model.forward(ROWS)).result())[0])


@pytest.mark.parametrize(
    ("spelling", "direct", "pending_looks"), [("id", True, 3), ("ID", False, 0), ("Id", True, 0)]
)
async def test_every_spelling_and_shape_of_a_reply_is_understood(
    fake: FakeWeaver, url: str, spelling: str, direct: bool, pending_looks: int
) -> None:
    fake.spelling, fake.direct_results, fake.pending_looks = spelling, direct, pending_looks
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        result = await (await model.forward_backward(ROWS, "cross_entropy")).result()
        assert len(result[0]) == 3
        assert (await (await model.optim_step(ADAM)).result())["grad_norm"] > 0
        path = await (await model.save_for_sampler("x")).result()
        assert path.startswith("weaver://")
        await weaver.sampling_session(path=path, model=model)
    if pending_looks == 0:
        assert not fake.looks, "an operation that is done at once needs no look"


async def test_empty_sequences_keep_their_place(fake: FakeWeaver, url: str) -> None:
    fake.empty_samples = True
    async with client(url) as weaver:
        session = await weaver.sampling_session(base_model="tiny")
        found = await session.sample([1], SamplingParams(max_tokens=3), n=3)
        assert [len(one.tokens) for one in found] == [0, 3, 3]


# Order


async def test_calls_submitted_at_once_arrive_in_the_order_of_their_seq_ids(
    fake: FakeWeaver, url: str
) -> None:
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        submitted = await asyncio.gather(
            *(model.forward_backward(ROWS, "cross_entropy") for _ in range(8)),
            model.optim_step(ADAM),
        )
        await asyncio.gather(*(one.result() for one in submitted))
    arrived = [body["payload"]["seq_id"] for _, _, body in fake.log if body and "payload" in body]
    assert arrived == list(range(1, 10))


async def test_a_call_that_is_not_sent_or_turned_away_gives_its_seq_id_back(
    fake: FakeWeaver, url: str
) -> None:
    row = TrainingRow([1], {"target_tokens": [2], "weights": [float("nan")]})
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        with pytest.raises(ValueError, match="JSON"):
            await model.forward_backward([*ROWS, row], "cross_entropy")
        with pytest.raises(RemoteError, match="unknown loss") as caught:
            await model.forward_backward(ROWS, "nonsense")
        assert (caught.value.status, caught.value.code) == (400, "invalid_request")
        assert caught.value.request_id == "req-7"
        await (await model.forward_backward(ROWS, "cross_entropy")).result()
    seq_ids = [b["payload"]["seq_id"] for _, p, b in fake.log if p.endswith("backward-passes")]
    assert seq_ids == [1, 1]


async def test_a_checkpoint_waits_for_what_was_submitted_before_it(
    fake: FakeWeaver, url: str
) -> None:
    fake.pending_looks = 3
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        await model.forward_backward(ROWS, "cross_entropy")
        stepped = await model.optim_step(ADAM)
        saved = await model.save_state("one")
        assert stepped.settled
        before = await logprobs(model)
        for _ in range(2):
            await model.forward_backward(ROWS, "cross_entropy")
            await (await model.optim_step(ADAM)).result()
        after = await logprobs(model)
        assert after != before
        await model.load_state(saved)
        assert await logprobs(model) == before
        await model.expire(saved)
        assert fake.expired == [saved]
        with pytest.raises(RemoteError, match="no checkpoint"):
            await model.load_state(saved)


# Faults: nothing is applied twice


KINDS = ["reply", "drop_before", "drop_after", "garbage_after", "empty_after"]
BUSY: dict[str, Any] = {"error": "server_draining", "message": "later", "retryable": True}


@pytest.mark.parametrize(
    "fault",
    [
        Fault("backward-passes", status=429, body={"error": "rate_limited", "message": "slow"}),
        Fault("backward-passes", status=429, headers={"Retry-After": "0"}),
        Fault("backward-passes", status=503, body=BUSY, times=2),
        Fault("GET .*operations", status=500),
        Fault("GET .*operations", status=503, times=3),
        Fault("GET .*operations", kind="drop_before"),
        Fault("GET .*operations", kind="drop_after"),
        Fault("GET .*operations", kind="garbage_after"),
        Fault("GET .*operations", kind="empty_after", times=3),
        Fault("POST .*sampling-sessions$", kind="empty_after", times=3),
        Fault(
            "GET .*operations",
            status=404,
            body={"error": "not_found", "message": "bad connection", "retryable": False},
        ),
        Fault("POST .*sessions$", kind="drop_after"),
        Fault("POST .*models$", kind="drop_before"),
        Fault("samples", kind="drop_after"),
        Fault("samples", status=500),
    ],
)
@pytest.mark.parametrize("resend", [True, False])
async def test_a_fault_that_cannot_repeat_training_is_got_over(
    fake: FakeWeaver, url: str, fault: Fault, resend: bool
) -> None:
    fake.faults = [fault]
    async with client(url, resend=resend) as weaver:
        model = await weaver.create_model("tiny")
        await (await model.forward_backward(ROWS, "cross_entropy")).result()
        await (await model.optim_step(ADAM)).result()
        session = await weaver.sampling_session(base_model="tiny")
        assert len(await session.sample([1], SamplingParams(max_tokens=1))) == 1
    assert fault.times == 0
    assert (fake.applied["forward_backward"], fake.applied["optim_step"]) == (1, 1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dedupes", [True, False])
async def test_training_that_may_have_been_applied_is_not_sent_again(
    fake: FakeWeaver, url: str, kind: str, dedupes: bool
) -> None:
    fake.dedupes = dedupes
    fake.faults = [Fault("optimizer-steps", kind=kind)]
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        await (await model.forward_backward(ROWS, "cross_entropy")).result()
        with pytest.raises(RemoteError) as caught:
            await model.optim_step(ADAM)
        assert caught.value.may_have_acted
        assert fake.applied["optim_step"] == kind.endswith("_after")
        await (await model.optim_step(ADAM)).result()
    sent = [b["payload"]["seq_id"] for _, p, b in fake.log if p.endswith("optimizer-steps")]
    assert sent[-1] == 3, "the seq_id of a step that may have been applied is spent"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_service_that_recognises_repeats_applies_a_resent_step_once(
    fake: FakeWeaver, url: str, kind: str
) -> None:
    fake.faults = [Fault(path, kind=kind) for path in ("backward-pass", "optimizer-s", "export")]
    async with client(url, resend=True) as weaver:
        model = await weaver.create_model("tiny")
        await (await model.forward_backward(ROWS, "cross_entropy")).result()
        await (await model.optim_step(ADAM)).result()
        await (await model.save_for_sampler("x")).result()
    assert all(not fault.times for fault in fake.faults)
    assert fake.applied["forward_backward"] == fake.applied["optim_step"] == 1
    assert fake.applied["export"] == 1


async def test_an_operations_error_carries_its_facts_and_is_not_submitted_again(
    fake: FakeWeaver, url: str
) -> None:
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        fake.fail_operation = {
            "error": "trainer_lost",
            "error_message": "the trainer went away",
            "error_details": {"stage": "backward"},
            "retryable": True,
        }
        failing = await model.forward_backward(ROWS, "cross_entropy")
        for _ in range(2):
            with pytest.raises(RemoteError, match="in backward: the trainer went away") as caught:
                await failing.result()
        error = caught.value
        assert (error.code, error.retryable) == ("trainer_lost", True)
        assert error.request_id == failing.id
        assert error.status is None
    assert fake.applied["forward_backward"] == 1


@pytest.mark.parametrize("kind", ["pending", "hang"])
async def test_an_operation_that_never_ends_meets_its_deadline(
    fake: FakeWeaver, url: str, kind: str
) -> None:
    fake.pending_looks = 10**9
    fake.faults = [Fault("GET .*operations", kind=kind, times=99)] if kind == "hang" else []
    async with client(url, deadline=0.05) as weaver:
        model = await weaver.create_model("tiny")
        with pytest.raises(RemoteError, match=r"0\.05.*GPU") as caught:
            await (await model.forward_backward(ROWS, "cross_entropy")).result()
        assert caught.value.code == "timeout"
        fake.released.set()


# Sampling sessions that load in the background, and cancellation


@pytest.mark.parametrize("sync", [None, "done"])
async def test_a_session_is_ready_when_it_is_returned(
    fake: FakeWeaver, url: str, sync: str | None
) -> None:
    fake.sync = sync
    async with client(url) as weaver:
        session = await weaver.sampling_session(base_model="tiny")
        assert len(await session.sample([1], SamplingParams(max_tokens=1))) == 1
    assert fake.deleted == [session.id]


async def test_a_session_whose_weights_do_not_load_is_deleted(fake: FakeWeaver, url: str) -> None:
    fake.sync = "error"
    async with client(url) as weaver:
        with pytest.raises(RemoteError, match="no engine") as caught:
            await weaver.sampling_session(base_model="tiny")
        assert caught.value.code == "sync_failed"
        assert len(fake.deleted) == 1


async def test_cancelling_while_weights_load_deletes_the_session(
    fake: FakeWeaver, url: str
) -> None:
    fake.sync = "hang"
    async with client(url) as weaver:
        opening = asyncio.create_task(weaver.sampling_session(base_model="tiny"))
        while not fake.looks:  # noqa: ASYNC110 - the fake has no event for a poll
            await asyncio.sleep(0.001)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert len(fake.deleted) == 1
        assert not fake.samplers


async def test_cancelling_the_creation_of_a_model_terminates_it(fake: FakeWeaver, url: str) -> None:
    fake.faults = [Fault("POST .*models$", kind="slow")]
    async with client(url) as weaver:
        creating = asyncio.create_task(weaver.create_model("tiny"))
        await fake.hanging.wait()
        creating.cancel()
        fake.released.set()
        with pytest.raises(asyncio.CancelledError):
            await creating
        assert fake.terminated == list(fake.models)
        assert len(fake.terminated) == 1


async def test_leaving_ends_all_that_was_made_even_after_an_error(
    fake: FakeWeaver, url: str
) -> None:
    async def use() -> None:
        async with client(url) as weaver:
            await weaver.create_model("tiny")
            await weaver.create_model("tiny")
            await weaver.sampling_session(base_model="tiny")
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="the caller's own"):
        await use()
    assert sorted(fake.terminated) == sorted(fake.models)
    assert not fake.samplers
    assert len(asyncio.all_tasks()) == 1, "the heartbeat has ended"


async def test_leaving_a_service_that_is_gone_is_no_error(
    fake: FakeWeaver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with client(url) as weaver:
        model = await weaver.create_model("tiny")
        fake.faults = [Fault(".", kind="drop_before", times=10**6)]
    assert not fake.terminated
    assert "could not clean up" in caplog.text
    assert model.id in caplog.text


async def test_the_session_is_kept_alive(
    fake: FakeWeaver, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.adapters.weaver.client.HEARTBEAT", 0.0)
    broken = [Fault("heartbeat", status=400, times=2), Fault("heartbeat", kind="slow", skip=2)]
    fake.faults = broken
    async with client(url) as weaver:
        await fake.hanging.wait()  # the fifth beat: two failed, two went well
        assert weaver.session_id == fake.sessions[0]
        fake.released.set()


# The key, and what the service offers


async def test_a_wrong_key_is_told_and_never_shown(
    fake: FakeWeaver, url: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    secret = "sk-very-secret"
    weaver = client(url, api_key=secret)
    with pytest.raises(RemoteError, match="check the API key") as caught:
        await weaver.__aenter__()
    assert caught.value.status == 401
    shown = f"{weaver!r} {weaver._http!r} {caught.value} {caught.value!r} {caplog.text}"
    assert secret not in shown


async def test_the_key_comes_from_the_environment(
    fake: FakeWeaver, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEAVER_API_KEY", KEY)
    monkeypatch.setenv("WEAVER_PROJECT_ID", "p-1")
    async with client(url, api_key=None) as weaver:
        assert KEY not in repr(weaver)
    assert fake.log[0][2]["project_id"] == "p-1"
