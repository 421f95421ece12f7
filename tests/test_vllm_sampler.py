"""VllmSampler over the stand-in: completions, versions, lost servers, adapters, start-up checks."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import PreTrainedModel
from vllm_kit import FLAGS, GROUP, LORA, MODEL, StandIn, saved, small_model, stand_in

from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_tokenizer
from retrain.engine.weights import LoraWeights, lora_snapshot, snapshot
from retrain.errors import AdapterError, ConfigError
from retrain.sampler import SamplingParams
from retrain.vllm.checks import ServerNeeds, check_logprobs, check_server, probe_of
from retrain.vllm.client import LARGE, AdapterSlots, VllmClient, decoded
from retrain.vllm.opening import Opening, open_vllm
from retrain.vllm.options import VllmOptions
from retrain.vllm.sampler import VllmSampler
from retrain.vllm.server import Launch, VllmServer
from tests.pipe_kit import until
from tests.sampler_kit import forward_logprobs

GENERATE = "/inference/v1/generate"
PROMPT = [8, 20, 30, 40]
ENDLESS = SamplingParams(max_tokens=400)


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_model(0, spread=0.3)


@pytest.fixture(scope="module")
def other() -> PreTrainedModel:
    return small_model(1, spread=0.3)


@pytest.fixture(scope="module")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(model, tmp_path_factory.mktemp("models") / "a")


@pytest.fixture(scope="module")
def place(folder: Path) -> Iterator[StandIn]:
    with stand_in(folder, *LORA) as server:
        yield server


@pytest.fixture
def server(place: StandIn) -> StandIn:
    """The server as a new process would be."""
    place.faults(restart=True)
    return place


def opening_of(model: PreTrainedModel, folder: Path, tmp_path: Path, **given: Any) -> Opening:
    values = {"dtype": torch.float32, "scratch": tmp_path, "logs": tmp_path, "base_dir": tmp_path}
    return Opening(
        str(folder), model, tiny_tokenizer(), **{**values, "outage_seconds": 20.0, **given}
    )


@asynccontextmanager
async def serving(
    model: PreTrainedModel, folder: Path, tmp_path: Path, *urls: str, **given: Any
) -> AsyncIterator[VllmSampler]:
    """A sampler over these servers, with the model published as version 0."""
    keys = {"publish": "folder"} if "lora" not in given else {}
    options = VllmOptions(url=list(urls), **keys, start_seconds=20)
    async with await open_vllm(options, opening_of(model, folder, tmp_path, **given)) as sampler:
        if "lora" not in given:
            await sampler.load_weights(snapshot(model), 0)
        yield sampler


@pytest.fixture
async def sampler(
    model: PreTrainedModel, folder: Path, tmp_path: Path, server: StandIn
) -> AsyncIterator[VllmSampler]:
    async with serving(model, folder, tmp_path, server.url) as found:
        found._stop_ids = frozenset()
        yield found


async def test_completions_and_scores_are_those_of_the_local_sampler(
    model: PreTrainedModel, sampler: VllmSampler
) -> None:
    params = SamplingParams(max_tokens=12, temperature=0.8, stop_token_ids=(60,))
    completions = await sampler.sample(PROMPT, params, 6)
    greedy = await sampler.sample(PROMPT, SamplingParams(max_tokens=9, temperature=0), 2)
    full = [[5 + i % 90 for i in range(length)] for length in (512, 511, 1)]
    async with LocalSampler(model, tiny_tokenizer()) as local:
        mine = await sampler.logprobs_of([*full, PROMPT])
        theirs = await local.logprobs_of([*full, PROMPT])
        [alone] = await local.sample(PROMPT, SamplingParams(max_tokens=9, temperature=0))
    for found, wanted in zip(mine, theirs, strict=True):
        assert found == pytest.approx(wanted, abs=1e-4)
    wanted = forward_logprobs(model, PROMPT, completions[0], params)
    assert completions[0].logprobs == pytest.approx(wanted, abs=1e-4)
    assert greedy[0] == greedy[1]
    assert greedy[0].token_ids == alone.token_ids
    for one in completions:
        assert one.text == tiny_tokenizer().decode(one.token_ids, skip_special_tokens=True)
        assert (one.version, one.versions) == (0, ())
        assert one.stop_reason == ("stop" if one.token_ids[-1] in (1, 60) else "length")


async def test_ends_at_stop_strings_limits_and_the_context(sampler: VllmSampler) -> None:
    [cut, _] = await sampler.sample([5] * 509, ENDLESS, 2)
    assert (cut.stop_reason, len(cut.token_ids)) in {("context", 3), ("stop", len(cut.token_ids))}
    letters = tuple("abcdefghijklmnopqrstuvwxyz")
    for one in await sampler.sample(PROMPT, SamplingParams(max_tokens=200, stop=letters), 4):
        assert one.stop_reason == "stop"
        last = tiny_tokenizer().decode(one.token_ids[-1:])
        assert one.token_ids[-1] == 1 or set(last) & set(letters)
    with pytest.raises(ValueError, match="has 512 tokens, expected fewer than the model's context"):
        await sampler.sample([5] * 512, ENDLESS)
    with pytest.raises(ValueError, match="5000"):
        await sampler.logprobs_of([[5000]])
    for heat in (-1, 2.5, 0.001):
        with pytest.raises(ValueError, match=rf"temperature: got {heat}, .* 0.01 to 2 \(vLLM's"):
            await sampler.sample(PROMPT, SamplingParams(temperature=heat))


async def test_a_publish_in_flight_gives_each_token_its_version(
    model: PreTrainedModel, other: PreTrainedModel, sampler: VllmSampler, server: StandIn
) -> None:
    server.faults(slow=0.01)
    running = asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=60), 4))
    await until_generating(server)
    await sampler.load_weights(snapshot(other), 7)
    server.faults()
    spanning = [one for one in await running if one.versions]
    assert spanning
    assert sampler.version == 7
    for one in spanning:
        assert one.version == 0
        assert list(one.versions) == sorted(one.versions)
        assert set(one.versions) == {0, 7}
        old = one.versions.index(7)
        for part, by in ((slice(0, old), model), (slice(old, None), other)):
            wanted = forward_logprobs(by, PROMPT, one, ENDLESS)
            assert one.logprobs[part] == pytest.approx(wanted[part], abs=1e-4)
    assert (await sampler.sample(PROMPT, SamplingParams(max_tokens=2)))[0].version == 7


async def until_generating(server: StandIn) -> None:
    await until(lambda: server.running.app.engine.counts()[0] > 0)


async def test_a_cancelled_request_ends_in_the_server(
    sampler: VllmSampler, server: StandIn
) -> None:
    server.faults(slow=0.01)
    before = server.running.app.aborted
    running = asyncio.create_task(sampler.sample(PROMPT, ENDLESS, 4))
    await until_generating(server)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await until(lambda: server.running.app.aborted > before)
    assert server.running.app.engine.counts()[1] == 0
    assert sampler.fleet.router.rows == [0]


async def test_what_is_cut_short_is_sampled_again(sampler: VllmSampler, server: StandIn) -> None:
    server.faults(slow=0.01)
    running = asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=40), 2))
    await until_generating(server)
    async with httpx.AsyncClient(base_url=server.url) as http:
        await http.post("/pause?mode=abort")
        await http.post("/resume")
    server.faults()
    for one in await running:
        assert one.stop_reason in ("stop", "length")
    assert len(sampler.fleet.up) == 1


async def test_a_server_that_rejects_the_first_weights_ends_the_run_at_once(
    model: PreTrainedModel, folder: Path, tmp_path: Path, server: StandIn
) -> None:
    """It serves another architecture with the same vocabulary."""
    options = VllmOptions(url=[server.url], publish="folder")
    async with await open_vllm(options, opening_of(model, folder, tmp_path)) as found:
        server.faults(fail_reload=1)
        text = r"rejects the weights of the model that is trained: .*Start it with the run's `mod"
        with pytest.raises(AdapterError, match=text):
            await found.load_weights(snapshot(model), 0)


@pytest.mark.parametrize("fault", [{"fail": {GENERATE: 2}}, {"lose": {GENERATE: 2}}])
async def test_a_lost_request_is_sent_again(
    sampler: VllmSampler, server: StandIn, fault: Mapping[str, Any], caplog: Any
) -> None:
    server.faults(**fault)
    [one] = await sampler.sample(PROMPT, SamplingParams(max_tokens=3))
    assert one.version == 0
    assert "removed from use" in caplog.text
    assert "is back, with the current weights" in caplog.text


async def test_nothing_of_a_restarted_server_is_used(
    other: PreTrainedModel, sampler: VllmSampler, server: StandIn, caplog: Any
) -> None:
    """It has the folder's weights again, and says so by its label."""
    await sampler.load_weights(snapshot(other), 3)
    server.faults(restart=True)
    [one] = await sampler.sample(PROMPT, SamplingParams(max_tokens=5))
    assert one.version == 3
    wanted = forward_logprobs(other, PROMPT, one, ENDLESS)
    assert one.logprobs == pytest.approx(wanted, abs=1e-4)
    assert "'default')" in caplog.text


async def test_a_dead_server_is_left_out_until_it_has_the_present_weights(
    model: PreTrainedModel, other: PreTrainedModel, folder: Path, tmp_path: Path
) -> None:
    params = SamplingParams(max_tokens=3)
    with stand_in(folder) as first:
        async with AsyncExitStack() as stack:
            with stand_in(folder) as second:
                port = int(second.url.rpartition(":")[2])
                urls = first.url, second.url
                found = await stack.enter_async_context(serving(model, folder, tmp_path, *urls))
                await asyncio.gather(*(found.sample(PROMPT, params, 2) for _ in range(4)))
                assert second.seen(GENERATE) > 1
                second.call(second.running.die)
                assert second.ended()
            await asyncio.gather(*(found.sample(PROMPT, params, 2) for _ in range(4)))
            assert [member.client.url for member in found.fleet.up] == [first.url]
            await found.load_weights(snapshot(other), 1)
            with stand_in(folder, port=port) as second:
                await until(lambda: len(found.fleet.up) == 2)
                assert second.running.app.engine.label == "1"
                done = await asyncio.gather(*(found.sample(PROMPT, params, 2) for _ in range(4)))
                assert {one.version for group in done for one in group} == {1}
                assert second.seen(GENERATE) > 0


async def test_without_a_server_calls_fail_after_a_while(
    model: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with stand_in(folder) as server:
        given = {"outage_seconds": 0.5}
        async with serving(model, folder, tmp_path, server.url, **given) as found:
            server.call(server.running.die)
            assert server.ended()
            text = r"no vLLM server is left: .* has not answered for 0.5 s .* run again with --res"
            with pytest.raises(AdapterError, match=text):
                await found.sample(PROMPT, ENDLESS)
            with pytest.raises(AdapterError, match=text):  # at once: the wait is over
                async with asyncio.timeout(0.2):
                    await found.sample(PROMPT, ENDLESS)
            found.fleet._until += 600
            sampling = asyncio.create_task(found.sample(PROMPT, ENDLESS))
            publishing = asyncio.create_task(found.load_weights(snapshot(model), 1))
            await asyncio.sleep(0.1)
            monkeypatch.setattr("retrain.vllm.fleet.SHORT", 0.1)
            found.fleet.stop_waiting()
            for waiting in (sampling, publishing):
                with pytest.raises(AdapterError, match="vLLM"):
                    await waiting
            assert not found.failed  # it may come back


async def test_a_server_that_dies_too_often_is_given_up(
    model: PreTrainedModel, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VllmServer, "last_lines", lambda server: "RuntimeError: no room")
    with stand_in(folder) as server:
        async with serving(model, folder, tmp_path, server.url) as found:
            [member] = found.fleet.members
            launch = Launch(Path("none"), "a")
            member.process = VllmServer(launch, folder=tmp_path, log=tmp_path / "vllm.log")
            member.restarts = 3  # the default of `restarts`
            server.call(server.running.die)
            with pytest.raises(AdapterError, match=r"sampler\.restarts(?s:.*)no room"):
                await found.logprobs_of([[1, 2, 3]])
            assert found.failed


def adapter(model: PreTrainedModel, scale: float) -> tuple[LoraWeights, torch.nn.Module]:
    """An adapter, and the model merged with it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(int(scale * 10))
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wrapped = get_peft_model(copy.deepcopy(model), config)
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=scale)
    return lora_snapshot(wrapped), wrapped.merge_and_unload()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
async def test_adapters_are_versions_and_go_when_unused(
    model: PreTrainedModel, folder: Path, tmp_path: Path, server: StandIn
) -> None:
    loaded = server.running.app.engine.adapters
    given = {"lora": AdapterSlots(4, 3)}
    async with serving(model, folder, tmp_path, server.url, **given) as sampler:
        assert sampler.wants_lora
        short = SamplingParams(max_tokens=6)
        for version in (0, 1):
            weights, whole = adapter(model, 0.3 + version)
            await sampler.load_weights(weights, version)
            [one] = await sampler.sample(PROMPT, short)
            assert (one.version, one.versions) == (version, ())
            wanted = forward_logprobs(whole, PROMPT, one, short)
            assert one.logprobs == pytest.approx(wanted, abs=1e-4)
        await until(lambda: set(loaded) == {"policy-v1"})
        server.faults(slow=0.02)
        running = asyncio.create_task(sampler.sample(PROMPT, SamplingParams(max_tokens=30), 4))
        await until_generating(server)
        await sampler.load_weights(adapter(model, 2.0)[0], 2)
        assert set(loaded) == {"policy-v1", "policy-v2"}
        server.faults()
        assert {one.version for one in await running} == {1}
        await until(lambda: set(loaded) == {"policy-v2"})
        with sampler.pinned() as kept:  # P15: an evaluation, while training goes on
            await sampler.load_weights(adapter(model, 1.0)[0], 3)
            found = await asyncio.gather(*(s.sample(PROMPT, short) for s in (kept, sampler)))
            assert [one.version for [one] in found] == [2, 3]
            assert set(loaded) == {"policy-v2", "policy-v3"}
        await until(lambda: set(loaded) == {"policy-v3"})
        beside = sampler.beside(wants_lora=True)
        await beside.load_weights(adapter(model, 0.5)[0], 100)
        found = await asyncio.gather(*(s.sample(PROMPT, short) for s in (sampler, beside)))
        assert [one.version for [one] in found] == [3, 100]
        server.faults(restart=True)  # 404: it lost the adapters
        found = await asyncio.gather(*(s.sample(PROMPT, short) for s in (beside, sampler)))
        assert [one.version for [one] in found] == [100, 3]
        await beside.close()
        await until(lambda: set(server.running.app.engine.adapters) == {"policy-v3"})


async def test_a_prompt_is_scored_alone_by_a_server_that_takes_adapters(
    sampler: VllmSampler, server: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or vLLM computes its logits with the adapters of other requests."""
    engine, alone = server.running.app.engine, []
    score = engine._score
    monkeypatch.setattr(
        engine, "_score", lambda job: alone.append(sum(engine.counts()) <= 1) or score(job)
    )
    running = [sampler.sample(PROMPT, SamplingParams(max_tokens=30), 2) for _ in range(3)]
    await asyncio.gather(*running, sampler.logprobs_of([[*PROMPT, i] for i in range(4)]))
    assert alone == [True] * 4


async def test_a_seed_reaches_no_server_on_a_cpu(
    model: PreTrainedModel, folder: Path, tmp_path: Path, server: StandIn, sampler: VllmSampler
) -> None:
    await sampler.sample(PROMPT, SamplingParams(max_tokens=2, seed=3))  # as the pipe does
    async with serving(model, folder, tmp_path, server.url, service=True) as strict:
        with pytest.raises(ValueError, match="on the CPU does not support seeds"):
            await strict.sample(PROMPT, SamplingParams(max_tokens=2, seed=3))


# --- start-up


@pytest.mark.parametrize(
    ("way", "flags", "needs", "message"),
    [
        ("folder", [f for f in FLAGS if f != "--enable-scale-out"], {}, "with --enable-scale-out"),
        ("folder", ["--dtype", "float32", "--enable-scale-out"], {}, "processed_logprobs"),
        ("adapter", FLAGS, {"lora": (8, 1)}, "--enable-lora"),
        ("adapter", [*FLAGS, *LORA], {"lora": (32, 1)}, "--max-lora-rank 16.*backend.lora"),
        ("adapter", [*FLAGS, *LORA], {"lora": (8, 4)}, "--max-loras 3.*4"),
        ("group", FLAGS, {}, "does not have retrain's worker extension, but sampler"),
        ("folder", FLAGS, {"tokens": 1000}, "--max-model-len 512.*1000"),
        (
            "group",
            [*FLAGS, *GROUP],
            {"config": {**MODEL, "hidden_size": 64}},
            r"\(/.*/a.*hidden_size 128.*64\).",
        ),
        ("folder", FLAGS, {"vocabulary": 4000}, "3999 .*4000"),
    ],
)
async def test_a_server_with_wrong_flags_is_named_with_the_right_ones(
    model: PreTrainedModel,
    folder: Path,
    way: Any,
    flags: list[str],
    needs: dict[str, Any],
    message: str,
) -> None:
    values = {"vocabulary": model.config.vocab_size, **needs}
    if "lora" in needs:
        values["lora"] = AdapterSlots(*needs["lora"])
    with stand_in(folder, defaults=flags) as server:
        async with VllmClient(server.url) as client:
            with pytest.raises(ConfigError, match=message) as caught:
                await check_server(client, ServerNeeds(way, **values))
    assert len(caught.value.problems) == 1


async def test_a_server_that_fits_passes(model: PreTrainedModel, server: StandIn) -> None:
    """Also one that a killed run left paused."""
    vocabulary = model.config.vocab_size
    async with VllmClient(server.url) as client:
        await client.pause("recompute")
        for way in ("folder", "group", "adapter"):
            found = await check_server(
                client, ServerNeeds(way, vocabulary, 512, lora=AdapterSlots(16, 3))
            )  # type: ignore[arg-type]
            assert (found.context, found.cpu) == (512, True)


async def test_the_last_check_finds_another_model(
    model: PreTrainedModel, other: PreTrainedModel, sampler: VllmSampler, server: StandIn
) -> None:
    tokenizer = tiny_tokenizer()
    probe = probe_of(tokenizer.encode("It is a text."), model.config.vocab_size)
    assert len(probe) == 33
    async with LocalSampler(other, tokenizer) as trainer:
        [expected] = await trainer.logprobs_of([probe])
        with pytest.raises(AdapterError, match=r"differ from the trainer's by [\d.]+ nats per tok"):
            await check_logprobs(sampler, probe, expected, 0.05)
        server.faults(stale_head=True)
        await sampler.load_weights(snapshot(other), 1)
        with pytest.raises(AdapterError, match="a weight did not arrive"):
            await check_logprobs(sampler, probe, expected, 0.05)
        server.faults()
        await sampler.load_weights(snapshot(other), 2)
        assert await check_logprobs(sampler, probe, expected, 0.05) < 1e-4


# --- the client


async def test_a_large_reply_is_decoded_beside_the_loop() -> None:
    row = {"token_id": 1, "logprob": -1.5, "rank": 3, "top_logprobs": [{"token_id": 1}]}
    content = json.dumps({"content": [row] * 60_000}).encode()
    assert len(content) > LARGE
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.001)
            beats += 1

    beating = asyncio.create_task(beat())
    found = await decoded(content)
    beating.cancel()
    assert len(found["content"]) == 60_000
    assert beats > 5  # json.loads by itself, in a thread too, lets none happen
