"""The official SDK as an oracle: on the fake service it sends what our client sends."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from retrain.adapters.weaver import AdamParams, LoraConfig, TrainingRow, WeaverClient
from retrain.sampler import SamplingParams
from tests.fake_weaver import KEY, FakeWeaver, serve

pytestmark = pytest.mark.slow  # the SDK imports torch and transformers

TOKENS, TARGETS = [1, 2, 3], [2, 3, 4]
INPUTS: dict[str, dict[str, list[float]]] = {
    "cross_entropy": {"weights": [0.0, 1.0, 1.0]},
    "importance_sampling": {
        "logprobs": [0.0, -0.5, -0.25],
        "advantages": [0.0, 1.0, 2.0],
        "loss_mask": [0.0, 1.0, 1.0],
    },
    "surrogate": {"surrogate_weights": [0.0, -0.5, 0.5]},
}
OURS = frozenset({"user_metadata", "sdk_version", "tags"})
"""Keys of a session that say who the client is."""


async def ours(url: str) -> list[Any]:
    results: list[Any] = []
    async with WeaverClient(url, api_key=KEY) as client:
        model = await client.create_model("tiny", lora=LoraConfig(rank=4))
        for loss, inputs in INPUTS.items():
            rows = [TrainingRow(TOKENS, {"target_tokens": TARGETS, **inputs})]
            passed = await (await model.forward_backward(rows, loss)).result()
            results.append(passed[0])
            adam = AdamParams(0.5, 0.8, 0.9, 1e-6, 0.1, 2.0)
            results.append((await (await model.optim_step(adam)).result())["grad_norm"])
        bare = [TrainingRow(TOKENS, {"target_tokens": TARGETS})]
        results.append((await (await model.forward(bare)).result())[0])
        saved = await model.save_state("kept")
        await model.load_state(saved)
        path = await (await model.save_for_sampler("served")).result()
        session = await client.sampling_session(path=path, model=model)
        params = SamplingParams(3, 0.5, 0.9, 5, ("x",), (7,), seed=3)
        results += [one.tokens for one in await session.sample([1, 2], params, n=2)]
        results.append(await session.compute_logprobs([1, 2, 3]))
        await session.close()
    return results


async def theirs(url: str) -> list[Any]:
    weaver = pytest.importorskip("weaver")
    from weaver import types

    def tensor(values: list[float]) -> Any:
        return types.TensorData(data=values, dtype="float32")

    results: list[Any] = []
    async with weaver.AsyncServiceClient(base_url=url, api_key=KEY) as client:
        model = await client.create_model(
            base_model="tiny", training_mode="lora", lora_config=types.LoraConfig(rank=4)
        )
        targets = {"target_tokens": types.TensorData(data=TARGETS, dtype="int64")}
        prompt = types.ModelInput.from_ints(TOKENS)
        for loss, inputs in INPUTS.items():
            named = {name: tensor(values) for name, values in inputs.items()}
            datum = types.Datum(model_input=prompt, loss_fn_inputs={**targets, **named})
            passed = await model.forward_backward([datum], loss)
            results.append(passed["result"]["loss_fn_outputs"][0]["logprobs"]["data"])
            adam = types.AdamParams(0.5, 0.8, 0.9, 1e-6, 0.1, 2.0)
            results.append((await model.optim_step(adam))["metrics"]["grad_norm"])
        bare = types.Datum(model_input=prompt, loss_fn_inputs=targets)
        looked = await model.forward([bare], "forward_logprob")
        results.append(looked["result"]["loss_fn_outputs"][0]["logprobs"]["data"])
        saved = await model.save_state(name="kept", checkpoint_type="weight_and_optimizer")
        await model.load_state_with_optimizer(saved)
        sampler = await model.save_weights_and_get_sampling_client(name="served")
        params = types.SamplingParams(
            max_tokens=3, temperature=0.5, top_p=0.9, top_k=5, stop=["x", 7], seed=3
        )
        sampled = await sampler.sample(
            prompt=types.ModelInput.from_ints([1, 2]), sampling_params=params, num_samples=2
        )
        results += [one["tokens"] for one in sampled["sequences"]]
        results.append(await sampler.compute_logprobs(prompt=types.ModelInput.from_ints(TOKENS)))
    return results


def bodies(fake: FakeWeaver) -> dict[str, list[Any]]:
    """What was posted, by the last part of the path, without what names the client."""
    found: dict[str, list[Any]] = {}
    for method, path, body in fake.log:
        what = path.rsplit("/", 1)[-1]
        if method == "POST" and what not in ("heartbeat", "terminate"):
            kept = {key: value for key, value in (body or {}).items() if key not in OURS}
            found.setdefault(what, []).append(kept)
    return found


async def test_our_client_sends_what_the_sdk_sends_and_reads_what_it_reads() -> None:
    found = []
    for run in (ours, theirs):
        fake = FakeWeaver()
        fake.pending_looks = 0
        async with serve(fake) as url:
            results = await run(url)
        assert fake.applied["optim_step"] == len(INPUTS)
        assert len(fake.terminated) == 1
        found.append((bodies(fake), results))
    (ours_sent, ours_read), (theirs_sent, theirs_read) = found
    assert {"sessions", "models", "forward-passes", "load", "samples"} <= set(ours_sent)
    assert ours_sent == theirs_sent
    assert ours_read == theirs_read
    assert all(map(math.isfinite, ours_read[0]))
    assert len(asyncio.all_tasks()) == 1
