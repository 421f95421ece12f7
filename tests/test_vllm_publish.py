"""Weights on their way to vLLM servers: each way, each pause, and what fails in between."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM
from vllm_kit import FLAGS, LORA, StandIn, saved, small_model, stand_in

from retrain.engine.losses import sequence_logprobs
from retrain.engine.weights import snapshot
from retrain.errors import AdapterError
from retrain.vllm import checkpoint, delivery, group
from retrain.vllm.checkpoint import PREFIX, Manifest, WeightStore, write_model
from retrain.vllm.client import VllmClient
from retrain.vllm.delivery import AdapterDelivery, Delivery, FolderDelivery, adapter_name
from retrain.vllm.group import GroupDelivery
from retrain.vllm.options import InFlight
from retrain.vllm.publish import UNKNOWN, Publisher, PublishError
from retrain.vllm.transfer import Bucket
from tests.pipe_kit import until
from tests.test_vllm_sampler import adapter

RPC = "/collective_rpc"
PROMPT = [8, 20, 30, 40, 50]
SCORED = [8, 20, 30, 40, 50, 60, 61, 62, 63, 64]


@pytest.fixture(scope="module")
def models() -> list[PreTrainedModel]:
    """Models with tied heads that differ by several nats."""
    return [small_model(seed, tied=True, spread=0.3) for seed in range(3)]


@pytest.fixture(scope="module")
def folder(models: list[PreTrainedModel], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(models[0], tmp_path_factory.mktemp("model"))


class World:
    """Servers of the first model, their clients, and publishers to them."""

    def __init__(self, stack: AsyncExitStack, folder: Path, store: Path) -> None:
        self.stack, self.folder, self.store = stack, folder, store

    def server(self, *flags: str, at: Path | None = None, **more: Any) -> StandIn:
        return self.stack.enter_context(stand_in(at or self.folder, *flags, **more))

    def client(self, server: StandIn) -> VllmClient:
        self.stack.push_async_callback((client := VllmClient(server.url)).close)
        return client

    def publisher(self, way: str, **given: Any) -> Publisher:
        store = WeightStore(self.store, self.store)
        delivery: Delivery = AdapterDelivery(store)
        if way == "folder":
            delivery = FolderDelivery(store, str(self.folder))
        elif way == "group":
            delivery = GroupDelivery(str(self.folder), bucket_bytes=100_000, seconds=3)
        self.stack.push_async_callback((made := Publisher(delivery, **given)).close)
        return made


@pytest.fixture
async def world(folder: Path, tmp_path: Path) -> AsyncIterator[World]:
    """Closed at the end, publishers first."""
    async with AsyncExitStack() as stack:
        yield World(stack, folder, tmp_path)


async def serves(client: VllmClient, model: PreTrainedModel, name: str = "policy") -> None:
    """Check the served weights, by log-probs."""
    params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
    reply = await client.generate({"token_ids": SCORED, "model": name, "sampling_params": params})
    rows = zip(reply["prompt_logprobs"][1:], SCORED[1:], strict=True)
    found = [row[str(token)]["logprob"] for row, token in rows]
    wanted = sequence_logprobs(model, SCORED, torch.device("cpu"))[1:]
    assert found == pytest.approx(wanted, abs=1e-4)


async def label_of(client: VllmClient) -> str:
    return str((await client._get("weight_info"))["weight_version"])


def written(place: Path) -> list[str]:
    """The versions in stores in `place`."""
    return sorted(path.name for path in place.glob(f"{PREFIX}*/*[!k]"))


@pytest.mark.parametrize(("name", "in_flight"), [("group", "recompute"), ("folder", "drain")])
async def test_weights_change_in_flight(
    name: str,
    in_flight: InFlight,
    models: list[PreTrainedModel],
    world: World,
) -> None:
    server = world.server()
    client = world.client(server)
    publisher = world.publisher(name, in_flight=in_flight)
    await publisher.publish([client], snapshot(models[1]), 1)
    await serves(client, models[1])
    server.faults(slow=0.01)
    settings = {"max_tokens": 60, "logprobs": 0, "ignore_eos": True, "detokenize": False}
    sampling = asyncio.create_task(
        client.generate({"token_ids": PROMPT, "model": "policy", "sampling_params": settings})
    )
    await until(lambda: any(server.running.app.engine._rows()))
    await publisher.publish([client], snapshot(models[2]), 2)
    [choice] = (await sampling)["choices"]
    spans = {int(span["version"]): span for span in choice["weight_versions"]}
    assert set(spans) == ({1, 2} if in_flight == "recompute" else {1})
    found = [one["logprob"] for one in choice["logprobs"]["content"]]
    for version, span in spans.items():
        ids = PROMPT + choice["token_ids"]
        wanted = sequence_logprobs(models[version], ids, torch.device("cpu"))[len(PROMPT) :]
        own = slice(span["start"], span["end"])
        assert found[own] == pytest.approx(wanted[own], abs=1e-4)
    await serves(client, models[2])
    assert await label_of(client) == "2"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
async def test_adapters_live_until_they_are_retired(
    models: list[PreTrainedModel], world: World, tmp_path: Path
) -> None:
    server = world.server(*LORA)
    client, later = world.client(server), world.client(world.server(*LORA))
    adapters = [adapter(models[0], 0.5 + seed) for seed in range(3)]
    old = world.publisher("adapter")
    await old.publish([client], adapters[2][0], 1)  # an earlier run
    await old.close()
    publisher = world.publisher("adapter")
    for version in (0, 1):
        await publisher.publish([client], adapters[version][0], version)
    for version in (0, 1):
        await serves(client, adapters[version][1], adapter_name(version))
    assert not server.seen("/pause")
    await publisher.bring_up(later)
    await serves(later, adapters[0][1], adapter_name(0))
    await publisher.retire([client, later], 0)
    assert [model["id"] for model in await client.models()] == ["policy", "policy-v1"]
    await serves(later, adapters[1][1], adapter_name(1))
    assert written(tmp_path) == ["policy-v1-2"]
    await publisher.close()
    assert not written(tmp_path)


@pytest.mark.parametrize("name", ["group", "folder"])
async def test_weights_that_do_not_fit_change_no_server(
    name: str, models: list[PreTrainedModel], world: World
) -> None:
    server = world.server()
    client, publisher = world.client(server), world.publisher(name)
    weights: dict[str, Tensor] = snapshot(models[1])
    weights["extra"] = weights.pop("model.norm.weight")
    weights["model.embed_tokens.weight"] = torch.zeros(2, 2)
    said = r"missing: model.norm.weight; unknown: extra; wrong shape: model.embed_tokens.weight \(2"
    with pytest.raises(AdapterError, match=said):
        await publisher.publish([client], weights, 1)
    untied = snapshot(models[1])
    untied["lm_head.weight"] = untied["lm_head.weight"] + 1
    with pytest.raises(AdapterError, match=r"untied: lm_head\.weight"):
        await publisher.publish([client], untied, 1)
    assert not server.seen("/pause")
    with pytest.raises(AdapterError, match="nothing is published yet"):
        await publisher.bring_up(client)


async def test_a_failed_reload_makes_one_server_unusable(
    models: list[PreTrainedModel], world: World
) -> None:
    good, bad = world.server(), world.server()
    clients = [world.client(good), world.client(bad)]
    publisher = world.publisher("folder")
    bad.faults(fail_reload=1)
    with pytest.raises(PublishError, match="a fault of the stand-in") as raised:
        await publisher.publish(clients, snapshot(models[1]), 1)
    assert list(raised.value.failed) == [clients[1]]
    await serves(clients[0], models[1])
    await publisher.publish(clients[:1], snapshot(models[2]), 2)
    await until(lambda: not publisher._resuming)
    assert await label_of(clients[1]) == UNKNOWN
    bad.faults(restart=True)
    await publisher.bring_up(clients[1])
    await serves(clients[1], models[2])
    assert await label_of(clients[1]) == "2"


@pytest.mark.parametrize("fault", [{"lose": {"/resume": 2}}, {"fail": {"/resume": 1}}])
async def test_resume_is_sent_until_it_is_answered(
    fault: Mapping[str, Any], models: list[PreTrainedModel], world: World
) -> None:
    server = world.server()
    client, publisher = world.client(server), world.publisher("folder")
    server.faults(**fault)
    await publisher.publish([client], snapshot(models[1]), 1)
    assert server.running.app.engine.paused is None
    await serves(client, models[1])


@pytest.mark.parametrize(("path", "label"), [("/pause", "default"), (RPC, UNKNOWN)])
async def test_a_cancelled_publish_resumes(
    path: str,
    label: str,
    models: list[PreTrainedModel],
    world: World,
) -> None:
    server = world.server()
    client, publisher = world.client(server), world.publisher("folder")
    server.faults(hang={path: 1})
    publishing = asyncio.create_task(publisher.publish([client], snapshot(models[1]), 1))
    await until(lambda: server.seen(path))
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await publisher.close()
    assert server.seen("/resume") == 1
    assert await label_of(client) == label


async def test_a_hung_server_is_given_up(models: list[PreTrainedModel], world: World) -> None:
    server = world.server()
    client, publisher = world.client(server), world.publisher("folder", seconds=0.5)
    server.faults(hang={RPC: 1})
    with pytest.raises(PublishError, match=r"the weights did not arrive within 0\.5 s"):
        await publisher.publish([client], snapshot(models[1]), 1)


@pytest.mark.parametrize("name", ["folder", "group"])
async def test_a_server_whose_engine_dies_is_given_up_at_once(
    name: str,
    models: list[PreTrainedModel],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's API server never answers some calls then."""
    monkeypatch.setattr(delivery, "ALIVE_SECONDS", 0.02)
    monkeypatch.setattr(group, "GRACE", 0.2)
    server = world.server()
    client, publisher = world.client(server), world.publisher(name)
    publisher._delivery._seconds = 1.0
    await publisher.publish([client], snapshot(models[2]), 0)
    server.faults(hang={RPC: 1})
    before = server.seen(RPC)
    publishing = asyncio.create_task(publisher.publish([client], snapshot(models[1]), 1))
    await until(lambda: server.seen(RPC) > before)
    server.call(server.running.app.engine.fail)
    with pytest.raises(PublishError, match="died while its weights changed"):
        await publishing


@pytest.mark.parametrize("fault", [{"hang": {RPC: 1}}, "die"])
async def test_the_group_goes_on_without_a_lost_server(
    fault: Any,
    models: list[PreTrainedModel],
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group, "GRACE", 0.2)
    lost, good = world.server(), world.server()
    clients = [world.client(lost), world.client(good)]
    publisher = world.publisher("group")
    publisher._delivery._seconds = 1.0
    await publisher.publish(clients, snapshot(models[1]), 1)
    for client in clients:
        await serves(client, models[1])
    if fault == "die":
        lost.call(lost.running.die)
        lost.running.app.engine.leave()
    else:
        lost.faults(**fault)
        publisher._delivery._leave()
    with pytest.raises(PublishError) as raised:
        await publisher.publish(clients, snapshot(models[2]), 2)
    assert list(raised.value.failed) == [clients[0]]
    await serves(clients[1], models[2])
    assert await label_of(clients[1]) == "2"
    for _ in range(2):  # and at the next publish
        await publisher.publish(clients[1:], snapshot(models[1]), 3)
        await serves(clients[1], models[1])


async def test_a_cancelled_transfer_leaves_nothing_behind(
    models: list[PreTrainedModel], world: World
) -> None:
    server = world.server()
    client, publisher = world.client(server), world.publisher("group")
    await publisher.publish([client], snapshot(models[2]), 0)
    server.faults(hang={RPC: 1})
    before = server.seen(RPC)
    publishing = asyncio.create_task(publisher.publish([client], snapshot(models[1]), 1))
    await until(lambda: server.seen(RPC) > before)
    publishing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await publishing
    await publisher.bring_up(client)
    await serves(client, models[1])


async def test_a_stock_server_on_a_cpu_needs_an_untied_model(
    models: list[PreTrainedModel],
    world: World,
    folder: Path,
    tmp_path: Path,
) -> None:
    tied = world.client(world.server(defaults=FLAGS))
    with pytest.raises(PublishError, match="keeps the old head of a model with tied embeddings"):
        await world.publisher("folder").publish([tied], snapshot(models[1]), 1)
    copied = small_model(0, tied=False, spread=0.3)
    copied.load_state_dict(snapshot(models[0]))
    untied = world.client(world.server(defaults=FLAGS, at=saved(copied, tmp_path / "untied")))
    publisher = world.publisher("folder")
    await publisher.publish([untied], snapshot(models[1]), 1)
    await serves(untied, models[1])


def test_experts_are_sent_under_the_names_of_a_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 8, "head_dim": 4, "num_hidden_layers": 1, "vocab_size": 10}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 6}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    config = Qwen3MoeConfig(**sizes, **experts, **heads, tie_word_embeddings=False)
    config.save_pretrained(tmp_path)
    model = Qwen3MoeForCausalLM(config).requires_grad_(False)
    weights = snapshot(model)
    sent = Manifest.of(str(tmp_path)).complete(weights, heads=False)
    model.save_pretrained(tmp_path)
    wanted = load_file(tmp_path / "model.safetensors")
    assert sent.keys() == wanted.keys()
    for name, tensor in sent.items():
        torch.testing.assert_close(tensor, wanted[name])


def test_a_model_is_written_in_shards_of_the_wanted_type(tmp_path: Path) -> None:
    tied = torch.randn(4, 8)
    weights = {"a": tied, "b": torch.arange(3), "c": tied, "d": torch.randn(100, 4)}
    write_model(tmp_path, weights, {"x": 1}, dtype=torch.bfloat16, shard_bytes=100)
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert [sorted(load_file(path)) for path in shards] == [["a", "b"], ["c"], ["d"]]
    assert shards[0].name == "model-00001-of-00003.safetensors"
    found = {name: tensor for path in shards for name, tensor in load_file(path).items()}
    for name, tensor in weights.items():
        wanted = tensor.bfloat16() if tensor.is_floating_point() else tensor
        torch.testing.assert_close(found[name], wanted)


async def test_a_store_prefers_memory_and_removes_what_killed_runs_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, scratch = tmp_path / "shm", tmp_path / "scratch"
    memory.mkdir()
    scratch.mkdir()
    monkeypatch.setattr(checkpoint, "MEMORY", memory)
    (memory / f"{PREFIX}dead").mkdir()
    (memory / f"{PREFIX}dead" / ".lock").touch()
    fill = lambda folder: (folder / "a").touch()  # noqa: E731
    first, second, large = (WeightStore(None, scratch) for _ in range(3))
    one = await first.write("v1", 1000, fill)
    two = await second.write("v1", 1000, fill)  # removes nothing of a run that lives
    three = await large.write("v1", 1 << 60, fill)
    assert one.parent.parent == two.parent.parent == memory
    assert three.parent.parent == scratch
    assert (one / "a").exists()
    assert not (memory / f"{PREFIX}dead").exists()

    def no_room(folder: Path) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(AdapterError, match=r"space.*backend\.sampler"):
        await first.write("v2", 1000, no_room)
    assert [path.name for path in one.parent.iterdir() if path.name != ".lock"] == ["v1-1"]
    for store in (first, second, large):
        store.close()
    assert not [*memory.iterdir(), *scratch.iterdir()]


def test_a_bucket_is_packed_and_unpacked() -> None:
    weights = {
        "a": torch.randn(3, 5).bfloat16(),
        "b": torch.tensor(7),
        "c": torch.randn(2, 1, 2),
        "d": torch.zeros(0, 4),
    }
    types = ["bfloat16", "int64", "float16", "float32"]
    bucket = Bucket(list(weights), types, [list(tensor.shape) for tensor in weights.values()])
    for name, tensor in bucket.unpack(bucket.pack(weights, torch.device("cpu"))):
        torch.testing.assert_close(tensor, weights[name].to(tensor.dtype), check_dtype=False)
        assert str(tensor.dtype) == f"torch.{types[list(weights).index(name)]}"
