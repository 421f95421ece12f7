"""The Tinker protocol of the local service, spoken by hand."""

from __future__ import annotations

import math

import pytest
import torch
import zstandard

from retrain.wire.tinker import messages
from retrain.wire.tinker.values import Datum, ForwardBackward, Tensor
from tests.service_kit import CROSS_ENTROPY, TOKENS, datum, dense, in_process, passed, reference

PROTOBUF = {"Content-Type": "application/x-protobuf"}


@pytest.fixture
async def tinker(tmp_path):
    async with in_process(tmp_path) as client:
        await client.start()
        yield client


def proto(model_id: str, seq_id: int, loss: str = "cross_entropy") -> bytes:
    inputs = {
        "target_tokens": Tensor(TOKENS[1:], "int64"),
        "weights": Tensor([0.0, 1.0, 1.0, 1.0, 1.0]),
    }
    return messages.encode_request(
        ForwardBackward(model_id, seq_id, [Datum(TOKENS[:-1], inputs)], loss)
    )


async def test_a_model_learns_what_it_is_trained_on(tinker):
    losses = []
    for step in range(6):
        out = await tinker.forward_backward(2 * step + 1)
        losses.append(out["metrics"]["loss:sum"])
        stepped = await tinker.step(2 * step + 2)
        assert stepped["metrics"]["grad_norm"] > 0
    assert losses[-1] < 0.6 * losses[0]
    logprobs = out["loss_fn_outputs"][0]["logprobs"]
    assert logprobs["shape"] == [5]
    assert losses[-1] == pytest.approx(-sum(logprobs["data"][1:]), rel=1e-5)


async def test_protobuf_and_json_are_two_forms_of_one_request(tinker):
    plain = await tinker.forward_backward(1)
    future = await tinker.post(
        "forward_backward", content=proto(tinker.model_id, 2), headers=PROTOBUF
    )
    reply = await tinker.http.post(
        "/api/v1/retrieve_future",
        json={"request_id": future["request_id"]},
        headers={"Accept": "application/x-protobuf, application/json"},
    )
    assert reply.headers["content-type"] == "application/x-protobuf"
    output = messages.decode_output(reply.content)
    assert output.metrics["loss:sum"] == pytest.approx(plain["metrics"]["loss:sum"])
    assert output.logprobs[0] == pytest.approx(plain["loss_fn_outputs"][0]["logprobs"]["data"])


async def test_a_compressed_body_is_read_and_a_bomb_is_not(tmp_path):
    async with in_process(tmp_path, max_body=100_000) as tinker:
        await tinker.start()
        headers = {**PROTOBUF, "Content-Encoding": "zstd"}
        body = zstandard.compress(proto(tinker.model_id, 1))
        future = await tinker.post("forward_backward", content=body, headers=headers)
        assert (await tinker.result(future))["metrics"]["tokens:sum"] == 5
        bomb = zstandard.compress(bytes(10_000_000))
        await tinker.post("forward_backward", expect=413, content=bomb, headers=headers)
        await tinker.post("forward_backward", expect=413, content=bytes(200_000), headers=PROTOBUF)


async def test_a_repeated_request_is_applied_once(tinker):
    first = await tinker.submit("forward_backward", 1, **passed())
    again = await tinker.submit("forward_backward", 1, **passed())
    assert first == again
    step = {"adam_params": {"learning_rate": 1e-2}}
    futures = [await tinker.submit("optim_step", 2, **step) for _ in range(3)]
    assert futures[0] == futures[1] == futures[2]
    await tinker.result(futures[0])
    assert tinker.app.service.models[tinker.model_id].trainer.steps == 1


async def test_a_number_that_comes_again_with_another_body_is_a_conflict(tinker):
    await tinker.forward_backward(1)
    await tinker.submit("optim_step", 1, expect=409, adam_params={})
    await tinker.submit("forward_backward", 1, expect=409, **passed(datum(), datum()))


async def test_requests_run_by_number_however_they_arrive(tinker):
    step = await tinker.submit("optim_step", 3, adam_params={"learning_rate": 1e-2})
    second = await tinker.submit("forward_backward", 2, **passed())
    waiting = tinker.app.service.jobs.get(step["request_id"])
    assert waiting.state == "waiting"
    await tinker.submit("forward_backward", 1, **passed())
    norm = (await tinker.result(step))["metrics"]["grad_norm"]
    assert (await tinker.result(second))["metrics"]["tokens:sum"] == 5
    await tinker.forward_backward(4)
    single = (await tinker.step(5))["metrics"]["grad_norm"]
    assert norm > single  # two passes had added up before the step


async def test_a_request_behind_a_gap_says_so_and_fails_in_the_end(tmp_path):
    async with in_process(tmp_path, gap_timeout=0.2, long_poll=0.05) as tinker:
        session = (await tinker.post("create_session", {}))["session_id"]
        body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
        future = await tinker.post("create_model", body)
        assert await tinker.app.service.jobs.get(future["request_id"]).wait(30)
        tinker.model_id = future["model_id"]
        late = await tinker.submit("forward_backward", 2, **passed())
        assert (await tinker.result(late))["type"] == "try_again"
        assert "lower seq_id" in (await tinker.result(late))["queue_state_reason"]
        job = tinker.app.service.jobs.get(late["request_id"])
        await job.wait(10)
        failed = await tinker.result(late)
        assert failed["category"] == "user"
        assert "seq_id 1" in failed["error"]


async def test_after_a_rejected_call_the_next_number_runs_at_once(tinker):
    bad = passed(datum(**{**CROSS_ENTROPY, "weights": ([1.0],)}))
    behind = await tinker.submit("forward_backward", 2, **passed())
    assert tinker.app.service.jobs.get(behind["request_id"]).state == "waiting"
    await tinker.submit("forward_backward", 1, expect=400, **bad)
    assert (await tinker.result(behind))["metrics"]["tokens:sum"] == 5
    await tinker.submit("forward_backward", 1, expect=409, **passed())  # too late to correct it
    await tinker.submit("optim_step", 3, expect=400, adam_params={"lr": 1})
    path = {"path": f"tinker://{tinker.model_id}/weights/x", "optimizer": True}
    await tinker.submit("load_weights", 4, expect=404, **path)
    body = proto(tinker.model_id, 5, "no_such_loss")
    await tinker.post("forward_backward", expect=400, content=body, headers=PROTOBUF)
    assert (await tinker.step(6))["metrics"]["grad_norm"] > 0
    assert tinker.app.service.models[tinker.model_id].trainer.steps == 1


async def test_a_rejected_call_may_be_corrected_under_its_number(tinker):
    await tinker.submit("forward_backward", 1, expect=400, **passed(loss="no_such_loss"))
    assert (await tinker.forward_backward(1))["metrics"]["tokens:sum"] == 5


async def gradient_norm(tinker, seq_id: int, loss: torch.Tensor) -> tuple[float, float]:
    """The service's gradient norm after its passes, and torch's of `loss`."""
    trained = list(tinker.app.service.models[tinker.model_id].trainer._trained.values())
    expected = torch.stack([g.norm() for g in torch.autograd.grad(loss, trained)]).norm()
    return (await tinker.step(seq_id, 0.0))["metrics"]["grad_norm"], float(expected)


def sparse(tensor, dtype):
    csr = tensor.to_sparse_csr()
    return {
        "data": csr.values().tolist(),
        "dtype": dtype,
        "shape": list(tensor.shape),
        "sparse_crow_indices": csr.crow_indices().tolist(),
        "sparse_col_indices": csr.col_indices().tolist(),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("form", [dense, sparse])
async def test_several_targets_per_token_are_weighted_as_in_plain_torch(tinker, form):
    await tinker.forward_backward(1)
    await tinker.step(2)
    targets = torch.tensor([[71, 0, 9], [72, 5, 6], [0, 0, 0], [74, 73, 72], [75, 0, 0]])
    weights = torch.tensor([[0.5, 0.25, 0], [1, 0.5, 0.1], [0, 0, 0], [-1, 2, 0.5], [1, 0, 0]])
    logprobs = reference(tinker)
    loss = -(weights * logprobs.gather(1, targets)).sum() - logprobs[range(1, 5), TOKENS[2:]].sum()
    given = {"target_tokens": form(targets, "int64"), "weights": form(weights, "float32")}
    out = await tinker.forward_backward(3, {**datum(), "loss_fn_inputs": given}, datum())
    found, single = (one["logprobs"] for one in out["loss_fn_outputs"])
    assert (found["shape"], single["shape"]) == ([5, 3], [5])
    assert found["data"] == pytest.approx(logprobs.gather(1, targets).flatten().tolist(), abs=1e-5)
    assert out["metrics"]["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    norm, expected = await gradient_norm(tinker, 4, loss)
    assert norm == pytest.approx(expected, rel=1e-4)


BAD_SPARSE = [
    {"shape": [5, 10**9]},
    {"sparse_crow_indices": [0, 1]},
    {"sparse_crow_indices": [0, 2, 1, 2, 2, 2]},
    {"sparse_col_indices": [0, 3]},
    {"sparse_col_indices": [0]},
    {"sparse_col_indices": [0, "x"]},
]


async def test_a_sparse_tensor_whose_indices_do_not_fit_is_refused(tinker):
    good = {"dtype": "int64", "shape": [5, 3], "data": [71, 72]}
    good |= {"sparse_crow_indices": [0, 1, 2, 2, 2, 2], "sparse_col_indices": [0, 1]}
    for wrong in BAD_SPARSE:
        given = {"target_tokens": {**good, **wrong}, "weights": {**good, "dtype": "float32"}}
        body = passed({**datum(), "loss_fn_inputs": given})
        reply = await tinker.submit("forward_backward", 1, expect=400, **body)
        assert "datum 0: target_tokens" in reply["detail"], wrong


async def test_gspo_clips_the_ratio_of_the_sequence(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    logprobs = reference(tinker)[range(5), TOKENS[1:]]
    old = logprobs.detach() + torch.tensor([9.0, -0.3, 0.1, -0.4, 0.0])
    advantages, mask = torch.tensor([3.0, 1, -1, 0.5, 2]), torch.tensor([0.0, 1, 1, 1, 1])
    log_ratio = (logprobs.detach() - old)[mask != 0].mean()  # .15
    ratio = (log_ratio + logprobs - logprobs.detach()).exp()
    clipped = ratio.clamp(0.8, 1.1)
    loss = -torch.minimum(ratio * advantages, clipped * advantages).sum()
    data = inputs(
        logprobs=(old.tolist(),),
        advantages=(advantages.tolist(),),
        sequence_ratio_mask=(mask.tolist(),),
    )
    bounds = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.1}
    out = await tinker.forward_backward(3, data, loss="gspo", config=bounds)
    assert out["metrics"]["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    norm, expected = await gradient_norm(tinker, 4, loss)
    assert norm == pytest.approx(expected, rel=1e-4)
    assert norm > 0  # of the token with a negative advantage
    nothing = inputs(sequence_ratio_mask=([0.0] * 5,))
    await tinker.submit("forward_backward", 5, expect=400, **passed(nothing, loss="gspo"))


def inputs(**changes):
    given = {
        "target_tokens": ([71, 72, 73, 74, 75], "int64"),
        "logprobs": ([-1.0] * 5,),
        "advantages": ([1.0] * 5,),
    }
    return datum(**{name: value for name, value in {**given, **changes}.items() if value})


UNTRAINABLE = [
    ([inputs(logprobs=([-1.0] * 4,))], "ppo", "logprobs"),
    ([inputs(advantages=None)], "ppo", "advantages"),
    ([inputs(mask=([1.0] * 5,))], "ppo", "mask"),
    ([inputs(logprobs=([1] * 5, "int64"))], "ppo", "float32"),
    ([inputs(target_tokens=([1.0] * 5,))], "ppo", "int64"),
    ([inputs(target_tokens=([1, 2, 3, 4, 500], "int64"))], "ppo", "500"),
    ([inputs(target_tokens=([1, 2, 3, 4, -1], "int64"))], "ppo", "-1"),
    ([inputs(advantages=([True] * 5,))], "ppo", "advantages[0]"),
    ([inputs(), datum([1, 2, 999], **CROSS_ENTROPY)], "ppo", "datum 1: tokens: got token 999"),
    ([datum([], **CROSS_ENTROPY)], "cross_entropy", "datum 0"),
    ([datum([70] * 2000)], "cross_entropy", "1024"),
    ([], "cross_entropy", "datum"),
    ([inputs()], "pppo", "'ppo'"),
    ([inputs()], "dpo", "'dpo'"),
]


async def test_what_cannot_be_trained_is_refused_and_takes_no_number(tinker):
    for data, loss, named in UNTRAINABLE:
        body = {"forward_backward_input": {"data": data, "loss_fn": loss}}
        reply = await tinker.submit("forward_backward", 1, expect=400, **body)
        assert named in reply["detail"]
    await tinker.forward_backward(1)


BAD_CALLS = [
    ("forward_backward", passed(config={"beta": 1}), "beta"),
    ("forward_backward", passed(inputs(), loss="ppo", config={"clip_low_threshold": 2}), "1"),
    ("optim_step", {}, "adam_params"),
    ("optim_step", {"adam_params": {"lr": 1}}, "lr"),
    ("optim_step", {"adam_params": {"learning_rate": -1}}, "learning_rate: got -1"),
    ("optim_step", {"adam_params": {"beta1": 1.0}}, "beta1 1.0"),
    ("optim_step", {"adam_params": {"eps": "small"}}, "eps: got 'small'"),
    ("save_weights", {"path": "../escape"}, "../escape"),
    ("save_weights", {"path": "a/b"}, "a/b"),
    ("save_weights", {"path": ".hidden"}, ".hidden"),
    ("save_weights", {"path": "x", "ttl_seconds": -5}, "ttl_seconds"),
    ("save_weights_for_sampler", {"path": ".."}, ".."),
    ("save_weights_for_sampler", {"sampling_session_seq_id": 0, "kind": "inflight"}, "snapshot"),
    ("save_weights_for_sampler", {}, "sampling_session_seq_id"),
    ("load_weights", {"path": "tinker://a/b", "optimizer": True}, "tinker://a/b"),
    ("load_weights", {"path": "tinker://m/sampler_weights/n", "optimizer": True}, "MODEL/weights"),
]


async def test_a_call_with_bad_values_is_refused(tinker):
    for name, body, named in BAD_CALLS:
        reply = await tinker.submit(name, 1, expect=400, **body)
        assert named in reply["detail"], name
    for raw in (b"{", b"[]", b'{"model_id": NaN}', b"\xff", b"\x0a\xff"):  # no JSON
        await tinker.post("optim_step", expect=400, content=raw)
        await tinker.post("forward_backward", expect=400, content=raw, headers=PROTOBUF)


async def test_infinite_numbers_do_not_get_in_by_protobuf(tinker):
    values = {"target_tokens": Tensor([71], "int64"), "weights": Tensor([math.inf])}
    call = ForwardBackward(tinker.model_id, 1, [Datum([70], values)], "cross_entropy")
    body = messages.encode_request(call)
    await tinker.post("forward_backward", expect=400, content=body, headers=PROTOBUF)


async def test_unknown_ids_are_404s(tinker):
    for name in ("optim_step", "get_info", "unload_model"):
        await tinker.post(name, {"model_id": "nobody", "seq_id": 1, "adam_params": {}}, 404)
    await tinker.post("retrieve_future", {"request_id": "none"}, 404)
    await tinker.post("session_heartbeat", {"session_id": "none"}, 404)
    await tinker.get("samplers/none", 404)
    assert "Not Found" in (await tinker.get("nothing_like_it", 404))["detail"]
    assert "detail" in await tinker.get("optim_step", 405)


async def test_a_loss_that_overflows_fails_the_job_and_not_the_model(tinker):
    bad = inputs(logprobs=([-3000.0] * 5,))
    failed = await tinker.forward_backward(1, bad, loss="importance_sampling")
    assert failed["category"] == "user"
    await tinker.forward_backward(2)
    assert (await tinker.step(3))["metrics"]["grad_norm"] > 0


async def test_clip_thresholds_are_bounds_of_the_ratio(tinker):
    lp = (await tinker.forward_backward(1))["loss_fn_outputs"][0]["logprobs"]["data"]
    data = inputs(logprobs=([x - 0.5 for x in lp],))  # every ratio is e^0.5 = 1.6487

    async def loss(seq_id, name, **config):
        return (await tinker.forward_backward(seq_id, data, loss=name, config=config))["metrics"]

    assert (await loss(2, "ppo"))["loss:sum"] == pytest.approx(-5 * 1.2, rel=1e-5)
    wide = {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5}
    assert (await loss(3, "ppo", **wide))["loss:sum"] == pytest.approx(-5 * 1.5, rel=1e-5)
    exact = -math.exp(0.5) * sum(lp)
    assert (await loss(4, "cispo"))["loss:sum"] == pytest.approx(exact, rel=1e-5)
    dro = -(sum(lp) - 0.05 * 5 * 0.25)
    assert (await loss(5, "dro", beta=0.1))["loss:sum"] == pytest.approx(dro, rel=1e-5)
