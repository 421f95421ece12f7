"""The Weaver protocol of the local service, spoken by hand."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from tests.service_kit import TOKENS, Caller, Tinker, datum, in_process

LOGPROB = {"target_tokens": ([71, 72, 73, 74, 75], "int64")}


class Weaver(Caller):
    """One session and one model of the Weaver protocol, numbered by hand."""

    session_id = model_id = ""

    async def start(self, **model: Any) -> None:
        self.session_id = (await self.post("sessions", {"tags": []}, 201))["id"]
        self.model_id = (await self.model(1, **model))["id"]

    async def model(self, number: int, **model: Any) -> Any:
        body = {"model_seq_id": number, "base_model": "tiny", "lora_config": {"rank": 8}, **model}
        return await self.post(f"sessions/{self.session_id}/models", body, 201)

    async def start_pass(
        self, seq_id: int, *data: Any, loss: str = "cross_entropy", way: str = "forward-backward",
        expect: int = 202, **config: Any,
    ) -> Any:  # fmt: skip
        given: dict[str, Any] = {"data": list(data) or [datum()], "loss_fn": loss}
        if config:
            given["loss_fn_config"] = config
        payload = {"model_id": self.model_id, "seq_id": seq_id}
        payload[way.replace("-", "_") + "_input"] = given
        path = f"models/{self.model_id}/{way}-passes"
        return await self.post(path, {"payload": payload}, expect)

    async def passed(self, seq_id: int, *data: Any, **more: Any) -> Any:
        return (await self.end(await self.start_pass(seq_id, *data, **more)))["result"]

    async def logprobs(self, seq_id: int) -> list[float]:
        given = {"loss": "forward_logprob", "way": "forward"}
        return (await self.passed(seq_id, **given))["loss_fn_outputs"][0]["logprobs"]

    async def step(self, seq_id: int, expect: int = 202, **adam: float) -> Any:
        payload = {"seq_id": seq_id, "adam_params": {"learning_rate": 1e-2, **adam}}
        path = f"models/{self.model_id}/optimizer-steps"
        return await self.post(path, {"payload": payload}, expect)

    async def operate(self, path: str, body: Any) -> Any:
        return await self.end(await self.post(f"models/{self.model_id}/{path}", body, 202))

    async def look(self, operation: Any) -> Any:
        while operation["status"] in ("pending", "running"):
            operation = await self.get(f"operations/{operation['id']}")
        return operation

    async def end(self, operation: Any) -> Any:
        done = await self.look(operation)
        assert done["status"] == "done", done
        return done["response"]

    async def sampler(self, number: int, **what: Any) -> str:
        body = {"sampling_session_seq_id": number, "base_model": None, "model_path": None, **what}
        made = await self.post(f"sessions/{self.session_id}/sampling-sessions", body, 201)
        return made["id"]

    async def score(self, sampler: str) -> list[float]:
        body = {"prompt": datum(TOKENS)["model_input"]}
        started = await self.post(f"sampling-sessions/{sampler}/logprobs", body, 202)
        return (await self.end(started))["result"]["prompt_logprobs"]


@pytest.fixture
async def weaver(tmp_path):
    async with in_process(tmp_path, Weaver) as client:
        await client.start()
        yield client


async def test_both_protocols_train_the_same_numbers(weaver):
    ratio = {
        **LOGPROB,
        "logprobs": ([-4.0, -4.5, -5.0, -4.2, -4.8],),
        "advantages": ([1.0, -0.5, 0.3, 0.0, 2.0],),
    }
    masked = datum(**ratio, loss_mask=([0, 1, 1, 1, 1],))
    result = await weaver.passed(1, masked, loss="importance_sampling")
    norm = (await weaver.end(await weaver.step(2)))["metrics"]["grad_norm"]
    tinker = Tinker(weaver.http, weaver.app)
    await tinker.start()
    data = datum(**{**ratio, "advantages": ([0.0, -0.5, 0.3, 0.0, 2.0],)})
    out = await tinker.forward_backward(1, data, loss="importance_sampling")
    assert out["metrics"]["loss:sum"] == pytest.approx(result["metrics"]["loss:sum"], rel=1e-6)
    assert (await tinker.step(2))["metrics"]["grad_norm"] == pytest.approx(norm, rel=1e-5)


async def test_an_operation_of_the_other_protocol_is_unknown(weaver):
    session = (await weaver.post("create_session", {}))["session_id"]
    body = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    future = await weaver.post("create_model", body)
    await weaver.get(f"operations/{future['request_id']}", 404)
    await weaver.post("retrieve_future", {"request_id": (await weaver.start_pass(1))["id"]}, 404)


async def test_a_surrogate_has_the_gradient_of_the_loss_that_it_stands_for(weaver):
    await weaver.passed(1)
    norm = (await weaver.end(await weaver.step(2, learning_rate=0.0)))["metrics"]["grad_norm"]
    slopes = datum(**LOGPROB, surrogate_weights=([0.0, -1.0, -1.0, -1.0, -1.0],), note=([1.0],))
    await weaver.passed(3, slopes, loss="surrogate")
    again = (await weaver.end(await weaver.step(4, learning_rate=0.0)))["metrics"]["grad_norm"]
    assert again == pytest.approx(norm, rel=1e-6)


async def test_truncated_importance_sampling_caps_the_weights_and_keeps_their_gradient(weaver):
    lp = await weaver.logprobs(1)
    gaps, credit = [1.0, -0.5, 3.0, 0.2, 0.0], [1.0, 2.0, -1.0, 0.5, 1.0]
    old = [now - gap for now, gap in zip(lp, gaps, strict=True)]
    data = datum(**LOGPROB, logprobs=(old,), advantages=(credit,))

    async def outcome(seq_id, *data, **more):
        loss = (await weaver.passed(seq_id, *data, **more))["metrics"]["loss"]
        stepped = await weaver.end(await weaver.step(seq_id + 1, learning_rate=0.0))
        return loss, stepped["metrics"]["grad_norm"]

    for seq_id, cap, config in ((2, 2.0, {}), (6, 1.5, {"clip_ratio": 1.5})):
        weights = [min(math.exp(g), cap) * a for g, a in zip(gaps, credit, strict=True)]
        found = await outcome(seq_id, data, loss="truncated_importance_sampling", **config)
        plain = datum(**LOGPROB, weights=(weights,))
        assert found == pytest.approx(await outcome(seq_id + 2, plain), rel=1e-5)
    await weaver.start_pass(10, data, loss="importance_sampling", clip_ratio=2, expect=400)


async def test_an_ignored_target_carries_no_loss(weaver):
    out = await weaver.passed(
        1, datum(target_tokens=([71, -100, 73, 74, 75], "int64"), weights=([1.0] * 5,))
    )
    lp = out["loss_fn_outputs"][0]["logprobs"]
    assert out["metrics"]["tokens"] == 4
    assert out["metrics"]["loss"] == pytest.approx(-(sum(lp) - lp[1]), rel=1e-6)


async def test_a_repeated_number_is_the_same_operation_and_another_body_a_conflict(weaver):
    first = await weaver.start_pass(1)
    assert (await weaver.start_pass(1))["id"] == first["id"]
    steps = [await weaver.step(2) for _ in range(3)]
    assert len({step["id"] for step in steps}) == 1
    await weaver.end(steps[0])
    assert weaver.app.service.models[weaver.model_id].trainer.steps == 1
    reply = await weaver.step(1, expect=409)
    assert reply["error"] == "conflict"
    again = await weaver.model(1)
    assert again["id"] == weaver.model_id


async def test_a_burnt_number_holds_nothing_up(weaver):
    await weaver.passed(3)
    assert await weaver.end(await weaver.step(7))


async def test_datum_ids_come_back_in_order(weaver):
    data = [{**datum(), "datum_id": name} for name in ("b", "a")]
    out = await weaver.passed(1, *data)
    assert [one["datum_id"] for one in out["loss_fn_outputs"]] == ["b", "a"]


UNTRAINABLE = [
    ([datum()], {"loss": "ppo"}, "'ppo'"),
    ([datum()], {"loss": "forward_logprob"}, "forward_logprob"),
    ([datum()], {"entropy_coeff": 0.1}, "entropy_coeff: got 0.1"),
    ([datum()], {"temperature": 0.7}, "temperature: got 0.7"),
    ([datum()], {"unheard_of": 1}, "unheard_of"),
    ([datum(**LOGPROB)], {}, "weights"),
    ([datum(**LOGPROB, weights=([1.0],))], {}, "weights: got shape [1]"),
    ([datum(**LOGPROB, weights=([[1.0]] * 5,))], {}, "weights[0]"),
    ([datum(**LOGPROB, weights=([1.0] * 5,), loss_mask=([0.5] * 5,))], {}, "loss_mask"),
]


async def test_what_cannot_be_trained_is_refused(weaver):
    for data, more, named in UNTRAINABLE:
        reply = await weaver.start_pass(1, *data, **more, expect=400)
        assert (reply["error"], reply["retryable"]) == ("invalid_request", False)
        assert named in reply["message"]


async def test_a_call_for_another_model_than_the_paths_is_refused(weaver):
    payload = {"model_id": "another", "seq_id": 1, "adam_params": {}}
    path = f"models/{weaver.model_id}/optimizer-steps"
    reply = await weaver.post(path, {"payload": payload}, 400)
    assert "another" in reply["message"]
    await weaver.post("models/nobody/optimizer-steps", {"payload": payload}, 404)


async def test_a_failed_operation_says_why(weaver):
    failed = await weaver.look(await weaver.step(1))
    assert failed["status"] == "error"
    assert "forward_backward" in failed["error_message"]
    assert failed["error_details"]["operation_id"] == failed["id"]


async def test_an_exported_sampler_stays_as_later_steps_are_taken(weaver):
    await weaver.passed(1)
    await weaver.end(await weaver.step(2))
    exported = await weaver.operate("export-sampler", {"seq_id": 3, "path": "a"})
    sampler = await weaver.sampler(1, model_path=exported["model_path"])
    before = await weaver.score(sampler)
    assert before[0] is None
    assert before[1:] == pytest.approx(await weaver.logprobs(4), abs=1e-5)
    await weaver.passed(5)
    await weaver.end(await weaver.step(6))
    assert await weaver.score(sampler) == before
    await weaver.call("DELETE", f"sampling-sessions/{sampler}", expect=204)
    await weaver.get(f"sampling-sessions/{sampler}", 404)


async def test_samples_have_text_and_logprobs_and_obey_their_limits(weaver):
    sampler = await weaver.sampler(1, base_model="tiny")
    params = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 3, "seed": 5}
    body = {"prompt": datum()["model_input"], "sampling_params": params, "num_samples": 4}
    path = f"sampling-sessions/{sampler}/samples"
    started = await asyncio.gather(*(weaver.post(path, body, 202) for _ in range(2)))
    one, other = [(await weaver.end(start))["result"]["sequences"] for start in started]
    tokens = [[row["tokens"] for row in rows] for rows in (one, other)]
    assert tokens[0] == tokens[1]  # the seed decides
    assert [len(s["tokens"]) == len(s["logprobs"]) <= 3 for s in one] == [True] * 4
    tokenizer = weaver.app.service.tokenizer
    assert [s["text"] for s in one] == [tokenizer.decode(s["tokens"]) for s in one]
    await weaver.post(path, {**body, "prompt": {"chunks": []}}, 400)
    for wrong in ({"return_old_logprob": True}, {"num_samples": 0}):
        await weaver.post(path, {**body, **wrong}, 400)
    likeliest = await weaver.end(await weaver.post(path, {**body, "topk_prompt_logprobs": 2}, 202))
    tops = likeliest["result"]["topk_prompt_logprobs"]
    assert tops[0] is None
    assert [len(top) for top in tops[1:]] == [2] * 4
    assert tops[1][0][1] > tops[1][1][1]


async def test_a_state_is_loaded_with_or_without_its_optimizer(weaver):
    await weaver.passed(1)
    await weaver.end(await weaver.step(2))
    kinds = {"full": "weight_and_optimizer", "bare": "weight"}
    saved = {
        name: await weaver.operate("checkpoints", {"type": kind, "name": name})
        for name, kind in kinds.items()
    }
    await weaver.passed(3)
    await weaver.end(await weaver.step(4))
    expected = await weaver.logprobs(5)
    listed = (await weaver.get(f"models/{weaver.model_id}/checkpoints"))["items"]
    assert {one["name"]: one["type"] for one in listed} == kinds

    weaver.model_id = (await weaver.model(2))["id"]
    bare = {"path": saved["bare"]["path"], "include_optimizer": True}
    await weaver.post(f"models/{weaver.model_id}/load", bare, 400)
    await weaver.operate("load", {"path": saved["full"]["path"], "include_optimizer": True})
    await weaver.passed(1)
    await weaver.end(await weaver.step(2))
    assert await weaver.logprobs(3) == expected


async def test_a_time_to_live_is_set_and_taken_back(weaver):
    saved = await weaver.operate("checkpoints", {"type": "weight", "name": "x", "ttl_seconds": 60})
    assert saved["ttl_seconds"] == 60
    path = f"models/{weaver.model_id}/checkpoints/ttl"
    kept = await weaver.call("PATCH", path, {"path": saved["path"], "ttl_seconds": None})
    assert kept["expires_at"] is None
    other = {"path": "weaver://someone/checkpoints/x", "ttl_seconds": None}
    await weaver.call("PATCH", path, other, expect=400)


async def test_full_weights_are_a_mode_and_terminated_models_are_gone(weaver):
    made = await weaver.model(2, training_mode="full_ft", lora_config=None)
    assert made["training_mode"] == "full_ft"
    weaver.model_id = made["id"]
    await weaver.passed(1)
    await weaver.end(await weaver.step(2))
    await weaver.post(f"models/{weaver.model_id}/terminate", None)
    await weaver.get(f"models/{weaver.model_id}", 404)
    nothing = {"rank": 4, "train_attn": False, "train_mlp": False, "train_unembed": False}
    body = {"model_seq_id": 3, "base_model": "tiny", "lora_config": nothing}
    await weaver.post(f"sessions/{weaver.session_id}/models", body, 400)


async def test_heartbeats_metrics_and_catalogue_are_answered(weaver):
    await weaver.post(f"sessions/{weaver.session_id}/heartbeat", expect=204)
    await weaver.post(f"sessions/{weaver.session_id}/metrics", {"metrics": []})
    [item] = (await weaver.get("supported-models?limit=100&offset=0"))["items"]
    assert item["name"] == "tiny"
    assert (await weaver.get(f"sessions/{weaver.session_id}"))["id"] == weaver.session_id
