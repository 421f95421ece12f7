"""The service with a fleet of vLLM servers as its sampler, over the stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from vllm_kit import FLAGS, GROUP, LORA, StandIn, stand_in

from retrain.engine.tiny import tiny_folder
from retrain.service.core import Service
from retrain.service.fleet_sampler import FleetSampler
from retrain.service.serve import main
from retrain.service.state import ServiceSettings
from retrain.vllm.client import VllmClient
from retrain.vllm.options import VllmOptions
from tests.service_kit import TOKENS, Tinker, in_process, passed
from tests.test_service_snapshots import (
    test_likeliest_and_given_tokens_of_the_prompt_have_the_models_log_probs as check_likeliest,
)

GENERATE = "/inference/v1/generate"
RELOAD = "/collective_rpc"
LOAD = "/v1/load_lora_adapter"


@pytest.fixture(scope="module")
def server() -> Iterator[StandIn]:
    """It holds two adapters, besides a free slot."""
    with stand_in(tiny_folder(), defaults=(*FLAGS, *GROUP, *LORA)) as found:
        yield found


@pytest.fixture(params=["auto"])
async def tinker(server, tmp_path, request) -> AsyncIterator[Tinker]:
    """A service that publishes as the parameter says."""
    server.faults(restart=True)
    options = VllmOptions(url=server.url, publish=request.param)
    async with in_process(tmp_path, vllm=options) as client:
        await client.start()
        yield client


whole_weights = pytest.mark.parametrize("tinker", ["folder"], indirect=True)


async def trained(tinker: Tinker, number: int, rate: float, **lora) -> str:
    """A new model after one step, and its log-probs of TOKENS."""
    model_id = await tinker.model(number, **lora)
    await tinker.done("forward_backward", 1, model_id=model_id, **passed())
    await tinker.done("optim_step", 2, model_id=model_id, adam_params={"learning_rate": rate})
    return model_id


async def adapters(server: StandIn) -> set[str]:
    async with VllmClient(server.url) as client:
        return {model["id"] for model in await client.models() if model.get("parent")}


async def until_adapters(server: StandIn, count: int) -> set[str]:
    """They are freed in a task."""
    async with asyncio.timeout(10):
        while len(found := await adapters(server)) != count:  # noqa: ASYNC110 - on the server
            await asyncio.sleep(0.01)
    return found


async def test_likeliest_and_given_tokens_are_those_of_the_model(tinker):
    await check_likeliest(tinker)


async def test_snapshots_are_adapters_side_by_side(tinker, server):
    reloads = server.seen(RELOAD)
    models = [await trained(tinker, 1 + i, 0.01 * (1 + i)) for i in range(3)]
    expected = [await tinker.logprobs(3, model) for model in models]
    samplers = [await tinker.snapshot(4, i, model) for i, model in enumerate(models)]
    first = [await tinker.score(sampler, 0) for sampler in samplers[:2]]
    two = await adapters(server)
    assert len(two) == 2
    third = await tinker.score(samplers[2], 0)  # the first one makes room for it
    assert len(await until_adapters(server, 2) & two) == 1
    again = await tinker.score(samplers[0], 1)
    assert again == first[0]
    for found, wanted in zip((*first, third), expected, strict=True):
        assert found == pytest.approx(wanted, abs=1e-5)
    assert server.seen(RELOAD) == reloads, "adapters need no new weights of the model"


@whole_weights
async def test_whole_weights_wait_until_no_other_weights_are_used(tinker, server):
    full = await trained(tinker, 1, 0.01, rank=0)
    lora = await trained(tinker, 2, 0.02, rank=32, train_unembed=False)
    expected = [await tinker.logprobs(3, model) for model in (full, lora)]
    samplers = [await tinker.snapshot(4, i, model) for i, model in enumerate((full, lora))]
    base = await tinker.base_sampler(7)
    server.faults(delay={GENERATE: 0.05})
    plain = await tinker.score(base, 0)
    order = [0, 1, 0, 1, 1, 0]
    scores = await asyncio.gather(*(tinker.score(samplers[i], at) for at, i in enumerate(order)))
    for index, found in zip(order, scores, strict=True):
        assert found == pytest.approx(expected[index], abs=1e-5)
    assert await tinker.score(base, 1) == pytest.approx(plain, abs=1e-6)


async def rejected(tinker: Tinker, sampler: str, seq_id: int = 0, **params) -> str:
    """The error of a sample request."""
    given = {"max_tokens": 1, **params}
    return (await tinker.result(await tinker.asample(sampler, seq_id, sampling_params=given)))[
        "error"
    ]


async def test_what_the_servers_cannot_serve_is_rejected_with_the_option_to_change(tinker):
    for number, rank in enumerate((32, 0)):
        model = await trained(tinker, 1 + number, 0.01, rank=rank)
        sampler = await tinker.snapshot(3, number, model)
        assert "publish=folder" in await rejected(tinker, sampler)
    base = await tinker.base_sampler(7)
    assert "seed" in await rejected(tinker, base, 0, seed=3)
    assert "temperature: got 2.5" in await rejected(tinker, base, 1, temperature=2.5)
    assert len(await tinker.score(base, 2)) == len(TOKENS) - 1


@whole_weights
async def test_a_lora_on_a_tied_output_layer_is_not_whole_weights(tinker):
    sampler = await tinker.snapshot(3, 0, await trained(tinker, 1, 0.01))
    assert "publish=adapter" in await rejected(tinker, sampler)


async def test_an_adapter_whose_load_is_cancelled_is_freed(tinker, server):
    sampler = await tinker.snapshot(3, 0, await trained(tinker, 1, 0.01))
    pool = tinker.app.service._pool
    server.faults(delay={LOAD: 0.3})
    before, place = server.seen(LOAD), tinker.app.service.samplers[sampler].place

    async def use() -> None:
        async with pool.use(place):
            raise AssertionError("it was never loaded")

    using = asyncio.create_task(use())
    async with asyncio.timeout(10):
        while server.seen(LOAD) == before:  # noqa: ASYNC110 - in another thread
            await asyncio.sleep(0.01)
    using.cancel()
    await asyncio.wait([using])
    server.faults()
    assert using.cancelled()
    await until_adapters(server, 0)
    way = pool._whole.fleet.publisher._adapters
    assert not way._folders, "a server that restarts would load it"


async def test_servers_that_do_not_answer_fail_the_request_alone(tinker, server, monkeypatch):
    base = await tinker.base_sampler(7)
    plain = await tinker.score(base, 0)
    monkeypatch.setattr("retrain.service.fleet.SAMPLE_SECONDS", 0.05)
    server.faults(delay={GENERATE: 1.0})
    assert "0.05 s" in await rejected(tinker, base, 1)
    monkeypatch.undo()
    server.faults()
    assert await tinker.score(base, 2) == plain


async def test_an_error_at_the_end_leaves_nothing_open(tmp_path, server, monkeypatch):
    service = Service(ServiceSettings(folder=tmp_path, vllm=VllmOptions(url=server.url)))
    await service.__aenter__()
    fleet = service._pool._whole.fleet
    monkeypatch.setattr(fleet, "close", failing(fleet.close))
    with pytest.raises(OSError, match="full"):
        await service.__aexit__()
    assert service._engine._executor._shutdown
    async with Service(ServiceSettings(folder=tmp_path)):  # the folder is free again
        pass


def failing(close):
    async def closed() -> None:
        await close()
        raise OSError("the disk is full")

    return closed


async def test_too_many_given_tokens_are_refused(tinker, monkeypatch):
    monkeypatch.setattr("retrain.service.fleet_sampler.WIDEST", 107 * 3)
    async with tinker.app.service._pool.use(None) as sampler:
        assert isinstance(sampler, FleetSampler)
        with pytest.raises(ValueError, match="at most 3"):
            await sampler.alternatives(TOKENS, given=[[1]] * 5)


async def test_a_sequence_that_fills_the_context_has_alternatives(tinker):
    async with tinker.app.service._pool.use(None) as sampler:
        full = [7 + i % 90 for i in range(sampler.context_length)]
        found = await sampler.alternatives(full, top=3)
        assert found.top.ids.shape == (len(full) - 1, 3)
        assert (await sampler.alternatives([7], top=3)).top.ids.shape == (0, 3)


async def test_a_server_that_restarts_gets_the_present_snapshots(tinker, server):
    model = await trained(tinker, 1, 0.01)
    sampler, base = await tinker.snapshot(3, 0, model), await tinker.base_sampler(7)
    before = await tinker.score(sampler, 0), await tinker.score(base, 0)
    server.faults(restart=True)
    assert (await tinker.score(sampler, 1), await tinker.score(base, 1)) == before


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--sampler", "vllm"], "neither of url and python"),
        (["--vllm", "url=http://127.0.0.1:1"], "--sampler vllm"),
        (["--sampler", "vllm", "--vllm", "url=x"], "--vllm url: got 'x'"),
        (["--sampler", "vllm", "--vllm", "url"], "key=value"),
        (["--sampler", "vllm", "--vllm", "python=/no"], "--vllm python: /no"),
    ],
)
def test_wrong_options(given, message, capsys, tmp_path):
    assert main(["--port", "0", "--folder", str(tmp_path), *given]) == 2
    assert message in capsys.readouterr().err
