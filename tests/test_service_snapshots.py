"""Checkpoints, snapshots and samples of the local service, over the Tinker protocol."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest
import torch

from retrain.service.app import ServiceApp
from retrain.service.core import Service
from retrain.service.state import ServiceSettings
from retrain.service.store import CheckpointStore
from tests.service_kit import TOKENS, Tinker, datum, dense, in_process, passed, reference


@pytest.fixture
async def tinker(tmp_path):
    async with in_process(tmp_path) as client:
        await client.start()
        yield client


async def test_likeliest_and_given_tokens_of_the_prompt_have_the_models_log_probs(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    sampler, every = await tinker.snapshot(3, 0), reference(tinker)
    targets = torch.tensor([[71, -1], [5, 6], [-1, -1], [74, 0]])
    future = await tinker.asample(
        *(sampler, 0),
        num_samples=2,
        prompt=datum(TOKENS[:-1])["model_input"],
        sampling_params={"max_tokens": 6, "stop": []},
        prompt_logprobs=True,
        prompt_logprobs_last_n=3,
        topk_prompt_logprobs=2,
        topk_sample_logprobs=3,
        target_prompt_logprobs=dense(targets, "int64"),
    )
    found = await tinker.result(future)
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


async def test_a_snapshot_is_not_changed_by_later_steps(tinker):
    await tinker.forward_backward(1)
    await tinker.step(2)
    snapshot = await tinker.snapshot(3, 0)
    before = await tinker.score(snapshot, 0)
    assert before == pytest.approx(await tinker.logprobs(4), abs=1e-5)
    await tinker.forward_backward(5)
    await tinker.step(6)
    assert await tinker.score(snapshot, 1) == before
    later = await tinker.snapshot(7, 1)
    assert await tinker.score(later, 0) == pytest.approx(await tinker.logprobs(8), abs=1e-5)
    assert await tinker.score(later, 1) != before


async def test_more_snapshots_than_live_samplers_are_all_served(tmp_path):
    async with in_process(tmp_path, max_live_samplers=2) as tinker:
        await tinker.start()
        samplers, expected = [], []
        for i in range(4):
            await tinker.forward_backward(4 * i + 1)
            await tinker.step(4 * i + 2)
            samplers.append(await tinker.snapshot(4 * i + 3, i))
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
        await tinker.score(await tinker.snapshot(1, 0), 0)
        service = tinker.app.service
        assert len(service._pool._live) == 1
        assert list(tmp_path.glob("*/sampler_weights/*"))
        finish = {"reason": {"type": "success"}, "detail": None}
        await tinker.post(f"sessions/{tinker.session_id}/finish", finish)
        assert not service._pool._live
        assert not service.models
        assert not list(tmp_path.glob("*/sampler_weights/*"))
        await tinker.post("session_heartbeat", {"session_id": tinker.session_id}, 410)
        await tinker.post("get_info", {"model_id": tinker.model_id}, 404)
        monkeypatch.setattr("retrain.service.memory.free_memory", lambda device: 0)
        tinker.session_id = (await tinker.post("create_session", {}))["session_id"]
        body = {"session_id": tinker.session_id, "model_seq_id": 0, "base_model": "tiny"}
        refused = await tinker.result(await tinker.post("create_model", body))
        assert "memory" in refused["error"]
        assert not service.models


async def test_samples_have_the_asked_shape_and_are_drawn_once_a_number(tinker):
    sampler = await tinker.snapshot(1, 0)
    params = {"max_tokens": 4, "temperature": 1.0, "top_k": -1}
    future = await tinker.asample(sampler, 0, num_samples=3, sampling_params=params)
    assert len(future["sample_sequence_ids"]) == 3
    drawn = (await tinker.result(future))["sequences"]
    assert [len(one["tokens"]) == len(one["logprobs"]) for one in drawn] == [True] * 3
    assert await tinker.asample(sampler, 0, num_samples=3, sampling_params=params) == future
    assert (await tinker.result(future))["sequences"] == drawn
    await tinker.asample(sampler, 0, 409, num_samples=2, sampling_params=params)


UNSAMPLEABLE = [
    ({"prompt": {"chunks": []}}, "prompt"),
    ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, "encoded_text"),
    ({"topk_prompt_logprobs": 200}, "0 to 128"),
    ({"topk_sample_logprobs": 10**400}, "0 to 128"),
    ({"record_stability_info": True}, "record_stability_info"),
    ({"prompt_alt_tokens_k": 1}, "prompt_alt_tokens_k"),
    ({"prompt_logprobs_last_n": 2}, "prompt_logprobs: true"),
    ({"target_prompt_logprobs": {"data": [1], "dtype": "int64"}}, "got shape [1], expected [5"),
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
    sampler = await tinker.snapshot(1, 0)
    for changes, named in UNSAMPLEABLE:
        reply = await tinker.asample(sampler, 0, 400, **changes)
        assert named in reply["detail"]


async def test_a_base_model_can_be_sampled_and_another_one_cannot(tinker):
    sampler = await tinker.base_sampler(5)
    assert await tinker.score(sampler, 0) == pytest.approx(await tinker.logprobs(1), abs=1e-5)
    body = {"session_id": tinker.session_id, "sampling_session_seq_id": 6}
    reply = await tinker.post("create_sampling_session", {**body, "base_model": "llama"}, 400)
    assert "'llama'" in reply["detail"]


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
    tinker.model_id = await tinker.loaded(path, 1)
    assert tinker.model_id == f"{tinker.session_id}:train:1"
    await tinker.forward_backward(1)
    await tinker.step(2)
    assert await tinker.logprobs(3) == expected


async def test_loading_is_a_models_first_request_or_none(tinker):
    path = (await tinker.done("save_weights", 1, path="one"))["path"]
    reply = await tinker.submit("load_weights", 2, expect=400, path=path, optimizer=False)
    assert "seq_id 2" in reply["detail"]
    tinker.model_id = await tinker.model(1)
    assert (await tinker.done("load_weights", 1, path=path, optimizer=True))["path"] == path


async def test_a_taken_name_is_a_conflict_unless_it_may_be_overwritten(tinker):
    await tinker.done("save_weights", 1, path="one")
    failed = await tinker.done("save_weights", 2, path="one")
    assert failed["category"] == "user"
    assert "path" in await tinker.done("save_weights", 3, path="one", overwrite=True)


async def test_checkpoints_survive_the_server_and_models_do_not(tmp_path):
    async with in_process(tmp_path) as tinker:
        await tinker.start()
        await tinker.forward_backward(1)
        await tinker.step(2)
        path = (await tinker.done("save_weights", 3, path="one"))["path"]
        sampler = (await tinker.done("save_weights_for_sampler", 4, path="two"))["path"]
        await tinker.snapshot(5, 0)
        expected, gone = await tinker.logprobs(6), tinker.model_id
    async with in_process(tmp_path) as tinker:
        await tinker.post("get_info", {"model_id": gone}, 404)
        tinker.session_id = (await tinker.post("create_session", {}))["session_id"]
        assert await tinker.logprobs(1, await tinker.loaded(path)) == expected
        made = await tinker.base_sampler(0, model_path=sampler)
        assert await tinker.score(made, 0) == pytest.approx(expected, abs=1e-5)
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


async def test_snapshots_without_a_name_go_when_nobody_samples_them_any_more(tmp_path, monkeypatch):
    threads, delete = set(), CheckpointStore.delete
    monkeypatch.setattr(
        CheckpointStore,
        "delete",
        lambda self, place: (threads.add(threading.current_thread()), delete(self, place)),
    )
    async with in_process(tmp_path, snapshot_ttl=-1.0) as tinker:
        await tinker.start()
        old, new = [await tinker.snapshot(number + 1, number) for number in range(2)]
        named = (await tinker.done("save_weights_for_sampler", 3, path="kept"))["path"]
        made = await tinker.base_sampler(2, model_path=named)
        await tinker.app.service.drop_unused()
        await tinker.get(f"samplers/{old}", 404)
        for kept in (new, made):
            await tinker.get(f"samplers/{kept}")
        assert len(list(tmp_path.glob("*/sampler_weights/*"))) == 2
    assert threads
    assert threading.current_thread() not in threads


async def test_a_model_that_can_not_be_added_leaves_no_job_and_may_be_asked_for_again(
    tinker, monkeypatch, caplog
):
    body = {"session_id": tinker.session_id, "model_seq_id": 9, "base_model": "tiny"}
    with monkeypatch.context() as patch:
        patch.delattr(Service, "lane")
        await tinker.post("create_model", body, 500)
    await tinker.post("create_model", body)
    assert not caplog.messages


async def test_leaving_the_service_answers_whoever_waits_and_ends_its_threads(tmp_path):
    app = ServiceApp(ServiceSettings(folder=tmp_path))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://local") as http:
        tinker = Tinker(http, app)
        async with app:
            await tinker.start()
            behind_a_gap = await tinker.submit("forward_backward", 9, **passed())
            sampler = await tinker.snapshot(1, 0)
            drawing = await tinker.asample(sampler, 0, tokens=1000, num_samples=64)
            asking = [asyncio.create_task(tinker.result(one)) for one in (behind_a_gap, drawing)]
            await asyncio.sleep(0)
        gap, drawn = await asyncio.gather(*asking)
        assert gap["category"] == drawn["category"] == "server"
    left = {t.name for t in threading.enumerate() if t.name.startswith("retrain")}
    assert not left - {"retrain-user-code"}  # of other tests
