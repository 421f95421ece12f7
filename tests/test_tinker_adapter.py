"""The Tinker adapter: batches to the wire and back, published weights, exact state."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from retrain.adapters.base import AdapterState
from retrain.adapters.remote.adapter import grad_norm
from retrain.adapters.remote.datums import shift
from retrain.adapters.remote.surrogate import surrogate
from retrain.adapters.tinker.adapter import TinkerAdapter, loss_config, service_metrics
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.tinker.sampling import cut
from retrain.assembly import assemble
from retrain.config import Plugin, RunConfig, parse_config
from retrain.engine.tiny import tiny_tokenizer
from retrain.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    NonFiniteError,
    install_command,
)
from retrain.sampler import SamplingParams
from retrain.types import Batch, Denominators, Sample
from retrain.wire.refusals import RemoteError
from retrain.wire.tinker import messages
from retrain.wire.tinker.values import ForwardBackward, ForwardBackwardOutput, SampledSequence
from tests.tinker_server import HOSTED, OPEN_RL, SKYRL, Faulty, Peer, TinkerServer, logprob

PEERS = {"hosted": HOSTED, "skyrl": SKYRL, "open_rl": OPEN_RL}


def config(**keys: Any) -> RunConfig:
    return RunConfig(prompts=Plugin(type="list"), name="run", **keys)


def adapter(server: TinkerServer, run: RunConfig | None = None, **options: Any) -> TinkerAdapter:
    options = {
        "url": "http://server",
        "base_model": "org/base",
        "wire": "proto" if server.peer.proto else "json",
        "assume_sum": True,  # this server trains nothing
        **options,
    }
    return TinkerAdapter(TinkerOptions(**options), run or config(), http=server.transport())


def sample(*tokens: int, prompt: int = 1, advantage: float = 1.0, **streams: float) -> Sample:
    length = len(tokens)
    mask = [0] * prompt + [1] * (length - prompt)
    return Sample(
        token_ids=tokens,
        loss_mask=mask,
        logprobs=[logprob(t, 0) * m for t, m in zip(tokens, mask, strict=True)],
        advantages=[advantage * m for m in mask],
        versions=[0 if m else -1 for m in mask],
        streams={name: [value] * length for name, value in streams.items()},
    )


def batch(*samples: Sample, loss: str = "ppo", **settings: Any) -> Batch:
    return Batch(samples, loss, settings, Denominators(1, 1))


def sent(server: TinkerServer, name: str = "forward_backward", index: int = -1) -> ForwardBackward:
    body = server.bodies[name][index]
    assert isinstance(body, bytes)
    return messages.decode_request(body)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
async def test_a_native_loss_is_one_pass_with_the_step_behind_it(loss: str) -> None:
    server = TinkerServer()
    async with adapter(server) as tinker:
        server.calls.clear()
        metrics = await tinker.update(batch(sample(3, 4, 5), sample(6, 7), loss=loss))
    request = sent(server)
    assert (request.loss, request.config) == (loss, loss_config(loss, {}))
    first = request.data[0]
    assert list(first.tokens) == [3, 4]
    assert {name: list(t.data) for name, t in first.inputs.items()} == {
        "target_tokens": [4, 5],
        "logprobs": [logprob(4, 0), logprob(5, 0)],
        "advantages": [1.0, 1.0],
    }
    assert server.calls["forward_backward"] == server.calls["optim_step"] == 1
    assert metrics["kl/sampler_trainer"] == pytest.approx(0.0)
    assert metrics["ratio/mean"] == pytest.approx(1.0)
    assert metrics["service/loss:sum"] == 2.0
    assert metrics["learning_rate"] == 1e-4


def test_clip_bounds_go_out_as_ratios() -> None:
    assert loss_config("ppo", {"epsilon": 0.1, "epsilon_high": 0.3}) == {
        "clip_low_threshold": 0.9,
        "clip_high_threshold": 1.3,
    }
    assert loss_config("cispo", {}) == {"clip_low_threshold": 0.0, "clip_high_threshold": 5.0}
    assert loss_config("dro", {"beta": 0.2}) == {"beta": 0.2}
    assert loss_config("importance_sampling", {}) == {}


async def test_cross_entropy_weighs_by_the_advantages() -> None:
    server = TinkerServer()
    async with adapter(server) as tinker:
        metrics = await tinker.update(batch(sample(3, 4, 5, advantage=0.5), loss="cross_entropy"))
    assert list(sent(server).data[0].inputs["weights"].data) == [0.5, 0.5]
    assert metrics["loss"] == pytest.approx(-0.5 * (logprob(4, 0) + logprob(5, 0)))


@pytest.mark.parametrize("loss", ["ppo", "importance_sampling", "cispo", "dro"])
async def test_a_loss_that_the_service_lacks_goes_out_as_its_gradient(loss: str) -> None:
    server = TinkerServer()
    samples = [sample(3, 4, 5), sample(6, 7, 8, 9, prompt=2, advantage=-2.0)]
    async with adapter(server, native_losses=["cross_entropy"]) as tinker:
        await tinker.update(batch(samples[0], loss="cross_entropy"))
        metrics = await tinker.update(batch(*samples, loss=loss))
    datums = [shift(one) for one in samples]
    learner = [[logprob(t, 1) for t in datum.targets] for datum in datums]
    expected = surrogate(loss, {}, learner, datums)
    assert sent(server, index=-2).forward_only
    request = sent(server)
    assert request.loss == "cross_entropy"
    assert not request.forward_only
    for one, slopes in zip(request.data, expected.gradients, strict=True):
        assert list(one.inputs["weights"].data) == pytest.approx([-slope for slope in slopes])
    assert metrics["loss"] == pytest.approx(expected.loss)
    (model,) = server.models.values()
    assert model.applied == [1, 2], "the forward pass must not add gradients"


@pytest.mark.parametrize(
    ("loss", "normaliser"), [("dapo", 1 / 3), ("grpo", 1 / 4), ("dr_grpo", 1 / (2 * 256))]
)
async def test_trl_names_run_as_the_shared_loss_that_they_are(loss: str, normaliser: float) -> None:
    server = TinkerServer()
    samples = [sample(3, 4, 5), sample(6, 7)]
    async with adapter(server) as tinker:
        await tinker.update(Batch(samples, loss, {}, Denominators(tokens=3, sequences=2)))
    assert sent(server).loss == "ppo"
    assert list(sent(server).data[0].inputs["advantages"].data) == pytest.approx([normaliser] * 2)


async def test_the_rate_follows_its_schedule_and_adam_gets_every_key() -> None:
    server = TinkerServer()
    run = config(train={"total_train_steps": 4})
    keys = {"learning_rate": 0.4, "lr_scheduler": "linear", "warmup_steps": 2, "beta1": 0.1,
            "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4, "max_grad_norm": 0.5}  # fmt: skip
    async with adapter(server, run, **keys) as tinker:
        rates = [(await tinker.update(batch(sample(3, 4))))["learning_rate"] for _ in range(5)]
    assert rates == pytest.approx([0.0, 0.2, 0.4, 0.2, 0.0])
    (model,) = server.models.values()
    assert model.rates == rates
    assert {**model.adam, "learning_rate": 0} == {
        "learning_rate": 0, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4,
        "grad_clip_norm": 0.5,
    }  # fmt: skip


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
async def test_published_weights_are_served_and_the_ones_before_end_with_their_samples(
    peer: Peer,
) -> None:
    server = TinkerServer(peer)
    params = SamplingParams(max_tokens=2)
    async with adapter(server) as tinker:
        first = (await tinker.sampler.sample([1, 2], params))[0]
        assert first.version == 0
        server.hold.clear()
        slow = asyncio.create_task(tinker.sampler.sample([1, 2], params, n=2))
        await server.called("asample", 2)
        await tinker.update(batch(sample(3, 4)))
        assert await tinker.publish() == 1
        server.hold.set()
        old = await slow
        new = (await tinker.sampler.sample([1, 2], params))[0]
    assert [c.version for c in old] == [0, 0]
    assert list(old[0].logprobs) == list(first.logprobs), "it began with the old weights"
    assert new.version == 1
    assert list(new.logprobs) == pytest.approx([logprob(t, 1) for t in new.token_ids])
    assert new.text == tiny_tokenizer().decode(new.token_ids)


@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
async def test_a_run_continues_from_what_it_saved(peer: Peer, tmp_path: Path) -> None:
    server = TinkerServer(peer)
    async with adapter(server, lr_scheduler="cosine", weight_decay=0.25) as tinker:
        for _ in range(3):
            await tinker.update(batch(sample(3, 4)))
            await tinker.publish()
        state = await tinker.save(tmp_path)
        assert await tinker.export(tmp_path / "final") == state.data["path"]
        expected = (await tinker.update(batch(sample(3, 4))))["learning_rate"]
    async with adapter(server, lr_scheduler="cosine", weight_decay=0.25) as tinker:
        await tinker.load(AdapterState(tmp_path, state.data))
        assert await tinker.export(tmp_path / "final") == state.data["path"]
        (completion,) = await tinker.sampler.sample([1], SamplingParams(max_tokens=1))
        assert completion.version == 3
        assert list(completion.logprobs) == pytest.approx([logprob(completion.token_ids[0], 3)])
        resumed = list(server.models.values())[-1]
        assert (resumed.steps, resumed.adam["weight_decay"]) == (3, 0.25)
        assert (await tinker.update(batch(sample(3, 4))))["learning_rate"] == expected
        assert await tinker.publish() == 4
        await tinker.forget(state)
        await tinker.forget(state)
        assert not server.saved


async def test_a_checkpoint_that_the_service_dropped_is_said_to_be_gone(tmp_path: Path) -> None:
    server = TinkerServer(SKYRL)
    gone = AdapterState(tmp_path, {"path": "tinker://m/weights/x", "step": 1, "version": 1})
    async with adapter(server) as tinker:
        with pytest.raises(CheckpointError, match="Choose another checkpoint"):
            await tinker.load(gone)


async def test_a_service_that_keeps_its_logprobs_still_trains_its_own_losses() -> None:
    output = ForwardBackwardOutput([{}], {"loss:sum": 3.0})
    assert service_metrics(output, needed=True) == {"loss": 3.0, "service/loss:sum": 3.0}
    with pytest.raises(NonFiniteError):
        service_metrics(ForwardBackwardOutput([{}], {}), needed=True)


def test_the_gradients_norm_is_found_under_its_names() -> None:
    assert grad_norm({"skyrl.ai/grad_norm": 2.0, "lr:last": 1.0}) == {"grad_norm": 2.0}
    assert grad_norm({"grad_norm:mean": 1.0}) == {"grad_norm": 1.0}
    assert grad_norm({"param_norm": 1.0}) == {}


async def test_a_batch_without_a_trained_token_is_refused_before_it_is_sent() -> None:
    server = TinkerServer()
    async with adapter(server) as tinker:
        with pytest.raises(AdapterError, match="no token to train on"):
            await tinker.update(batch(sample(3, 4, prompt=2)))
    assert server.calls["forward_backward"] == 0


@pytest.mark.parametrize(
    ("stop", "stop_ids", "kept"),
    [
        ((), (), "abcabd"),
        (("cab",), (), "abcab"),
        (("d", "bc"), (), "abc"),
        (("x",), (), "abcabd"),
        ((), ("b",), "ab"),
        (("abc",), ("d",), "abc"),
        (("abd",), ("c",), "abc"),
    ],
)
def test_a_completion_ends_with_its_first_stop(
    stop: tuple[str, ...], stop_ids: tuple[str, ...], kept: str
) -> None:
    tokenizer: Any = tiny_tokenizer()
    ids = tokenizer.encode("abcabd")
    params = SamplingParams(
        stop=stop, stop_token_ids=tuple(tokenizer.encode(one)[0] for one in stop_ids)
    )
    sequence = SampledSequence(ids, [-float(i) for i in range(6)], "length")
    served = cut(sequence, params, tokenizer)
    assert tokenizer.decode(served.tokens) == kept
    assert list(served.logprobs) == [-float(i) for i in range(len(kept))]
    assert served.stop_reason == ("length" if kept == "abcabd" and not stop_ids else "stop")
    with pytest.raises(AdapterError, match="log-prob for each token"):
        cut(SampledSequence(ids, None, "stop"), params, tokenizer)


async def test_what_to_sample_reaches_the_wire_in_the_protocols_terms() -> None:
    server = TinkerServer()
    params = SamplingParams(3, 0.5, 0.9, 7, ("a", "b"), (), 11)
    async with adapter(server) as tinker:
        await tinker.sampler.sample([1], params)
        await tinker.sampler.sample([1], SamplingParams(3, stop=("a",), stop_token_ids=(5,)))
    first, second = (body["sampling_params"] for body in server.bodies["asample"])
    assert first == {"max_tokens": 3, "temperature": 0.5, "top_p": 0.9, "top_k": 7,
                     "stop": ["a", "b"], "seed": 11}  # fmt: skip
    assert second == {"max_tokens": 3, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "stop": [5]}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_fn": "ppo"}, "loss_fn"),
        ({"lora": {"alpha": 8}}, "lora.alpha"),
        ({"learning_rate": 0}, "greater than 0"),
        ({"native_losses": ["dpo"]}, "native_losses"),
    ],
)
def test_wrong_keys_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TinkerOptions(**keys)


@pytest.mark.parametrize("kind", ["trl", "tinker", "weaver"])
def test_options_that_no_service_takes_are_told_in_the_words_of_a_config(kind: str) -> None:
    backend = {"type": kind, "learning_rate": math.inf, "native_losses": "ppo"}
    if kind == "trl":
        backend = {"type": kind, "learning_rate": 1.0, "lora": {"alpha": math.nan}}
    with pytest.raises(ConfigError) as raised:
        assemble(parse_config({"prompts": ["a"], "rewards": "exact_match", "backend": backend}))
    assert list(raised.value.problems) == {
        "trl": ["backend.lora.alpha: got nan, expected a finite number"]
    }.get(
        kind,
        [
            "backend.learning_rate: got inf, expected a finite number",
            "backend.native_losses: got 'ppo', expected a list",
        ],
    )


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({"url": "host:1"}, {}, "path], `local` or `hosted`"),
        ({"url": "hosted"}, {}, "TINKER_API_KEY"),
        ({"warmup_steps": 9}, {"train": {"total_train_steps": 5}}, "longer than the run"),
        ({}, {"checkpoint": {"merge_lora": True}}, "merge_lora"),
        ({}, {"algorithm": {"loss": "ppo", "loss_config": {"delta": 1}}}, "'ppo' has no such key"),
        ({"lora": {"train_mlp": False, "train_attn": False, "train_unembed": False}}, {},
         "nothing would be trained"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_a_problem_at_the_start(
    options: dict[str, Any], run: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    problems = TinkerOptions(**options).problems(config(**run))
    assert any(message in problem for problem in problems), problems


def test_a_local_service_without_its_libraries_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-k")
    monkeypatch.setattr("retrain.adapters.remote.options.LOCAL_NEEDS", ("no_such_library",))
    [problem] = TinkerOptions(url="local").problems(config())
    assert "(no_such_library)" in problem
    assert install_command("service") in problem
    for url in ("hosted", "http://elsewhere"):
        assert TinkerOptions(url=url).problems(config()) == []


async def test_a_service_that_lost_the_model_is_told_in_the_same_words_by_every_call() -> None:
    server = TinkerServer()
    faulty = Faulty(server.transport())
    tinker = adapter(server)
    tinker._http = faulty
    async with tinker:
        calls = {
            "retrieve_future": lambda: tinker.update(batch(sample(3, 4, 5))),
            "save_weights_for_sampler": tinker.publish,
            "save_weights": lambda: tinker.save(Path()),
            "asample": lambda: tinker.sampler.sample([1, 2], SamplingParams(max_tokens=1)),
        }
        messages = set()
        for number, (name, call) in enumerate(calls.items()):
            gone = {"code": "not_found", "detail": f"the request {number} is not on this service"}
            faulty.before[name] += [httpx.Response(404, json=gone)] * 9
            with pytest.raises(RemoteError, match="--resume") as raised:
                await call()
            messages.add(str(raised.value))
            faulty.before.clear()
    assert len(messages) == 1


async def test_the_local_service_trains_a_loss_of_its_own_and_ours_alike(tmp_path: Path) -> None:
    found = []
    for native in (["ppo", "cross_entropy"], ["cross_entropy"]):
        run = config(run_dir=tmp_path / str(len(native)))
        options = TinkerOptions(native_losses=native, learning_rate=1e-2, lora={"rank": 4})
        async with TinkerAdapter(options, run) as tinker:
            ids = tinker.tokenizer.encode("ab=")
            params = SamplingParams(max_tokens=5, seed=1)
            completions = await tinker.sampler.sample(ids, params, n=2)
            rows = [
                Sample(
                    [*ids, *one.token_ids],
                    [0] * len(ids) + [1] * len(one.token_ids),
                    [0.0] * len(ids) + list(one.logprobs),
                    [0.0] * len(ids) + [advantage] * len(one.token_ids),
                    [-1] * len(ids) + [0] * len(one.token_ids),
                )
                for one, advantage in zip(completions, (0.5, -0.25), strict=True)
            ]
            steps = [await tinker.update(batch(*rows))]
            assert steps[0]["kl/sampler_trainer"] == pytest.approx(0.0, abs=1e-6)
            assert await tinker.publish() == 1
            state = await tinker.save(tmp_path)
            steps += [await tinker.update(batch(*rows)) for _ in range(2)]
            after = await tinker.sampler.sample(ids, params, n=2)
            await tinker.load(state)
            again = [await tinker.update(batch(*rows)) for _ in range(2)]
            assert again == steps[1:], "a run that continues does what the first one did"
            resumed = await tinker.sampler.sample(ids, params, n=2)
            assert [c.logprobs for c in resumed] == [c.logprobs for c in after]
        found.append(steps)
    for native, ours in zip(*found, strict=True):
        for name in ("loss", "grad_norm", "kl/sampler_trainer", "clip_fraction"):
            assert native[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-6), name
