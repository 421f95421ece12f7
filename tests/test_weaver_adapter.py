"""The Weaver backend against the fake service: what a batch does, what publish and resume keep."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from retrain.adapters.weaver.adapter import WeaverAdapter
from retrain.adapters.weaver.options import WeaverOptions
from retrain.config import RunConfig, parse_config
from retrain.errors import CheckpointError
from retrain.sampler import SamplingParams
from retrain.types import Batch, Completion, Denominators, Sample
from retrain.wire.refusals import RemoteError
from tests.fake_weaver import KEY, VOCABULARY, FakeWeaver, log_softmax

OPTIONS: dict[str, Any] = {
    "url": "http://service",
    "learning_rate": 0.1,
    "max_grad_norm": 0.0,
    "assume_sum": True,
}


def config(**sections: Any) -> RunConfig:
    return parse_config({"prompts": ["a"], "backend": "weaver", **sections})


def sample(tokens: Sequence[int], credit: float, *, old: float = -2.0) -> Sample:
    """One prompt token; the rest sampled."""
    length = len(tokens)
    return Sample(
        list(tokens),
        [0, *[1] * (length - 1)],
        [0.0, *[old - 0.1 * t for t in range(1, length)]],
        [0.0, *[credit * (1 + t) for t in range(1, length)]],
        [-1, *[0] * (length - 1)],
    )


def batch(loss: str = "importance_sampling", **loss_config: Any) -> Batch:
    samples = [sample([1, 2, 3, 4], 1.0), sample([1, 5, 6], -0.5), sample([2, 2], 0.25)]
    return Batch(samples, loss, loss_config, Denominators(6, 3))


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeWeaver:
    monkeypatch.setenv("WEAVER_API_KEY", KEY)
    service = FakeWeaver()
    service.pending_looks = 0
    return service


def adapter(fake: FakeWeaver, run: RunConfig | None = None, **options: Any) -> WeaverAdapter:
    return WeaverAdapter(
        WeaverOptions(**{**OPTIONS, **options}),
        run or config(),
        http=httpx.ASGITransport(fake.app),
    )


@pytest.fixture
async def weaver(fake: FakeWeaver) -> AsyncIterator[WeaverAdapter]:
    async with adapter(fake) as made:
        yield made


def table(fake: FakeWeaver) -> list[list[float]]:
    return next(reversed(fake.models.values())).table


def rows_sent(fake: FakeWeaver, path: str) -> list[dict[str, Any]]:
    """The inputs of each row of each pass that was sent."""
    found = []
    for _, where, body in fake.log:
        if where.endswith(path):
            (wanted,) = (v for k, v in body["payload"].items() if k.endswith("_input"))
            found += [{"loss": wanted["loss_fn"], **row} for row in wanted["data"]]
    return found


@pytest.mark.parametrize("loss", ["importance_sampling", "cross_entropy"])
async def test_a_native_loss_trains_the_same_when_it_is_computed_here(
    fake: FakeWeaver, loss: str
) -> None:
    found = []
    for native in ([loss], []):
        async with adapter(fake, native_losses=native) as weaver:
            metrics = await weaver.update(batch(loss))
            found.append((metrics, table(fake)))
    (there, first), (here, second) = found
    assert first == [pytest.approx(row, abs=1e-12) for row in second]
    assert there == pytest.approx(here)
    assert fake.applied["forward"] == 1, "only the loss that is computed here looks first"


async def test_several_requests_make_one_step(fake: FakeWeaver) -> None:
    tables = []
    for limit in (100_000, 2):
        async with adapter(fake, request_tokens=limit) as weaver:
            for loss in ("importance_sampling", "ppo"):
                await weaver.update(batch(loss))
            tables.append(table(fake))
    assert tables[0] == [pytest.approx(row) for row in tables[1]]
    assert fake.applied["optim_step"] == 4
    assert fake.applied["forward_backward"] == 2 + 6


async def test_a_loss_of_ones_own_is_trained(fake: FakeWeaver, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def squared(logprobs, old, advantages, mask):\n"
        "    return (advantages * (logprobs - old) ** 2 * mask).sum()\n"
    )
    run = parse_config(
        {"prompts": ["a"], "algorithm": {"loss": "mine.py:squared"}, "backend": "weaver"}, tmp_path
    )
    assert WeaverOptions(**OPTIONS).problems(run) == []
    async with adapter(fake, run) as weaver:
        metrics = await weaver.update(batch("mine.py:squared"))
    lp = -math.log(VOCABULARY)
    wanted = sum(
        a * (lp - old) ** 2
        for one in batch().samples
        for a, old in zip(one.advantages[1:], one.logprobs[1:], strict=True)
    )
    assert metrics["loss"] == pytest.approx(wanted, rel=1e-5)
    slopes = [
        row["loss_fn_inputs"]["surrogate_weights"]["data"]
        for row in rows_sent(fake, "backward-passes")
    ]
    assert slopes[2] == pytest.approx([2 * 0.5 * (lp + 2.1)], rel=1e-5)


async def test_rows_carry_the_shifted_streams(fake: FakeWeaver, weaver: WeaverAdapter) -> None:
    await weaver.update(batch())
    first = rows_sent(fake, "backward-passes")[0]
    assert first["model_input"]["chunks"][0]["tokens"] == [1, 2, 3]
    assert {name: value["data"] for name, value in first["loss_fn_inputs"].items()} == {
        "target_tokens": [2, 3, 4],
        "logprobs": [-2.1, -2.2, -2.3],
        "advantages": [2.0, 3.0, 4.0],
        "loss_mask": [1.0, 1.0, 1.0],
    }


# Publishing


async def test_a_sample_in_flight_ends_on_its_weights_and_then_its_session_closes(
    fake: FakeWeaver, weaver: WeaverAdapter
) -> None:
    (first,) = fake.samplers
    fake.hold_samples = asyncio.Event()
    sampling = asyncio.create_task(weaver.sampler.sample([1], SamplingParams(max_tokens=2)))
    await fake.hanging.wait()
    await weaver.update(batch())
    await weaver.publish()
    assert fake.deleted == []
    fake.hold_samples.set()
    (completion,) = await sampling
    assert completion.version == 0
    assert completion.logprobs == pytest.approx([-math.log(VOCABULARY)] * 2)
    (after,) = await weaver.sampler.sample([1], SamplingParams(max_tokens=2))
    assert after.version == 1
    assert after.logprobs[0] == pytest.approx(log_softmax(table(fake)[1])[after.token_ids[0]])
    assert after.text == weaver.tokenizer.decode(after.token_ids, skip_special_tokens=True)
    await weaver.publish()
    await weaver.sampler.close()
    assert fake.deleted[0] == first
    assert len(fake.deleted) == 2, "the present session is still served"
    assert len(fake.expired) == 2, "the exports go with their sessions"


@pytest.mark.parametrize(
    ("max_tokens", "stop", "reason"), [(2, (), "length"), (6, (), "context"), (2, range(8), "stop")]
)
async def test_why_a_completion_ended(
    fake: FakeWeaver, max_tokens: int, stop: Sequence[int], reason: str
) -> None:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=tuple(stop))
    async with adapter(fake, context_length=8) as weaver:
        (completion,) = await weaver.sampler.sample([1, 2], params)
    assert completion.stop_reason == reason


async def test_completions_cut_short_are_sampled_again(fake: FakeWeaver) -> None:
    class Engine:
        """Cuts the first sample short, as when its weights are reloaded."""

        calls = 0

        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            async def rewritten(message: Any) -> None:
                if message["type"] == "http.response.body" and scope["path"].endswith("samples"):
                    self.calls += 1
                    if self.calls == 1:
                        text = message["body"].replace(b'"length"', b'"abort" ')
                        message = {**message, "body": text}
                await send(message)

            await fake.app(scope, receive, rewritten)

    engine = Engine()
    made = WeaverAdapter(WeaverOptions(**OPTIONS), config(), http=httpx.ASGITransport(engine))
    async with made as weaver:
        (completion,) = await weaver.sampler.sample([1], SamplingParams(max_tokens=2))
    assert engine.calls == 2
    assert completion.stop_reason == "length"


# Checkpoints


async def test_a_resumed_run_repeats_the_uninterrupted_one(
    fake: FakeWeaver, tmp_path: Path
) -> None:
    run = config(train={"total_train_steps": 5})
    async with adapter(fake, run, lr_scheduler="cosine") as weaver:
        for _ in range(2):
            await weaver.update(batch())
            await weaver.publish()
        state = await weaver.save(tmp_path)
        losses = [(await weaver.update(batch()))["loss"] for _ in range(3)]
        wanted = table(fake)
    async with adapter(fake, run, lr_scheduler="cosine") as resumed:
        await resumed.load(state)
        (completion,) = await resumed.sampler.sample([1], SamplingParams(max_tokens=1))
        assert completion.version == 2
        assert await resumed.publish() == 3
        assert [(await resumed.update(batch()))["loss"] for _ in range(3)] == losses
        assert table(fake) == wanted
        await resumed.forget(state)
        await resumed.forget(state)  # one that is gone already is well
        assert fake.expired.count(state.data["path"]) == 1
        with pytest.raises(CheckpointError, match="weaver://"):
            await resumed.load(state)


async def test_a_start_that_fails_leaves_nothing_behind(fake: FakeWeaver) -> None:
    fake.fail_operation = {"error": "no_capacity", "error_message": "no engine is free"}
    with pytest.raises(RemoteError, match="no engine is free"):
        await adapter(fake).__aenter__()
    assert fake.terminated == list(fake.models)
    assert len(asyncio.all_tasks()) == 1


async def test_the_local_service_trains_and_a_resumed_run_finds_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEAVER_API_KEY", raising=False)
    run = config().model_copy(update={"run_dir": tmp_path})
    options = WeaverOptions(learning_rate=0.01, weight_decay=0.0)
    params = SamplingParams(max_tokens=4, seed=1)
    async with WeaverAdapter(options, run) as weaver:
        prompt = weaver.tokenizer.encode("ab", add_special_tokens=False)
        (first,) = await weaver.sampler.sample(prompt, params)
        trained = Batch([learnt(prompt, first)], "ppo", {}, Denominators(4, 1))
        before = (await weaver.update(trained))["loss"]
        assert before == pytest.approx(-4.0, abs=1e-4)  # four ratios of 1
        state = await weaver.save(tmp_path)
        losses = [(await weaver.update(trained))["loss"] for _ in range(2)]
        assert losses[0] < before
    async with WeaverAdapter(options, run) as resumed:
        await resumed.load(state)
        assert [(await resumed.update(trained))["loss"] for _ in range(2)] == losses


def learnt(prompt: list[int], completion: Completion) -> Sample:
    """The completion as a sample of credit 1 a token."""
    masked, sampled = [0.0] * len(prompt), len(completion.token_ids)
    return Sample(
        [*prompt, *completion.token_ids],
        [0] * len(prompt) + [1] * sampled,
        [*masked, *completion.logprobs],
        [*masked, *[1.0] * sampled],
        [-1] * len(prompt) + [completion.version] * sampled,
    )


def test_only_keys_without_an_effect_are_a_problem() -> None:
    assert WeaverOptions().problems(config()) == []
    full = WeaverOptions(training_mode="full_ft", lora={"rank": 2})
    (problem,) = full.problems(config())
    assert problem.startswith("backend.lora")
    assert full.capabilities().losses == {
        *("importance_sampling", "cross_entropy", "ppo", "cispo", "dro", "dpo"),
        *("grpo", "dapo", "bnpo", "dr_grpo", "reinforce"),
    }
