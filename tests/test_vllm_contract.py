"""What our vLLM sampler relies on, of the stand-in (always) and of a real server (`make vllm`).

Both are asked over HTTP, as plainly as can be: where they differ, the tests of the sampler, which
use the stand-in, would prove nothing.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from vllm_kit import (
    GENERATE,
    GROUP,
    LORA,
    PROMPT,
    Served,
    Speaker,
    body_of,
    saved,
    served,
    small_model,
)

from retrain.config import load_config
from retrain.pipeline import train
from retrain.sampler import SamplingParams
from retrain.vllm.checkpoint import write_adapter
from retrain.vllm.transfer import Bucket, broadcast, join
from tests.chaos.judgement import judge_log
from tests.sampler_kit import restricted
from tests.test_vllm_sampler import adapter
from tests.test_vllm_whole import echo, rows

pytestmark = pytest.mark.filterwarnings(  # PEFT's
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
LONG, MANY = 400, 8
"""Tokens and completions of a request that is still running when something happens to it."""
TRIES = 6
"""A quick server, or a slow test, may have ended such a request before: then there is another."""
BOTH = [
    pytest.param("stand-in"),
    pytest.param("real", marks=[pytest.mark.vllm, pytest.mark.timeout(280)]),
]
STEPS = "train.total_train_steps=4"
ENDLESS = {"ignore_eos": True, "stop_token_ids": []}


@pytest.fixture(scope="module")
def models() -> dict[str, PreTrainedModel]:
    """Two models that differ by several nats, and the first one's tied sister."""
    return {
        "a": small_model(0, spread=0.3),
        "b": small_model(1, spread=0.3),
        "tied": small_model(2, tied=True, spread=0.3),
        "tied-b": small_model(3, tied=True, spread=0.3),
    }


@pytest.fixture(scope="module")
def folders(
    models: Mapping[str, PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    found = {name: saved(model, root / name) for name, model in models.items()}
    return found | {"adapters": root}


@pytest.fixture(scope="module", params=BOTH)
def place(request: pytest.FixtureRequest, folders: Mapping[str, Path]) -> Iterator[Served]:
    with served(request.param, folders["a"], *GROUP, *LORA) as server:
        yield server


@pytest.fixture
async def server(place: Served, folders: Mapping[str, Path]) -> AsyncIterator[Speaker]:
    """The server with the weights of `a`, whatever the test before has done."""
    async with Speaker(place) as speaker:
        await speaker.reload(folders["a"], "default")
        yield speaker


def sampled(choice: Mapping[str, Any]) -> list[float]:
    content = choice["logprobs"]["content"]
    assert [row["token_id"] for row in content] == choice["token_ids"]
    return [row["logprob"] for row in content]


def expected(
    model: PreTrainedModel, prompt: list[int], ids: list[int], **params: Any
) -> torch.Tensor:
    """The log-probs of ids after a prompt, by one plain forward."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
    rows = zip(logits, ids, strict=True)
    return torch.stack([restricted(row, SamplingParams(**params))[i] for row, i in rows])


def apart(found: list[float], wanted: torch.Tensor) -> float:
    return (torch.tensor(found) - wanted).abs().max().item()


async def test_says_what_it_is(server: Speaker, place: Served) -> None:
    assert (await server.http.get("/health")).status_code == 200
    assert (await server.get("/version"))["version"] == "0.32.0"
    [base] = (await server.get("/v1/models"))["data"]
    root = str(place.folder)
    shown = {key: base[key] for key in ("id", "root", "parent", "max_model_len")}
    assert shown == {"id": "policy", "root": root, "parent": None, "max_model_len": 512}
    info = (await server.get("/server_info?config_format=json"))["vllm_config"]
    model, parallel, lora = info["model_config"], info["parallel_config"], info["lora_config"]
    assert (model["logprobs_mode"], model["max_logprobs"]) == ("processed_logprobs", -1)
    assert (model["dtype"], model["max_model_len"], model["model"]) == ("torch.float32", 512, root)
    assert parallel["worker_extension_cls"] == "retrain.vllm.worker.Extension"
    assert [lora[key] for key in ("max_loras", "max_cpu_loras", "max_lora_rank")] == [3, 6, 16]
    assert await server.get("/get_world_size") == {"world_size": 1}
    assert await server.get("/weight_info") == {"weight_version": "default"}
    assert await server.get("/is_paused") == {"is_paused": False}


async def test_logprobs_are_those_of_a_plain_forward(
    server: Speaker, models: Mapping[str, PreTrainedModel]
) -> None:
    """Also under temperature, top-p and top-k; greedy ones are at temperature 1."""
    kinds: list[dict[str, Any]] = [{"temperature": heat} for heat in (0.0, 0.7, 1.0, 1.5)]
    kinds += [{"temperature": 1.2, "top_p": 0.8}, {"temperature": 1.0, "top_k": 3}]
    kinds += [{"temperature": 1.5, "top_p": 0.7, "top_k": 9}]
    replies = await asyncio.gather(
        *(server.sample(n=3 if k["temperature"] else 1, max_tokens=20, **k) for k in kinds)
    )
    for kind, choices in zip(kinds, replies, strict=True):
        for choice in choices:
            ids = choice["token_ids"]
            wanted = expected(models["a"], PROMPT, ids, **kind)
            assert apart(sampled(choice), wanted) < 1e-4, kind
            span = {"version": "default", "start": 0, "end": len(ids)}
            assert choice["weight_versions"] == [span]


async def test_scores_a_prompt(server: Speaker, models: Mapping[str, PreTrainedModel]) -> None:
    ids = [(7 * place) % 100 + 3 for place in range(40)]
    assert apart(await server.score(ids), expected(models["a"], ids[:1], ids[1:])) < 1e-4


async def test_says_why_a_completion_ended(
    server: Speaker, models: Mapping[str, PreTrainedModel]
) -> None:
    async def one(**params: Any) -> tuple[Any, Any, list[int]]:
        [choice] = await server.sample(**{"max_tokens": 3, **params})
        return choice["finish_reason"], choice["stop_reason"], choice["token_ids"]

    reason, stop, ids = await one(stop_token_ids=list(range(107)))
    assert (reason, [stop]) == ("stop", ids)
    pairs = torch.cartesian_prod(torch.arange(50), torch.arange(50))
    with torch.inference_mode():
        ending = models["a"](pairs).logits[:, -1].argmax(-1) == 1
    pair = pairs[ending.nonzero()[0, 0]].tolist()
    found = await one(prompt=pair, temperature=0.0, stop_token_ids=[])
    assert found == ("stop", None, [1]), "the model's own end"
    reason, stop, ids = await one(**ENDLESS)
    assert (reason, stop, len(ids)) == ("length", None, 3)
    reason, stop, ids = await one(prompt=[9] * 505, max_tokens=20, **ENDLESS)
    assert (reason, stop, len(ids)) == ("length", None, 7), "the context is full"
    letters = {"stop": [*"02468"], "detokenize": True, "max_tokens": 400, "temperature": 2.0}
    reason, stop, ids = await one(**letters, **ENDLESS)
    assert reason == "stop"
    assert ids[-1] == 8 + ord(stop) - 32, "the ids keep the token that completes the string"


async def test_gives_n_choices_and_counts_tokens(server: Speaker) -> None:
    body = body_of(PROMPT, n=5, max_tokens=3, logprobs=None, **ENDLESS)
    reply = (await server.http.post(GENERATE, json=body)).json()
    assert sorted(choice["index"] for choice in reply["choices"]) == [*range(5)]
    assert {str(choice["logprobs"]) for choice in reply["choices"]} == {"None"}
    usage = {key: reply["usage"][key] for key in ("prompt_tokens", "completion_tokens")}
    assert (reply["model"], usage) == ("policy", {"prompt_tokens": 4, "completion_tokens": 15})


ERRORS: dict[str, tuple[dict[str, Any], int, str]] = {
    "no ids": ({"prompt": []}, 400, "should have at least 1 item"),
    "unknown id": ({"prompt": [999]}, 400, "Token id 999 is out of vocabulary"),
    "first unknown id": ({"prompt": [107]}, 400, "Token id 107 is out of vocabulary"),
    "negative id": ({"prompt": [-1]}, 400, "must not contain negative values"),
    "full context": ({"prompt": [9] * 512}, 400, "(at least 1) is longer than the maximum model"),
    "too long": ({"prompt": [9] * 513}, 400, "longer than the maximum model length of 512"),
    "unknown model": ({"model": "policy-9"}, 404, "The model `policy-9` does not exist"),
    "temperature": ({"temperature": -1.0}, 400, "temperature must be non-negative, got -1.0"),
    "heat": ({"temperature": 2.1}, 400, "temperature must be in [0, 2], got 2.1"),
    "greedy": ({"temperature": 0.0, "n": 2}, 400, "n must be 1 when using greedy sampling, got 2"),
    "top_p": ({"top_p": 0.0}, 400, "top_p must be in (0, 1], got 0.0"),
    "max_tokens": ({"max_tokens": 0}, 400, "max_tokens must be at least 1, got 0"),
    "n": ({"n": 0}, 400, "n must be at least 1, got 0"),
    "stop": ({"stop": ["a"]}, 400, "stop strings are only supported when detokenize is True"),
}


async def test_refuses_what_it_cannot_sample(server: Speaker) -> None:
    for name, (given, status, words) in ERRORS.items():
        reply = await server.http.post(GENERATE, json=body_of(**{"prompt": PROMPT, **given}))
        assert reply.status_code == status, (name, reply.text)
        assert words in reply.json()["error"]["message"], name
    for missing in ("token_ids", "sampling_params"):
        body = {key: value for key, value in body_of(PROMPT).items() if key != missing}
        assert "Field required" in await server.post(GENERATE, body, expect=400)


async def test_refuses_orders_out_of_order(server: Speaker) -> None:
    assert "has no attribute" in await server.call("no_such_method", expect=500)
    assert "Field required" in await server.post("/update_weight_version", {}, expect=400)
    assert "'abort', 'wait' or 'keep'" in await server.post("/pause?mode=odd", expect=400)
    assert await server.get("/weight_info") == {"weight_version": "default"}
    assert len(await server.score(PROMPT)) == 3, "it still works"


async def in_flight(server: Speaker, **params: Any) -> asyncio.Task[list[dict[str, Any]]]:
    """Long requests, of which some tokens are there."""
    made = await server.metric("generation_tokens_total")
    asked = {"n": MANY, "max_tokens": LONG, **ENDLESS, **params}
    task = asyncio.create_task(server.sample(**asked))
    await server.until("generation_tokens_total", made + 30)
    return task


@pytest.mark.parametrize("mode", ["keep", "keep&clear_cache=false", "wait", "abort"])
async def test_each_token_has_the_version_that_sampled_it(
    mode: str, server: Speaker, models: Mapping[str, PreTrainedModel], folders: Mapping[str, Path]
) -> None:
    for _ in range(TRIES):
        choices = await changed_in_flight(server, mode, folders["b"])
        ends = {choice["finish_reason"] for choice in choices}
        if mode == "wait" or ends == {"abort"} or all(map(cut_of, choices)):
            break
        await server.reload(folders["a"], "default")
    for choice in choices:
        ids, found, cut = choice["token_ids"], sampled(choice), cut_of(choice)
        before, after = (expected(models[name], PROMPT, ids) for name in "ab")
        if not mode.startswith("keep"):
            assert choice["finish_reason"] == ("length" if mode == "wait" else "abort")
            assert [span["version"] for span in choice["weight_versions"]] == ["default"]
            assert apart(found, before) < 1e-3
            continue
        assert choice["weight_versions"] == [
            {"version": "default", "start": 0, "end": cut},
            {"version": "1", "start": cut, "end": LONG},
        ]
        assert apart(found[:cut], before[:cut]) < 1e-3
        if mode == "keep":
            assert apart(found[cut:], after[cut:]) < 1e-3
        else:
            assert apart(found[cut:], after[cut:]) > 0.1, "on the old cache: neither's"


async def changed_in_flight(server: Speaker, mode: str, folder: Path) -> list[dict[str, Any]]:
    """The choices of a request during which the server got other weights."""
    task = await in_flight(server)
    await server.post(f"/pause?mode={mode}")
    assert await server.get("/is_paused") == {"is_paused": True}
    waiting = asyncio.create_task(server.sample(max_tokens=3))
    await server.change(folder, "1")
    assert not waiting.done()
    await server.post("/resume")
    [late] = await waiting
    assert [span["version"] for span in late["weight_versions"]] == ["1"]
    return await task


def cut_of(choice: Mapping[str, Any]) -> int:
    """The place of the first token of a second version; 0 if there is one version."""
    return dict(enumerate(span["start"] for span in choice["weight_versions"])).get(1, 0)


async def test_takes_weights_from_a_group(
    server: Speaker, models: Mapping[str, PreTrainedModel], folders: Mapping[str, Path]
) -> None:
    weights = {name: t.detach() for name, t in models["b"].state_dict().items()}
    names = list(weights)
    bucket = Bucket(names, ["float32"] * len(names), [list(weights[n].shape) for n in names])
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = listener.getsockname()[1]
        meeting = {"host": "127.0.0.1", "port": port, "world_size": 2, "first": 1}
        meeting |= {"backend": "gloo", "seconds": 30.0}
        own = asyncio.to_thread(
            join, "127.0.0.1", port, 0, 2, "gloo", 30.0, os.dup(listener.fileno())
        )
        group, _ = await asyncio.gather(own, server.call("retrain_join", **meeting))
    await server.post("/pause?mode=keep")
    packed = bucket.pack(weights, torch.device("cpu"))
    for end in (False, True):  # the first attempt is broken off
        sending = asyncio.to_thread(broadcast, group, packed)
        info = {**asdict(bucket), "begin": True, "end": end}
        await asyncio.gather(sending, server.call("retrain_receive", **info))
    await server.post("/update_weight_version", {"new_version": "7"})
    await server.post("/resume")
    assert await server.get("/weight_info") == {"weight_version": "7"}
    ids = [*range(9, 49)]
    assert apart(await server.score(ids), expected(models["b"], ids[:1], ids[1:])) < 1e-4


async def test_serves_adapters_by_their_names(
    server: Speaker, models: Mapping[str, PreTrainedModel], folders: Mapping[str, Path]
) -> None:
    merged = {}
    for number in (1, 2):
        name, folder = f"policy-v{number}", folders["adapters"] / f"adapter{number}"
        weights, merged[name] = adapter(models["a"], 0.1 * number)
        folder.mkdir(exist_ok=True)
        write_adapter(folder, weights)
        loading = {"lora_name": name, "lora_path": str(folder), "load_inplace": False}
        assert "added successfully" in await server.post("/v1/load_lora_adapter", loading)
        words = await server.post("/v1/load_lora_adapter", loading, expect=400)
        assert "has already been loaded" in words
    nothing = {"lora_name": "policy-v3", "lora_path": str(folders["a"])}
    assert "No adapter found" in await server.post("/v1/load_lora_adapter", nothing, expect=404)
    listed = (await server.get("/v1/models"))["data"]
    assert [row["id"] for row in listed] == ["policy", *merged]
    assert [row["parent"] for row in listed] == [None, "policy", "policy"]
    served = {"policy": models["a"], **merged}
    replies = await asyncio.gather(
        *(server.sample(model=name, n=2, max_tokens=12) for name in served)
    )
    for model, choices in zip(served.values(), replies, strict=True):
        for choice in choices:
            assert apart(sampled(choice), expected(model, PROMPT, choice["token_ids"])) < 1e-4
            [span] = choice["weight_versions"]
            assert span["version"] == "default", "the base's label: the name says the version"
    ids = [*range(9, 30)]
    scores = await server.score(ids, "policy-v2")
    assert apart(scores, expected(merged["policy-v2"], ids[:1], ids[1:])) < 1e-4
    for name in merged:
        assert "removed" in await server.post("/v1/unload_lora_adapter", {"lora_name": name})
        await server.post("/v1/unload_lora_adapter", {"lora_name": name}, expect=404)
    await server.post(GENERATE, body_of(PROMPT, "policy-v1"), expect=404)


async def test_a_closed_connection_aborts_its_request(server: Speaker) -> None:
    for _ in range(TRIES):
        made = await server.metric("generation_tokens_total")
        task = await in_flight(server)
        task.cancel()
        await asyncio.wait([task])
        await server.until("num_requests_running", 0, 0)
        await server.sample(max_tokens=2)  # the metrics are of the last batch
        made = await server.metric("generation_tokens_total") - made
        if task.cancelled() and made <= MANY * LONG / 2:  # else it ended before it was cancelled
            break
    assert task.cancelled()
    assert made <= MANY * LONG / 2


async def test_without_a_head_the_old_one_stays(
    server: Speaker, models: Mapping[str, PreTrainedModel], folders: Mapping[str, Path]
) -> None:
    """A file that lacks a tensor is accepted: what is served is neither model."""
    folder = saved(models["b"], folders["adapters"] / "headless")
    file = folder / "model.safetensors"
    weights = {name: t for name, t in load_file(file).items() if name != "lm_head.weight"}
    save_file(weights, file, metadata={"format": "pt"})
    await server.reload(folder, "1")
    ids = [*range(9, 30)]
    scores = await server.score(ids)
    for name in "ab":
        assert apart(scores, expected(models[name], ids[:1], ids[1:])) > 0.1


# Whole runs: their configs are those of test_vllm_whole.py.


@pytest.mark.parametrize("way", ["folder", "group", "adapter"])
async def test_without_staleness_the_ratio_is_one(
    way: str, server: Speaker, place: Served, tmp_path: Path
) -> None:
    """P9, over a server: what was sampled is what is trained."""
    changes = ["staleness.target=0", "staleness.max=0", f"model={place.folder}", STEPS]
    changes += ["backend.learning_rate=0.005"]  # a stale version would show
    changes += ["backend.lora.r=4"] if way == "adapter" else []
    await train(echo(tmp_path, *changes, url=place.url, publish=way))
    trained = [row for row in rows(tmp_path) if row["tokens/trained"]]
    assert len(trained) >= 2
    for row in trained:
        assert row["ratio/max"] == pytest.approx(1.0, abs=1e-3), row["step"]
        assert row["kl/sampler_trainer"] < 1e-6
    assert [row["version"] for row in trained] == [*range(1, len(trained) + 1)]


@pytest.mark.parametrize("place", BOTH[1:], indirect=True)
async def test_two_processes_train_what_a_real_server_samples(
    server: Speaker, place: Served, tmp_path: Path
) -> None:
    """At S=1."""
    changes = [f"model={place.folder}", "backend.processes=2", "backend.device=cpu", STEPS]
    await train(echo(tmp_path, *changes, url=place.url, publish="group"))
    book, _ = judge_log(tmp_path, load_config(tmp_path / "config.yaml"), rows=8)
    assert (book.wrong, book.step) == ([], 4)
    assert rows(tmp_path)[0]["ratio/max"] == pytest.approx(1.0, abs=1e-3), "of fresh tokens"


async def test_a_failed_reload_ends_the_server(
    server: Speaker, place: Served, folders: Mapping[str, Path]
) -> None:
    """The last test of this server."""
    await server.post("/pause?mode=keep")
    await server.call("reload_weights", weights_path="/no/such/folder", expect=500)
    assert (await server.http.get("/health")).status_code == 200
    await server.post("/resume")
    assert "EngineCore" in await server.post(GENERATE, body_of(PROMPT), expect=500)
    async with asyncio.timeout(60):
        while True:
            try:
                assert (await server.http.get("/health", timeout=5)).status_code == 503
            except httpx.TransportError:  # a connection that was accepted at the end: no answer
                break
            await asyncio.sleep(0.01)
    assert place.ended()
