"""The Tinker protocol of the local service, spoken by hand."""

from __future__ import annotations

import asyncio
import math
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
import torch
import zstandard

from retrain.protocols.tinker import messages
from retrain.protocols.tinker.values import Datum, ForwardBackward, Tensor
from retrain.service.app import ServiceApp
from retrain.service.core import Service
from retrain.service.state import ServiceSettings
from retrain.service.store import CheckpointPlace, CheckpointStore, Saved
from retrain.service.tuning import Tuning
from tests.service_kit import CROSS_ENTROPY, TOKENS, Tinker, datum, in_process, passed

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
    norm = (await tinker.result(futures[0]))["metrics"]["grad_norm"]
    model = tinker.app.service.models[tinker.model_id]
    assert model.trainer.steps == 1
    twin = await tinker.model(1)  # the same seed, trained without repeats
    other = {"model_id": twin, **passed()}
    await tinker.result(await tinker.post("forward_backward", {**other, "seq_id": 1}))
    stepped = await tinker.post("optim_step", {"model_id": twin, "seq_id": 2, **step})
    assert (await tinker.result(stepped))["metrics"]["grad_norm"] == pytest.approx(norm)


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
        assert "seq_id 1, which never arrived" in failed["error"]


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


def reference(tinker) -> torch.Tensor:
    """The trained model's log-probs at TOKENS[:-1], (5, V), by a plain forward."""
    model = tinker.app.service.models[tinker.model_id].trainer.model
    return model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)


async def gradient_norm(tinker, seq_id: int, loss: torch.Tensor) -> tuple[float, float]:
    """The service's gradient norm after its passes, and torch's of `loss`."""
    trained = list(tinker.app.service.models[tinker.model_id].trainer._trained.values())
    expected = torch.stack([g.norm() for g in torch.autograd.grad(loss, trained)]).norm()
    return (await tinker.step(seq_id, 0.0))["metrics"]["grad_norm"], float(expected)


def wide(tensor, dtype):
    return {"data": tensor.flatten().tolist(), "dtype": dtype, "shape": list(tensor.shape)}


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
@pytest.mark.parametrize("form", [wide, sparse])
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


async def test_likeliest_and_given_tokens_of_the_prompt_have_the_models_log_probs(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    sampler, every = await sampler_of(tinker, 3, 0), reference(tinker)
    targets = torch.tensor([[71, -1], [5, 6], [-1, -1], [74, 0]])
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 2,
        "prompt": datum(TOKENS[:-1])["model_input"],
        "sampling_params": {"max_tokens": 6, "stop": []},
        "prompt_logprobs": True,
        "prompt_logprobs_last_n": 3,
        "topk_prompt_logprobs": 2,
        "topk_sample_logprobs": 3,
        "target_prompt_logprobs": wide(targets, "int64"),
    }
    found = await tinker.result(await tinker.post("asample", body))
    values, ids = every.topk(2)
    tops, scores = found["topk_prompt_logprobs"], found["prompt_logprobs"]
    assert (tops[:2], scores[:2]) == ([None] * 2, [None] * 2)
    for position in range(2, 5):
        assert [token for token, _ in tops[position]] == ids[position - 1].tolist()
        wanted = pytest.approx(values[position - 1].tolist(), abs=1e-4)
        assert [logprob for _, logprob in tops[position]] == wanted
        own = every[position - 1, TOKENS[position]].item()
        assert scores[position] == pytest.approx(own, abs=1e-4)
    given = every[:4].gather(1, targets.clamp(min=0)).masked_fill(targets < 0, 0.0)
    assert found["target_prompt_logprobs"]["shape"] == [4, 2]
    wanted = pytest.approx(given.flatten().tolist(), abs=1e-4)
    assert found["target_prompt_logprobs"]["data"] == wanted
    for sequence in found["sequences"]:
        assert len(sequence["tokens"]) == 6  # stop: [] goes on past the end of sequence
        for *drawn, top in zip(
            *(sequence[name] for name in ("tokens", "logprobs", "topk_logprobs")), strict=True
        ):
            assert len(top) == 3
            assert drawn[0] not in {token for token, _ in top} or drawn in top


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
    ("load_weights", {"path": "tinker://m/sampler_weights/n", "optimizer": True}, "sampling"),
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
    reply = await tinker.post("forward_backward", expect=400, content=body, headers=PROTOBUF)
    assert "expected a finite number" in reply["detail"]


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
    assert "check logprobs" in failed["error"]
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


async def sampler_of(tinker: Tinker, seq_id: int, number: int) -> str:
    saved = await tinker.done("save_weights_for_sampler", seq_id, sampling_session_seq_id=number)
    return saved["sampling_session_id"]


async def test_a_snapshot_is_not_changed_by_later_steps(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    snapshot = await sampler_of(tinker, 3, 0)
    before = await tinker.score(snapshot, 0)
    assert before == pytest.approx(await tinker.logprobs(4), abs=1e-5)
    await tinker.forward_backward(5)
    await tinker.step(6)
    assert await tinker.score(snapshot, 1) == before
    later = await sampler_of(tinker, 7, 1)
    assert await tinker.score(later, 0) == pytest.approx(await tinker.logprobs(8), abs=1e-5)
    assert await tinker.score(later, 1) != before


async def test_more_snapshots_than_live_samplers_are_all_served(tmp_path):
    async with in_process(tmp_path, max_live_samplers=2) as tinker:
        await tinker.start()
        samplers, expected = [], []
        for i in range(4):
            await tinker.forward_backward(4 * i + 1)
            await tinker.step(4 * i + 2)
            samplers.append(await sampler_of(tinker, 4 * i + 3, i))
            expected.append(await tinker.logprobs(4 * i + 4))
        for seq_id in range(3):  # all at once, so that they fight for two places
            scores = await asyncio.gather(*(tinker.score(one, seq_id) for one in samplers))
            for score, wanted in zip(scores, expected, strict=True):
                assert score == pytest.approx(wanted, abs=1e-5)


async def test_p14_a_session_that_ends_frees_its_samplers_and_a_full_memory_its_process(
    tmp_path, monkeypatch
):
    async with in_process(tmp_path) as tinker:
        await tinker.start()
        await tinker.score(await sampler_of(tinker, 1, 0), 0)
        service = tinker.app.service
        assert len(service._pool._live) == 1
        await tinker.post(f"sessions/{tinker.session_id}/finish", {})
        assert not service._pool._live
        assert not service.models
        monkeypatch.setattr("retrain.service.memory.free_memory", lambda device: 0)
        tinker.session_id = (await tinker.post("create_session", {}))["session_id"]
        body = {
            "session_id": tinker.session_id,
            "model_seq_id": 0,
            "base_model": "tiny",
            "lora_config": {"rank": 4},
        }
        future = await tinker.post("create_model", body)
        refused = await tinker.result(future)
        assert "memory" in refused["error"]
        assert not service.models


async def test_samples_have_the_asked_shape_and_are_drawn_once_a_number(tinker):
    sampler = await sampler_of(tinker, 1, 0)
    body = {
        "sampling_session_id": sampler,
        "seq_id": 0,
        "num_samples": 3,
        "prompt": datum()["model_input"],
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1},
    }
    future = await tinker.post("asample", body)
    assert len(future["sample_sequence_ids"]) == 3
    drawn = (await tinker.result(future))["sequences"]
    assert [len(one["tokens"]) == len(one["logprobs"]) for one in drawn] == [True] * 3
    assert await tinker.post("asample", body) == future
    assert (await tinker.result(future))["sequences"] == drawn
    await tinker.post("asample", {**body, "num_samples": 2}, 409)


UNSAMPLEABLE = [
    ({"prompt": {"chunks": []}}, "prompt"),
    ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "encoded_text"),
    ({"topk_prompt_logprobs": 200}, "0 to 128"),
    ({"topk_sample_logprobs": 10**400}, "0 to 128"),
    ({"record_stability_info": True}, "record_stability_info"),
    ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
    ({"prompt_logprobs_last_n": 2}, "prompt_logprobs: true"),
    ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "got shape [1], expected [4"),
    ({"seq_id": None}, "seq_id"),
    ({"seq_id": 2**63}, "seq_id: got 9223372036854775808"),
    ({"num_samples": 5_000_000}, "1 to 1024"),
    ({"sampling_params": {"temperature": 10**19}}, "temperature: got 1e+19"),
    ({"sampling_params": {"temperature": 10**401}}, "temperature"),
    ({"sampling_params": {"temperature": 1e-40}}, "temperature: got 1e-40"),
    ({"sampling_params": {"top_k": 2**63}}, "top_k: got 9223372036854775808"),
    ({"sampling_params": {"top_k": 2**40}}, "top_k: got 1099511627776"),
    ({"sampling_params": {"top_p": 1e-300}}, "top_p: got 1e-300"),
    ({"sampling_params": {"seed": 2**64}}, "seed: got 18446744073709551616"),
    ({"sampling_params": {"max_tokens": 0}}, "max_tokens: got 0"),
    ({"sampling_params": {"stop": ["x"] * 300}}, "256"),
    ({"sampling_params": {"stop": ["x" * 10_000]}}, "4096"),
    ({"prompt": {"chunks": [5]}}, "chunks[0]: got 5"),
    ({"prompt": {"chunks": [{"tokens": [70] * 1024}]}}, "1024"),
]


async def test_a_sample_that_cannot_be_served_is_refused(tinker):
    sampler = await sampler_of(tinker, 1, 0)
    body = {"sampling_session_id": sampler, "seq_id": 0, "prompt": datum()["model_input"]}
    for changes, named in UNSAMPLEABLE:
        reply = await tinker.post("asample", {**body, **changes}, 400)
        assert named in reply["detail"]


async def test_a_base_model_can_be_sampled_and_another_one_cannot(tinker):
    body = {"session_id": tinker.session_id, "sampling_session_seq_id": 5, "base_model": "tiny"}
    sampler = (await tinker.post("create_sampling_session", body))["sampling_session_id"]
    assert await tinker.score(sampler, 0) == pytest.approx(await tinker.logprobs(1), abs=1e-5)
    reply = await tinker.post("create_sampling_session", {**body, "base_model": "llama"}, 400)
    assert "'llama' is not served" in reply["detail"]


async def test_a_checkpoint_goes_on_where_it_was_saved_with_its_optimizer(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    path = (await tinker.done("save_weights", 3, path="one"))["path"]
    assert path == f"tinker://{tinker.model_id}/weights/one"
    await tinker.forward_backward(4)
    await tinker.step(5)
    expected = await tinker.logprobs(6)

    info = await tinker.post("weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["train_unembed"]) == ("tiny", 8, True)
    body = {"session_id": tinker.session_id, "model_seq_id": 1, "path": path, "optimizer": True}
    loaded = await tinker.result(await tinker.post("load_weights", body))
    assert loaded["model_id"] == f"{tinker.session_id}:train:1"
    tinker.model_id = loaded["model_id"]
    await tinker.forward_backward(1)
    await tinker.step(2)
    assert await tinker.logprobs(3) == expected


async def test_loading_is_a_models_first_request_or_none(tinker):
    path = (await tinker.done("save_weights", 1, path="one"))["path"]
    reply = await tinker.submit("load_weights", 2, expect=400, path=path, optimizer=False)
    assert "not permitted with seq_id 2" in reply["detail"]
    tinker.model_id = await tinker.model(1)
    assert (await tinker.done("load_weights", 1, path=path, optimizer=True))["path"] == path


async def test_a_taken_name_is_a_conflict_unless_it_may_be_overwritten(tinker):
    await tinker.done("save_weights", 1, path="one")
    failed = await tinker.done("save_weights", 2, path="one")
    assert "already exists" in failed["error"]
    assert "path" in await tinker.done("save_weights", 3, path="one", overwrite=True)


async def test_checkpoints_survive_the_server_and_models_do_not(tmp_path):
    async with in_process(tmp_path) as tinker:
        await tinker.start()
        await tinker.forward_backward(1)
        await tinker.step(2)
        path = (await tinker.done("save_weights", 3, path="one"))["path"]
        sampler = (await tinker.done("save_weights_for_sampler", 4, path="two"))["path"]
        await sampler_of(tinker, 5, 0)
        expected, gone = await tinker.logprobs(6), tinker.model_id
    async with in_process(tmp_path) as tinker:
        reply = await tinker.post("get_info", {"model_id": gone}, 404)
        assert "create a model from a checkpoint" in reply["detail"]
        tinker.session_id = (await tinker.post("create_session", {}))["session_id"]
        body = {"session_id": tinker.session_id, "model_seq_id": 0, "path": path}
        loaded = await tinker.result(await tinker.post("load_weights", {**body, "optimizer": True}))
        assert await tinker.logprobs(1, loaded["model_id"]) == expected
        session = {"session_id": tinker.session_id, "sampling_session_seq_id": 0}
        made = await tinker.post("create_sampling_session", {**session, "model_path": sampler})
        assert await tinker.score(made["sampling_session_id"], 0) == pytest.approx(
            expected, abs=1e-5
        )
        listed = (await tinker.get("checkpoints"))["checkpoints"]
        assert {one["tinker_path"] for one in listed} == {path, sampler}


async def test_a_deleted_checkpoint_is_gone(tinker, tmp_path):
    path = (await tinker.done("save_weights", 1, path="one"))["path"]
    where = f"training_runs/{tinker.model_id}/checkpoints"
    assert (await tinker.get(where))["checkpoints"][0]["checkpoint_id"] == "weights/one"
    await tinker.call("DELETE", f"{where}/weights/one", expect=204)
    await tinker.call("DELETE", f"{where}/weights/one", expect=404)
    await tinker.call("DELETE", f"{where}/one", expect=404)
    await tinker.post("weights_info", {"tinker_path": path}, 404)
    assert not list(tmp_path.glob("*/weights/one"))


async def test_no_name_leads_out_of_the_folder(tinker, tmp_path):
    secret = tmp_path.parent / "secret"
    secret.mkdir()
    (secret / "manifest.json").write_text("{}")
    for path in ("tinker://../weights/secret", "tinker://x/weights/..", "tinker://../../weights/x"):
        await tinker.post("weights_info", {"tinker_path": path}, 400)
    reply = await tinker.http.delete("/api/v1/training_runs/..%2F..%2Fx/checkpoints/weights/y")
    assert reply.status_code in (400, 404)
    assert secret.exists()


async def test_a_time_to_live_ends_a_checkpoint(tinker):
    path = (await tinker.done("save_weights", 1, path="one", ttl_seconds=3600))["path"]
    where = f"training_runs/{tinker.model_id}/checkpoints/weights/one/ttl"
    await tinker.call("PUT", where, {"ttl_seconds": None})
    listed = (await tinker.get("checkpoints"))["checkpoints"]
    assert listed[0]["expires_at"] is None
    store = tinker.app.service.store
    [saved] = store.list()
    store.expire_at(saved.place, -1.0)
    await tinker.post("weights_info", {"tinker_path": path}, 404)
    await tinker.done("save_weights", 2, path="two")  # makes room first
    assert not list(store.folder.glob("*/weights/one"))


def test_saving_and_deleting_never_disturb_a_look_at_all_checkpoints(tmp_path):
    store, over = CheckpointStore(tmp_path), threading.Event()

    def save(model):
        place = CheckpointPlace(model, "weights", "one")
        saved = Saved(place, "tiny", Tuning(rank=4), steps=0, optimizer=False)
        return store.save(saved, {"x": torch.zeros(1)})

    def churn():
        while not over.is_set():
            store.delete(save("busy").place)

    for number in range(40):
        save(f"m{number}")
    with ThreadPoolExecutor(1) as beside:
        churning = beside.submit(churn)
        try:
            for _ in range(100):
                assert len(store.list()) in (40, 41)
        finally:
            over.set()
        churning.result()


async def test_snapshots_without_a_name_go_when_nobody_samples_them_any_more(tmp_path, monkeypatch):
    threads, delete = set(), CheckpointStore.delete
    monkeypatch.setattr(
        CheckpointStore,
        "delete",
        lambda self, place: (threads.add(threading.current_thread()), delete(self, place)),
    )
    async with in_process(tmp_path, snapshot_ttl=-1.0) as tinker:
        await tinker.start()
        old, new = [await sampler_of(tinker, number + 1, number) for number in range(2)]
        named = (await tinker.done("save_weights_for_sampler", 3, path="kept"))["path"]
        session = {"session_id": tinker.session_id, "sampling_session_seq_id": 2}
        made = await tinker.post("create_sampling_session", {**session, "model_path": named})
        await tinker.app.service.drop_unused()
        await tinker.get(f"samplers/{old}", 404)
        for kept in (new, made["sampling_session_id"]):
            await tinker.get(f"samplers/{kept}")
        assert len(list(tmp_path.glob("*/sampler_weights/*"))) == 2
    assert threads
    assert threading.current_thread() not in threads


async def test_a_model_that_can_not_be_added_leaves_no_job_and_may_be_asked_for_again(
    tinker, monkeypatch, caplog
):
    body = {"session_id": tinker.session_id, "model_seq_id": 9, "base_model": "tiny"}
    with monkeypatch.context() as patch:
        patch.delattr(Service, "_lane")
        await tinker.post("create_model", body, 500)
    await tinker.post("create_model", body)
    assert not caplog.messages


async def test_a_finished_session_is_over_and_its_snapshots_with_it(tinker, tmp_path):
    await sampler_of(tinker, 1, 0)
    assert list(tmp_path.glob("*/sampler_weights/*"))
    finish = {"reason": {"type": "success"}, "detail": None}
    await tinker.post(f"sessions/{tinker.session_id}/finish", finish)
    await tinker.post("session_heartbeat", {"session_id": tinker.session_id}, 410)
    await tinker.post("get_info", {"model_id": tinker.model_id}, 404)
    assert not list(tmp_path.glob("*/sampler_weights/*"))


async def test_full_weights_are_trained_at_rank_0(tmp_path):
    async with in_process(tmp_path) as tinker:
        await tinker.start(rank=0)
        info = await tinker.post("get_info", {"model_id": tinker.model_id})
        assert not info["is_lora"]
        await tinker.forward_backward(1)
        await tinker.step(2)
        sampler = await sampler_of(tinker, 3, 0)
        score = await tinker.score(sampler, 0)
        assert score == pytest.approx(await tinker.logprobs(4), abs=1e-5)


async def test_leaving_the_service_answers_whoever_waits_and_ends_its_threads(tmp_path):
    app = ServiceApp(ServiceSettings(folder=tmp_path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://local") as http:
        tinker = Tinker(http, app)
        async with app:
            await tinker.start()
            behind_a_gap = await tinker.submit("forward_backward", 9, **passed())
            body = {
                "sampling_session_id": await sampler_of(tinker, 1, 0),
                "seq_id": 0,
                "prompt": datum()["model_input"],
                "num_samples": 64,
                "sampling_params": {"max_tokens": 1000},
            }
            drawing = await tinker.post("asample", body)
            asking = [asyncio.create_task(tinker.result(one)) for one in (behind_a_gap, drawing)]
            await asyncio.sleep(0)
        gap, drawn = await asyncio.gather(*asking)
        assert "which never arrived" in gap["error"]
        assert "shutting down" in drawn["error"]
    assert not [t.name for t in threading.enumerate() if t.name.startswith("retrain")]
