"""What one request may hold: counted before it is decoded, and checked before it is stored."""

from __future__ import annotations

import math
import time

import pytest
import zstandard

from retrain.protocols.tinker import messages, scanning
from retrain.protocols.tinker.values import Datum, ForwardBackward, Tensor
from retrain.service import reading
from retrain.service.errors import ServiceError
from retrain.service.reading import json_object, unzstd
from tests.chaos.requests import resident
from tests.service_kit import TOKENS, datum, in_process

MANY = 40 * 2**20


@pytest.fixture
async def tinker(tmp_path):
    async with in_process(tmp_path) as client:
        await client.start()
        yield client


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (zstandard.compress(b"[" + b"[]," * (MANY // 3) + b"[]]"), 413, "more than 16777216 bytes"),
        (b"[" * 600_000, 413, "600000 lists, objects and members"),
        (b"[" + b"1," * 2**25, 413, "33554433 values"),
        (b"[" * 200_000 + b"]" * 200_000, 400, "RecursionError"),
        (b'{"seq_id": ' + b"9" * 5000 + b"}", 400, "can't be read"),
        (b'{"model_id": "\xed\xa0\x80"}', 400, "can't be read"),
        (b'{"model_id": "\\ud800"}', 400, "half a surrogate pair"),
        (b'{"model_id": "\\ud83d\\ude00"}', 404, "is not on this service"),
        (b'{"\\udc00": []}', 400, "half a surrogate pair"),
        (b'{"model_id": "%s"}' % (b"x" * 10_000), 400, "a string of at most 4096 characters"),
    ],
    ids=range(10),
)
async def test_a_body_that_stands_for_too_much_is_refused_quickly(tinker, body, status, message):
    headers = {"Content-Encoding": "zstd"} if body[:4] == b"\x28\xb5\x2f\xfd" else {}
    start, before = time.process_time(), resident()
    reply = await tinker.post("get_info", expect=status, content=body, headers=headers)
    assert message in reply["detail"]
    assert len(reply["detail"]) < 300
    assert time.process_time() - start < 2  # 30 s in full
    assert resident() - before < 200 * 2**20


def test_a_body_that_compresses_well_is_read():
    zeros = bytes(reading._SMALL)
    assert unzstd(zstandard.compress(zeros), 2**30) == zeros
    with pytest.raises(ServiceError, match="more than 16777216 bytes"):
        unzstd(zstandard.compress(bytes(reading._SMALL + 1)), 2**30)
    text = b"".join(str(number).encode() for number in range(2**22))
    assert unzstd(zstandard.compress(text), 2**30) == text
    with pytest.raises(ServiceError, match="not valid zstd"):
        unzstd(b"no zstd at all", 100)


def test_an_empty_body_is_an_empty_object():
    assert json_object(b"", 1) == {}
    with pytest.raises(ServiceError, match="about 3 values, expected at most 2"):
        json_object(b"[1,2,3]", 2)


def request_bytes(datums: int) -> bytes:
    inputs = {"target_tokens": Tensor(TOKENS[1:], "int64"), "weights": Tensor([1.0] * 5)}
    sent = ForwardBackward("a", 7, [Datum(TOKENS[:-1], inputs)] * datums, "ppo", {"x": 1.0})
    return messages.encode_request(sent)


def test_the_fields_of_a_protobuf_body_are_counted_before_it_is_decoded():
    one, two = (scanning.count_fields(request_bytes(datums), 2**20) for datums in (1, 2))
    # Datum, chunk, its text, tokens; two entries of a key and a tensor of bytes, type and shape.
    assert two - one == 4 + 2 * (1 + 1 + 1 + 3)
    empty = b"\x1a\x00" * 2**20
    start = time.process_time()
    assert scanning.count_fields(empty, 1000) == 1001
    assert time.process_time() - start < 0.5
    assert scanning.address(request_bytes(1)) == ("a", 7)
    assert scanning.address(empty) is None
    for broken in (b"\x1a\x05\x00", b"\x1b", b"\xff" * 20, b"\x1a"):
        with pytest.raises(ValueError, match="not a protobuf message"):
            scanning.count_fields(broken, 100)


async def test_a_protobuf_body_of_a_million_empty_parts_is_refused(tinker):
    headers = {"Content-Type": "application/x-protobuf"}
    body = request_bytes(1) + b"\x1a\x00" * 2**20
    reply = await tinker.post("forward_backward", expect=413, content=body, headers=headers)
    assert "more than 262144 fields" in reply["detail"]
    assert await tinker.forward_backward(1)


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ('{"a": 1e999}', "not finite"),
        ('{"a": %s}' % ("[" * 30 + "]" * 30), "nested too deeply"),
        ('{"a": "%s"}' % ("x" * 70_000), "expected at most 65536"),
        ("[1]", "expected an object"),
    ],
)
async def test_metadata_that_cannot_be_sent_back_is_refused(tinker, metadata, message):
    for name, more in (
        ("create_session", '"tags": []'),
        ("save_weights", f'"model_id": "{tinker.model_id}", "seq_id": 1, "path": "a"'),
        ("create_model", f'"session_id": "{tinker.session_id}", "model_seq_id": 3'),
    ):
        body = f'{{{more}, "base_model": "tiny", "user_metadata": {metadata}}}'
        reply = await tinker.post(name, expect=400, content=body.encode())
        assert message in reply["detail"]
    await tinker.post("sessions", expect=201, json={"user_metadata": {"a": [{"b": 1}]}})
    if not metadata.startswith("["):
        body = f'{{"user_metadata": {metadata}}}'.encode()
        await tinker.post("sessions", expect=400, content=body)
    assert (await tinker.get("training_runs"))["cursor"]["total_count"] == 1
    assert (await tinker.get("checkpoints"))["checkpoints"] == []


@pytest.mark.parametrize("seconds", [10**18, 10**400, 0, 0.5, True])
async def test_a_time_to_live_is_from_a_second_to_ten_years(tinker, seconds):
    body = {"path": "a", "ttl_seconds": seconds}
    reply = await tinker.submit("save_weights", 1, expect=400, **body)
    assert "expected an integer from 1 to" in reply["detail"]


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("optim_step", {"adam_params": {"learning_rate": 10**400}}),
        ("optim_step", {"adam_params": {"eps": 1e39}}),
        ("optim_step", {"adam_params": {"learning_rate": 1e38}}),
        ("save_weights_for_sampler", {"sampling_session_seq_id": 10**30}),
        ("forward_backward", {"forward_backward_input": {"data": [5], "loss_fn": "ppo"}}),
    ],
)
async def test_a_number_that_no_float_holds_is_refused(tinker, name, body):
    await tinker.submit(name, 1, expect=400, **body)
    weights = {"target_tokens": ([1, 2, 3, 4, 5], "int64"), "weights": ([10**400] * 5,)}
    data = {"data": [datum(**weights)], "loss_fn": "cross_entropy"}
    reply = await tinker.submit("forward_backward", 1, expect=400, forward_backward_input=data)
    assert "expected a finite number" in reply["detail"]


async def test_a_model_that_diverged_says_so_instead_of_sending_nan(tinker):
    trained = tinker.app.service.models[tinker.model_id].trainer._trained
    for parameter in trained.values():
        parameter.data.fill_(math.nan)
    failed = await tinker.forward_backward(1)
    assert "weights have diverged" in failed.get("error", ""), failed
    snapshot = {"sampling_session_seq_id": 0}
    saved = await tinker.done("save_weights_for_sampler", 2, **snapshot)
    prompt = {"prompt": datum()["model_input"], "sampling_params": {"max_tokens": 2}}
    body = {"sampling_session_id": saved["sampling_session_id"], "seq_id": 0, **prompt}
    failed = await tinker.result(await tinker.post("asample", body))
    assert (failed["category"], "weights have diverged" in failed["error"]) == ("user", True)
    assert await tinker.model(1)


async def test_a_sampler_whose_worker_failed_is_replaced(tinker, monkeypatch):
    body = {"session_id": tinker.session_id, "sampling_session_seq_id": 5, "base_model": "tiny"}
    sampler = (await tinker.post("create_sampling_session", body))["sampling_session_id"]
    with monkeypatch.context() as patch:
        patch.setattr("retrain.engine.decoder.Drawer", None)  # a pass fails
        body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": datum()["model_input"]}
        failed = await tinker.result(await tinker.post("asample", body))
        assert (failed["category"], "worker failed" in failed["error"]) == ("server", True)
    assert await tinker.score(sampler, 1) == pytest.approx(await tinker.logprobs(1), abs=1e-5)
