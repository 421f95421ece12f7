"""The official SDKs, unmodified, train and sample on the local service over real loopback.

Run by test_service_sdk.py in a process of its own.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from typing import Any

import pytest
import tinker
import torch
import weaver
from vllm_kit import FLAGS, GROUP, LORA, stand_in

from retrain.engine.tiny import tiny_folder
from retrain.vllm.options import VllmOptions
from tests.service_kit import TOKENS, on_a_port

KEY = "tml-a-key"
TARGETS = TOKENS[1:]
STEPS = 4
SAMPLERS = pytest.mark.parametrize("url", ["its own", "vLLM's"], indirect=True)


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """The URL of a service by what it samples with; each is started once."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TINKER_TELEMETRY", "0")
    patch.setenv("WEAVER_OPERATION_POLL_INTERVAL", "0.01")
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        patch.delenv(name)  # loopback needs none
    with ExitStack() as stack:

        @cache
        def started(sampler: str) -> str:
            options = None
            if sampler == "vLLM's":  # the stand-in for it
                server = stack.enter_context(
                    stand_in(tiny_folder(), defaults=(*FLAGS, *GROUP, *LORA))
                )
                options = VllmOptions(url=server.url)
            folder = tmp_path_factory.mktemp("service")
            return stack.enter_context(on_a_port(folder, api_key=KEY, vllm=options))

        yield started
    patch.undo()


@pytest.fixture
def url(request, servers):
    return servers(getattr(request, "param", "its own"))


@pytest.fixture(scope="module")
def clients(servers):
    """Weaver's, shared: leaving one takes the SDK five seconds."""

    @cache
    def connected(url: str) -> weaver.ServiceClient:
        made.append(weaver.ServiceClient(base_url=url, api_key=KEY).__enter__())
        return made[-1]

    made: list[weaver.ServiceClient] = []
    yield connected
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda client: client.__exit__(None, None, None), made))


@pytest.fixture
def service(url, clients):
    return clients(url)


@pytest.fixture
def sdk(url):
    """Tinker's."""
    made = tinker.ServiceClient(base_url=url, api_key=KEY)
    yield made
    made.close("success").result()


def inputs(loss: str, logprobs: list[float]) -> dict[str, Any]:
    if loss == "cross_entropy":
        return {"target_tokens": TARGETS, "weights": [0.0, 1.0, 1.0, 1.0, 1.0]}
    return {
        "target_tokens": TARGETS,
        "logprobs": logprobs,
        "advantages": [0.0, 1.0, -1.0, 0.5, 2.0],
    }


def tinker_datum(loss: str, logprobs: list[float]) -> tinker.Datum:
    prompt = tinker.ModelInput.from_ints(TOKENS[:-1])
    return tinker.Datum(model_input=prompt, loss_fn_inputs=inputs(loss, logprobs))


def weaver_datum(loss: str, logprobs: list[float]) -> Any:
    prompt = weaver.types.ModelInput.from_ints(TOKENS[:-1])
    return weaver.types.Datum(model_input=prompt, loss_fn_inputs=inputs(loss, logprobs))


def shrank(losses: list[float]) -> bool:
    return all(map(math.isfinite, losses)) and losses[-1] < losses[0]


@pytest.mark.parametrize("loss", ["cross_entropy", "importance_sampling", "ppo", "cispo"])
def test_tinker_trains(sdk, loss):
    model = sdk.create_lora_training_client("tiny", rank=8, seed=3).result()

    def logprobs() -> list[float]:
        out = model.forward([tinker_datum("cross_entropy", [])], "cross_entropy").result()
        return list(out.loss_fn_outputs[0]["logprobs"].data)

    old = logprobs()
    for _ in range(STEPS):
        passed = model.forward_backward([tinker_datum(loss, old)], loss)
        stepped = model.optim_step(tinker.AdamParams(learning_rate=3e-4))
        assert math.isfinite(passed.result().metrics["loss:sum"])
        assert stepped.result().metrics["grad_norm"] > 0
    credit = inputs(loss, old).get("advantages") or inputs(loss, old)["weights"]
    assert weighted(logprobs(), credit) > weighted(old, credit)


def weighted(logprobs: list[float], credit: list[float]) -> float:
    return sum(lp * a for lp, a in zip(logprobs, credit, strict=True))


@SAMPLERS
def test_tinker_samples_saves_and_loads(sdk):
    model = sdk.create_lora_training_client("tiny", rank=8).result()
    assert model.get_info().model_data.model_name == "tiny"
    data = [tinker_datum("cross_entropy", [])]
    model.forward_backward(data, "cross_entropy").result()
    model.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    sampler = model.save_weights_and_get_sampling_client().result()
    prompt = tinker.ModelInput.from_ints(TOKENS[:2])
    params = tinker.SamplingParams(max_tokens=5, temperature=1.0)
    drawn = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params).result()
    assert [len(s.tokens) == len(s.logprobs) for s in drawn.sequences] == [True] * 3
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
    trained = model.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    assert scored[1:] == pytest.approx(list(trained), abs=1e-5)

    path = model.save_state("kept").result().path
    again = sdk.create_training_client_from_state_with_optimizer(path).result()
    named = model.save_weights_for_sampler("named").result().path
    kept, exported = (sdk.create_sampling_client(model_path=one).result() for one in (path, named))
    scores = [
        one.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()
        for one in (kept, exported)
    ]
    assert scores[0] == scores[1] == scored  # a training checkpoint can be sampled too
    for one in (model, again):
        one.forward_backward(data, "cross_entropy").result()
        one.optim_step(tinker.AdamParams(learning_rate=5e-3)).result()
    both = [one.forward(data, "cross_entropy").result().metrics for one in (model, again)]
    assert both[0] == both[1]


async def test_tinker_works_by_await(sdk):
    model = await sdk.create_lora_training_client("tiny", rank=8)
    passed = await model.forward_backward_async(
        [tinker_datum("cross_entropy", [])], "cross_entropy"
    )
    stepped = await model.optim_step_async(tinker.AdamParams(learning_rate=5e-3))
    assert (await passed).metrics["tokens:sum"] == 5
    assert (await stepped).metrics["grad_norm"] > 0
    sampler = await model.save_weights_and_get_sampling_client()
    params = tinker.SamplingParams(max_tokens=3)
    prompt = tinker.ModelInput.from_ints(TOKENS[:2])
    drawn = await sampler.sample_async(prompt=prompt, num_samples=2, sampling_params=params)
    assert len(drawn.sequences) == 2


def test_tinker_hears_why_a_call_is_rejected_and_goes_on(sdk):
    model = sdk.create_lora_training_client("tiny", rank=8).result()
    with pytest.raises(tinker.TinkerError, match="no gradient to apply"):
        model.optim_step(tinker.AdamParams()).result()
    with pytest.raises(tinker.TinkerError, match="expected advantages"):
        model.forward_backward([tinker_datum("cross_entropy", [])], "ppo").result()
    prompt = tinker.ModelInput.from_ints([*TOKENS[:-2], 100_000])
    outside = tinker.Datum(model_input=prompt, loss_fn_inputs=inputs("cross_entropy", []))
    with pytest.raises(tinker.TinkerError, match="got token 100000"):
        model.forward_backward([outside], "cross_entropy").result()
    with pytest.raises(tinker.TinkerError, match="stable_reinforce'"):
        model.forward_backward([tinker_datum("ppo", [0.0] * 5)], "stable_reinforce").result()
    good = [tinker_datum("cross_entropy", [])]
    passed = model.forward_backward(good, "cross_entropy").result(timeout=20)
    assert passed.metrics["tokens:sum"] == 5
    assert model.optim_step(tinker.AdamParams()).result(timeout=20).metrics["grad_norm"] > 0


@SAMPLERS
def test_tinker_distils_the_likeliest_tokens_of_a_teacher(sdk):
    """As tinker_cookbook's train_off_policy does: top-k of the prompt to (N, K) targets."""
    model = sdk.create_lora_training_client("tiny", rank=8).result()
    teacher = sdk.create_sampling_client(base_model="tiny")
    prompt, one = tinker.ModelInput.from_ints(TOKENS), tinker.SamplingParams(max_tokens=1)
    wanted = torch.full((5, 2), -1)
    wanted[2] = torch.tensor([70, TARGETS[2]])
    found = teacher.sample(
        prompt=prompt,
        num_samples=1,
        sampling_params=one,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=3,
        target_prompt_logprobs=tinker.TensorData.from_torch_sparse(wanted, pad_value=-1),
    ).result()
    assert found.topk_prompt_logprobs[0] is None
    tops = found.topk_prompt_logprobs[1:]
    targets = torch.tensor([[token for token, _ in top] for top in tops])
    weights = torch.tensor([[math.exp(logprob) for _, logprob in top] for top in tops])
    weights[:4] = 0  # the prompt: most of the weights are 0, so the SDK sends them sparse
    tensors = {"target_tokens": targets, "weights": weights}
    sent = {name: tinker.TensorData.from_torch_sparse(t) for name, t in tensors.items()}
    assert sent["weights"].sparse_crow_indices is not None
    datum = tinker.Datum(model_input=tinker.ModelInput.from_ints(TOKENS[:-1]), loss_fn_inputs=sent)
    plain = tinker_datum("cross_entropy", [])
    passed = model.forward_backward([datum, plain], "cross_entropy").result()
    logprobs, others = (one["logprobs"].to_torch() for one in passed.loss_fn_outputs)
    assert (logprobs.shape, others.shape) == ((5, 3), (5,))  # a new adapter is its base model
    assert torch.allclose(
        logprobs, torch.tensor([[lp for _, lp in top] for top in tops]), atol=1e-4
    )
    loss = -(weights * logprobs).sum() - others[1:].sum()
    assert passed.metrics["loss:sum"] == pytest.approx(loss.item(), rel=1e-5)
    scored = found.target_prompt_logprobs.to_torch()
    assert scored.shape == (5, 2)
    assert scored[2, 1].item() == pytest.approx(others[2].item(), abs=1e-4)
    assert not scored[[0, 1, 3, 4]].any()


@SAMPLERS
def test_tinker_samples_past_the_end_with_the_likeliest_tokens(sdk):
    sampler = sdk.create_sampling_client(base_model="tiny")
    drawn = sampler.sample(
        prompt=tinker.ModelInput.from_ints(TOKENS[:2]),
        num_samples=4,
        sampling_params=tinker.SamplingParams(max_tokens=40, stop=[], temperature=0.0),
        topk_sample_logprobs=2,
    ).result()
    for one in drawn.sequences:
        assert (len(one.tokens), one.stop_reason) == (40, "length")
        assert [top[0] for top in one.topk_logprobs] == list(
            zip(one.tokens, one.logprobs, strict=True)
        )
    recording = sdk.create_sampling_client(base_model="tiny", record_stability_info=True)
    with pytest.raises(tinker.TinkerError, match="record_stability_info"):
        recording.compute_logprobs(tinker.ModelInput.from_ints(TOKENS)).result()


def test_tinker_trains_with_gspo_and_ignores_provenance(sdk):
    model = sdk.create_lora_training_client("tiny", rank=8).result()
    out = model.forward([tinker_datum("cross_entropy", [])], "cross_entropy").result()
    lp = out.loss_fn_outputs[0]["logprobs"].to_torch()
    old = lp - torch.tensor([0.5, 0.1, -0.2, 0.3, 0.0])
    given = {**inputs("gspo", old.tolist()), "sequence_ratio_mask": [0.0, 1.0, 1.0, 1.0, 1.0]}
    prompt = tinker.ModelInput.from_ints(TOKENS[:-1])
    span = tinker.types.SampledProvenanceSpan(sequence_id="x:0", length=5)
    datum = tinker.Datum(model_input=prompt, loss_fn_inputs=given).with_provenance([span], [span])
    passed = model.forward_backward([datum], "gspo").result()
    ratio = (lp - old)[1:].mean().exp()  # 1.051
    wanted = -(ratio * torch.tensor(given["advantages"])).sum()
    assert passed.metrics["loss:sum"] == pytest.approx(wanted.item(), rel=1e-4)


@SAMPLERS
def test_weaver_trains_samples_saves_and_loads(service):
    model = service.create_model(base_model="tiny", lora_config={"rank": 8})
    data = [weaver_datum("cross_entropy", [])]
    old = model.forward(data, "forward_logprob")["result"]["loss_fn_outputs"][0]["logprobs"]
    losses = []
    for step in range(2 * STEPS):
        loss = ("cross_entropy", "truncated_importance_sampling")[step % 2]
        passed = model.forward_backward([weaver_datum(loss, old)], loss)
        losses.append(passed["result"]["metrics"]["loss"])
        stepped = model.optim_step(weaver.types.AdamParams(learning_rate=5e-3))
        assert stepped["metrics"]["grad_norm"] > 0
    assert shrank(losses[::2])
    sampler = model.save_weights_and_get_sampling_client(name="a")
    params = weaver.types.SamplingParams(max_tokens=5, temperature=1.0)
    prompt = weaver.types.ModelInput.from_ints(TOKENS[:2])
    drawn = sampler.sample(prompt=prompt, num_samples=3, sampling_params=params)
    assert [len(s["tokens"]) == len(s["logprobs"]) for s in drawn["sequences"]] == [True] * 3
    scored = sampler.compute_logprobs(prompt=weaver.types.ModelInput.from_ints(TOKENS))
    now = model.forward(data, "forward_logprob")["result"]["loss_fn_outputs"][0]["logprobs"]
    assert scored[1:] == pytest.approx(now, abs=1e-5)

    kept = model.save_state(name="kept", checkpoint_type="weight_and_optimizer")
    assert kept.path in [one.path for one in model.list_checkpoints()]
    again = service.create_model(base_model="tiny", lora_config={"rank": 8})
    again.load_state_with_optimizer(kept.path)
    both = []
    for one in (model, again):
        one.forward_backward(data, "cross_entropy")
        one.optim_step(weaver.types.AdamParams(learning_rate=5e-3))
        both.append(one.forward(data, "cross_entropy")["result"]["metrics"])
    assert both[0] == both[1]


def test_weaver_runs_a_custom_loss(service):
    model = service.create_model(base_model="tiny", lora_config={"rank": 8})

    def nll(_data: Any, logprobs: Any) -> Any:
        return -sum(row[1:].sum() for row in logprobs), {}

    data = [weaver_datum("cross_entropy", [])]
    losses = []
    for _ in range(STEPS):
        losses.append(float(model.forward_backward_custom(data, nll)["loss"]))
        model.optim_step(weaver.types.AdamParams(learning_rate=5e-3))
    assert shrank(losses)


async def test_weaver_works_by_await(url):
    async with weaver.AsyncServiceClient(base_url=url, api_key=KEY) as service:
        await service.connect()
        model = await service.create_model(base_model="tiny", lora_config={"rank": 8})
        data = [weaver_datum("cross_entropy", [])]
        passed = await model.forward_backward(data, "cross_entropy")
        stepped = await model.optim_step(weaver.types.AdamParams(learning_rate=5e-3))
        assert passed["result"]["metrics"]["tokens"] == 5
        assert stepped["metrics"]["grad_norm"] > 0
        sampler = await model.save_weights_and_get_sampling_client(name="a")
        prompt = weaver.types.ModelInput.from_ints(TOKENS)
        assert len(await sampler.compute_logprobs(prompt=prompt)) == len(TOKENS)


def test_weaver_hears_why_a_request_is_refused(service, url):
    model = service.create_model(base_model="tiny", lora_config={"rank": 8})
    with pytest.raises(Exception, match="no gradient to apply"):
        model.optim_step(weaver.types.AdamParams())
    with pytest.raises(Exception, match="'ppo'"):
        model.forward_backward([weaver_datum("ppo", [0.0] * 5)], "ppo")
    with pytest.raises(Exception, match="key is missing or wrong"):
        weaver.ServiceClient(base_url=url, api_key="sk-wrong").connect()
