"""What one request may hold: counted before it is decoded, and checked before it is stored."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import zstandard

from retrain.service import json_bodies
from retrain.service.errors import ServiceError
from retrain.service.json_bodies import unzstd
from retrain.wire.tinker import messages, scanning
from retrain.wire.tinker.values import Datum, ForwardBackward, Tensor
from tests.chaos.requests import resident
from tests.service_kit import TOKENS, datum, in_process

MANY = 40 * 2**20


@pytest.fixture
async def tinker(tmp_path):
    async with in_process(tmp_path) as client:
        await client.start()
        yield client


TOO_LARGE = [
    zstandard.compress(b"[" + b"[]," * (MANY // 3) + b"[]]"),
    b"[" * 600_000,
    b"[" + b"1," * 2**25,
]
MALFORMED = [
    b"[" * 200_000 + b"]" * 200_000,
    b'{"seq_id": ' + b"9" * 5000 + b"}",
    b'{"model_id": "\xed\xa0\x80"}',
    b'{"model_id": "\\ud800"}',
    b'{"\\udc00": []}',
    b'{"model_id": "%s"}' % (b"x" * 10_000),
]


async def test_a_body_that_stands_for_too_much_is_refused_before_it_is_decoded(tinker, monkeypatch):
    def decode(*_: object, **__: object) -> None:
        raise AssertionError("it takes 30 s and 2 GB")

    with monkeypatch.context() as patch:
        patch.setattr(json_bodies, "json", SimpleNamespace(loads=decode))
        for body in TOO_LARGE:
            before = resident()
            headers = {"Content-Encoding": "zstd"} if body[:4] == b"\x28\xb5\x2f\xfd" else {}
            await tinker.post("get_info", expect=413, content=body, headers=headers)
            assert resident() - before < 200 * 2**20
    for body in MALFORMED:
        reply = await tinker.post("get_info", expect=400, content=body)
        assert len(reply["detail"]) < 300
    await tinker.post("get_info", expect=404, content=b'{"model_id": "\\ud83d\\ude00"}')


def test_a_body_that_compresses_well_is_read():
    zeros = bytes(json_bodies._SMALL)
    assert unzstd(zstandard.compress(zeros), 2**30) == zeros
    with pytest.raises(ServiceError, match="16777216"):
        unzstd(zstandard.compress(bytes(json_bodies._SMALL + 1)), 2**30)
    text = b"".join(str(number).encode() for number in range(2**22))
    assert unzstd(zstandard.compress(text), 2**30) == text
    with pytest.raises(ServiceError, match="zstd"):
        unzstd(b"no zstd at all", 100)


def request_bytes(datums: int) -> bytes:
    inputs = {"target_tokens": Tensor(TOKENS[1:], "int64"), "weights": Tensor([1.0] * 5)}
    sent = ForwardBackward("a", 7, [Datum(TOKENS[:-1], inputs)] * datums, "ppo", {"x": 1.0})
    return messages.encode_request(sent)


def test_the_fields_of_a_protobuf_body_are_counted_before_it_is_decoded():
    one, two = (scanning.count_fields(request_bytes(datums), 2**20) for datums in (1, 2))
    # Datum, chunk, its text, tokens; two entries of a key and a tensor of bytes, type and shape.
    assert two - one == 4 + 2 * (1 + 1 + 1 + 3)
    empty = b"\x1a\x00" * 2**20
    assert scanning.count_fields(empty, 1000) == 1001  # the rest is not scanned


async def test_a_protobuf_body_of_a_million_empty_parts_is_refused(tinker):
    headers = {"Content-Type": "application/x-protobuf"}
    body = request_bytes(1) + b"\x1a\x00" * 2**20
    reply = await tinker.post("forward_backward", expect=413, content=body, headers=headers)
    assert "262144" in reply["detail"]
    assert await tinker.forward_backward(1)


BAD_METADATA = [
    '{"a": 1e999}',
    '{"a": %s}' % ("[" * 30 + "]" * 30),
    '{"a": "%s"}' % ("x" * 70_000),
    "[1]",
]


async def test_metadata_that_cannot_be_sent_back_is_refused(tinker):
    calls = (
        ("create_session", '"tags": []'),
        ("save_weights", f'"model_id": "{tinker.model_id}", "seq_id": 1, "path": "a"'),
        ("create_model", f'"session_id": "{tinker.session_id}", "model_seq_id": 3'),
    )
    for metadata in BAD_METADATA:
        for name, more in calls:
            body = f'{{{more}, "base_model": "tiny", "user_metadata": {metadata}}}'
            reply = await tinker.post(name, expect=400, content=body.encode())
            assert "user_metadata" in reply["detail"]
        if not metadata.startswith("["):
            body = f'{{"user_metadata": {metadata}}}'.encode()
            await tinker.post("sessions", expect=400, content=body)
    await tinker.post("sessions", expect=201, json={"user_metadata": {"a": [{"b": 1}]}})
    assert (await tinker.get("training_runs"))["cursor"]["total_count"] == 1
    assert (await tinker.get("checkpoints"))["checkpoints"] == []


UNREPRESENTABLE = [
    ("optim_step", {"adam_params": {"learning_rate": 10**400}}),
    ("optim_step", {"adam_params": {"eps": 1e39}}),
    ("optim_step", {"adam_params": {"learning_rate": 1e38}}),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 10**30}),
    ("forward_backward", {"forward_backward_input": {"data": [5], "loss_fn": "ppo"}}),
    *[
        ("save_weights", {"path": "a", "ttl_seconds": seconds})
        for seconds in (10**18, 10**400, 0, 0.5, True)
    ],
]


async def test_a_number_out_of_its_range_is_refused(tinker):
    for name, body in UNREPRESENTABLE:
        await tinker.submit(name, 1, expect=400, **body)
    weights = {"target_tokens": ([1, 2, 3, 4, 5], "int64"), "weights": ([10**400] * 5,)}
    data = {"data": [datum(**weights)], "loss_fn": "cross_entropy"}
    await tinker.submit("forward_backward", 1, expect=400, forward_backward_input=data)


async def test_a_model_that_diverged_says_so_instead_of_sending_nan(tinker):
    trained = tinker.app.service.models[tinker.model_id].trainer._trained
    for parameter in trained.values():
        parameter.data.fill_(math.nan)
    failed = await tinker.forward_backward(1)
    assert failed["category"] == "user"
    failed = await tinker.result(await tinker.asample(await tinker.snapshot(2, 0), 0))
    assert failed["category"] == "user"
    assert await tinker.model(1)


async def test_a_sampler_whose_worker_failed_is_replaced(tinker, monkeypatch):
    sampler = await tinker.base_sampler(5)
    with monkeypatch.context() as patch:
        patch.setattr("retrain.engine.decoder.Drawer", None)  # a pass fails
        failed = await tinker.result(await tinker.asample(sampler, 0))
        assert failed["category"] == "server"
    assert await tinker.score(sampler, 1) == pytest.approx(await tinker.logprobs(1), abs=1e-5)
