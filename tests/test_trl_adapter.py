"""The TRL adapter end to end: update, publish, save, load, export, and how it ends."""

from __future__ import annotations

import asyncio
import os
import random
import threading
import warnings
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from retrain.adapters.base import AdapterState  # noqa: E402 - the same
from retrain.adapters.trl.adapter import TrlAdapter  # noqa: E402 - the same
from retrain.engine.models import load_model, load_tokenizer  # noqa: E402 - the same
from retrain.engine.weights import snapshot  # noqa: E402 - the same
from retrain.errors import (  # noqa: E402 - the same
    AdapterError,
    CheckpointError,
    ConfigError,
    NonFiniteError,
)
from retrain.sampler import SamplingParams  # noqa: E402 - the same
from retrain.types import Batch, Denominators, Sample  # noqa: E402 - the same
from tests import trl_kit as kit  # noqa: E402 - needs torch
from tests.weights_kit import digest  # noqa: E402 - the same


def adapter(loss="dapo", *, loss_config=None, sections=None, **keys):
    config = kit.run_config(loss, loss_config=loss_config or {}, **(sections or {}))
    return TrlAdapter(kit.options(**keys), config)


async def rollouts(sampler, *, temperature=1.0, seed=0):
    """Two groups of three samples of many lengths, with an environment's answer in the second."""
    made = []
    for group, prompt in enumerate(([2, 5], [2, 6, 7])):
        params = SamplingParams(max_tokens=6, temperature=temperature, seed=seed * 100 + group)
        for number, one in enumerate(await sampler.sample(prompt, params, 3)):
            turns = Sample(
                [*prompt, *one.token_ids],
                [0] * len(prompt) + [1] * len(one.token_ids),
                [0.0] * len(prompt) + list(one.logprobs),
                [0.0] * len(prompt) + [number - 1.0] * len(one.token_ids),
                [-1] * len(prompt) + [one.version] * len(one.token_ids),
                group_id=f"0.{group}.0",
            )
            made.append(await second_turn(sampler, turns, temperature) if group else turns)
    return made


async def second_turn(sampler, sample, temperature):
    """Two tokens from the environment, masked, and a second completion."""
    history = [*sample.token_ids, 8, 9]
    params = SamplingParams(max_tokens=3, temperature=temperature, seed=1)
    (one,) = await sampler.sample(history, params, 1)
    count = len(one.token_ids)
    return replace(
        sample,
        token_ids=[*history, *one.token_ids],
        loss_mask=[*sample.loss_mask, 0, 0, *([1] * count)],
        logprobs=[*sample.logprobs, 0.0, 0.0, *one.logprobs],
        advantages=[*sample.advantages, 0.0, 0.0, *([sample.advantages[-1]] * count)],
        versions=[*sample.versions, -1, -1, *([one.version] * count)],
    )


def weights_of(trl):
    return digest(snapshot(trl._thread.trainer.model))


def on_disk(folder):
    return os.path.isdir(folder)


def threads_now():
    """The library's, without those that earlier tests' user code may still keep."""
    names = {t.name for t in threading.enumerate() if t.name.startswith("retrain")}
    return names - {"retrain-user-code"}


@pytest.mark.parametrize(
    ("loss", "keys"), [("dapo", {}), ("ppo", {}), ("cispo", {}), ("dapo", {"lora": {"r": 4}})]
)
async def test_fresh_samples_have_ratio_1_and_nothing_clipped(loss, keys):
    async with adapter(loss, micro_batch_rows=2, **keys) as trl:
        for step in range(3):
            samples = await rollouts(trl.sampler, seed=step)
            metrics = await trl.update(kit.batch(samples, loss))
            assert abs(metrics["ratio/mean"] - 1) < 1e-5
            assert abs(metrics["ratio/max"] - 1) < 1e-4
            assert metrics["clip_fraction"] == 0
            assert abs(metrics["kl/sampler_trainer"]) < 1e-6
            assert metrics["entropy"] > 0
            assert metrics["grad_norm"] > 0
            assert await trl.publish() == step + 1
            assert trl.sampler.version == step + 1


@pytest.mark.parametrize("temperature", [0.7, 0.0])
async def test_the_trainer_scores_at_the_samplers_temperature(temperature):
    sections = {"sampling": {"max_tokens": 6, "temperature": temperature}}
    async with adapter(sections=sections) as trl:
        samples = await rollouts(trl.sampler, temperature=temperature)
        metrics = await trl.update(kit.batch(samples))
        assert abs(metrics["ratio/max"] - 1) < 1e-4


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 4}}])
async def test_bfloat16_with_recomputation_trains_float32_weights(keys):
    keys = {**keys, "dtype": "bfloat16", "gradient_checkpointing": True}
    async with adapter(**keys) as trl:
        before = weights_of(trl)
        metrics = await trl.update(kit.batch(await rollouts(trl.sampler)))
        assert abs(metrics["ratio/mean"] - 1) < 0.05
        assert weights_of(trl) != before
        trained = [p for p in trl._thread.trainer.model.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        assert await trl.publish() == 1


async def test_the_schedule_follows_the_steps_and_the_sampler_what_is_published():
    async with adapter(lr_scheduler="linear", sections={"train": {"total_train_steps": 4}}) as trl:
        before = await trl.sampler.logprobs([2, 5, 6])
        rates = [(await trl.update(kit.batch(kit.ragged())))["learning_rate"] for _ in range(4)]
        assert rates == pytest.approx([1e-2, 7.5e-3, 5e-3, 2.5e-3])
        assert await trl.sampler.logprobs([2, 5, 6]) == before
        await trl.publish()
        after = await trl.sampler.logprobs([2, 5, 6])
        assert after != before
        with torch.no_grad():
            plain = load_model(kit.model_folder())
            plain.load_state_dict(snapshot(trl._thread.trainer.model))
            scores = plain(torch.tensor([[2, 5, 6]])).logits[0].log_softmax(-1)
        assert after[1:] == pytest.approx([scores[0, 5].item(), scores[1, 6].item()], abs=1e-5)


async def test_what_is_published_of_a_lora_is_pefts_own_merge():
    async with adapter(lora={"r": 4, "dropout": 0.2}) as trl:
        for seed in range(6):
            await trl.update(kit.batch(kit.ragged(seed)))
            await trl.publish()
            served = await trl.sampler.logprobs([2, 5, 6])
            trained = trl._thread.trainer.model
            merged = load_model(kit.model_folder())
            from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict

            copy = get_peft_model(merged, trained.peft_config["default"])
            set_peft_model_state_dict(copy, get_peft_model_state_dict(trained))
            plain = copy.merge_and_unload()
            with torch.no_grad():
                scores = plain(torch.tensor([[2, 5, 6]])).logits[0].log_softmax(-1)
            assert served[1:] == pytest.approx([scores[0, 5].item(), scores[1, 6].item()], abs=1e-5)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"lora": {"r": 4, "dropout": 0.2}},
        {"args": {"optim": "sgd", "optim_args": "momentum=0.9"}, "weight_decay": 0.1},
    ],
)
async def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(keys, tmp_path):
    keys = {**keys, "lr_scheduler": "cosine", "warmup_steps": 2, "micro_batch_rows": 4}
    batches = [kit.batch(kit.ragged(seed)) for seed in range(6)]
    async with adapter(**keys) as whole:
        expected = [await whole.update(batch) for batch in batches]
        final = weights_of(whole)
        await whole.publish()
    async with adapter(**keys) as first:
        for batch in batches[:3]:
            await first.update(batch)
            await first.publish()
        state = await first.save(tmp_path / "adapter")
        served = await first.sampler.logprobs([2, 5, 6])
    async with adapter(**keys) as second:
        await second.load(AdapterState(tmp_path / "adapter", dict(state.data)))
        assert second.sampler.version == 3
        assert await second.sampler.logprobs([2, 5, 6]) == served
        metrics = [await second.update(batch) for batch in batches[3:]]
        assert metrics == expected[3:]
        assert weights_of(second) == final
        assert await second.publish() == 4


async def test_what_goes_on_has_the_rate_and_the_schedule_of_its_own_config(tmp_path):
    async def rates(steps, state=None, **keys):
        sections = {"train": {"total_train_steps": steps}}
        async with adapter(lr_scheduler="linear", sections=sections, **keys) as trl:
            if state:
                await trl.load(state)
            update = [await trl.update(kit.batch(kit.ragged())) for _ in range(3)]
            decay = trl._thread.trainer.optimizer.param_groups[0]["weight_decay"]
            saved = None if state else await trl.save(tmp_path)
        return [metrics["learning_rate"] for metrics in update], decay, saved

    found, _, state = await rates(3, learning_rate=9e-3)
    assert found == pytest.approx([9e-3, 6e-3, 3e-3])
    found, decay, _ = await rates(6, state, learning_rate=6e-3, weight_decay=0.5)
    assert found == pytest.approx([3e-3, 2e-3, 1e-3])
    assert decay == 0.5


async def test_two_trainers_in_a_process_train_as_each_does_alone():
    async def train(seeds):
        async with adapter(micro_batch_rows=1, lora={"r": 4, "dropout": 0.2}) as trl:
            return [await trl.update(kit.batch(kit.ragged(seed))) for seed in seeds]

    alone = [await train(range(3)), await train(range(3, 6))]
    assert await asyncio.gather(train(range(3)), train(range(3, 6))) == alone


async def test_a_checkpoint_of_step_0_and_one_after_the_last_step_can_be_loaded(tmp_path):
    sections = {"train": {"total_train_steps": 1}}
    async with adapter(sections=sections) as trl:
        start = weights_of(trl)
        with pytest.raises(AdapterError, match="checkpoint-3"):
            await trl.load(AdapterState(tmp_path, {"checkpoint": "checkpoint-3", "version": 3}))
        first = await trl.save(tmp_path / "0")
        names = {path.name for path in (first.folder / first.data["checkpoint"]).iterdir()}
        assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"} <= names
        assert not {"README.md", "training_args.bin"} & names  # no pickle of this machine
        assert [path.name for path in first.folder.iterdir()] == [first.data["checkpoint"]]
        await trl.update(kit.batch(kit.ragged()))
        with pytest.raises(AdapterError, match=r"train.total_train_steps"):
            await trl.update(kit.batch(kit.ragged()))
        last = await trl.save(tmp_path / "1")
        end = weights_of(trl)
    async with adapter(sections=sections) as trl:
        await trl.load(first)
        assert weights_of(trl) == start
        await trl.update(kit.batch(kit.ragged()))
        assert weights_of(trl) == end
    async with adapter(sections=sections) as trl:
        await trl.load(last)
        assert weights_of(trl) == end
        assert await trl.export(tmp_path / "final") == tmp_path / "final"
        with pytest.raises(AdapterError):
            await trl.load(last)


WHOLE = {"model.safetensors", "config.json"}
ADAPTERS = {"adapter_model.safetensors", "adapter_config.json"}


@pytest.mark.parametrize(
    ("keys", "merge", "written"),
    [({}, False, WHOLE), ({"lora": {"r": 4}}, True, WHOLE), ({"lora": {"r": 4}}, False, ADAPTERS)],
)
async def test_an_export_is_a_loadable_folder_in_place_of_one_of_the_other_kind(
    keys, merge, written, tmp_path
):
    old = (WHOLE | ADAPTERS) - written
    for name in (*old, "notes.txt"):
        (tmp_path / name).write_text("old")
    async with adapter(sections={"checkpoint": {"merge_lora": merge}}, **keys) as trl:
        await trl.update(kit.batch(kit.ragged()))
        await trl.export(tmp_path)
        trained = weights_of(trl)
        assert load_tokenizer(tmp_path).get_vocab() == trl.tokenizer.get_vocab()
    names = {path.name for path in tmp_path.iterdir()}
    assert names >= {*written, "notes.txt"}
    assert not names & old
    if written is WHOLE:
        model = load_model(tmp_path)
    else:
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_model(kit.model_folder()), tmp_path)
    assert digest(snapshot(model)) == trained


async def test_a_batch_without_a_token_to_train_is_refused_and_the_next_one_trained():
    rng = random.Random(0)
    async with adapter() as trl:
        with pytest.raises(ValueError, match="loss_mask"):
            await trl.update(Batch([], "dapo", {}, Denominators(0, 0)))
        with pytest.raises(ValueError, match="loss_mask"):
            await trl.update(kit.batch([kit.sample(3, "eee", rng)]))
        with pytest.raises(ValueError, match="first token"):
            await trl.update(kit.batch([kit.sample(0, "sss", rng)]))
        with pytest.raises(ValueError, match=r"'ppo'.*'dapo'"):
            await trl.update(kit.batch(kit.ragged(), "ppo"))
        assert (await trl.update(kit.batch(kit.ragged())))["grad_norm"] > 0


async def test_a_nan_ends_the_trainer_before_it_touches_the_weights():
    rng = random.Random(0)
    good = kit.sample(3, "ss", rng, group="0.1.0")
    bad = kit.sample(3, "ss", rng, group="0.2.0")
    bad = replace(bad, advantages=[0.0, 0.0, 0.0, float("inf"), 1.0])
    async with adapter() as trl:
        model = trl._thread.trainer.model
        before = digest(snapshot(model))
        with pytest.raises(NonFiniteError, match=r"advantages of groups 0\.2\.0"):
            await trl.update(kit.batch([good, bad]))
        assert digest(snapshot(model)) == before
        with pytest.raises(AdapterError) as caught:
            await trl.publish()
        assert isinstance(caught.value.__cause__, NonFiniteError)
        assert await trl.sampler.logprobs([2, 5])  # what was published is still served
    assert not threads_now()


async def test_a_gradient_that_is_not_finite_names_the_groups():
    async with adapter() as trl:
        model = trl._thread.trainer.model
        before = digest(snapshot(model))
        next(iter(model.parameters())).register_hook(lambda gradient: gradient * float("nan"))
        with pytest.raises(NonFiniteError, match=r"nan.* 0\.0\.0"):
            await trl.update(kit.batch(kit.ragged()))
        assert digest(snapshot(model)) == before


async def test_an_error_inside_trl_is_an_adapter_error_with_its_cause():
    async with adapter() as trl:
        trl._thread.trainer.optimizer = None
        trl._thread.trainer.create_optimizer = lambda *_: 1 / 0
        with pytest.raises(AdapterError, match="ZeroDivisionError") as caught:
            await trl.update(kit.batch(kit.ragged()))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(AdapterError):
            await trl.update(kit.batch(kit.ragged()))


async def test_a_checkpoint_that_cannot_be_written_does_not_end_the_training(tmp_path, monkeypatch):
    def full(model, trial):
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1 vs 2")

    (tmp_path / "file").write_text("")
    async with adapter() as trl:
        await trl.update(kit.batch(kit.ragged()))
        with pytest.raises(CheckpointError):
            await trl.save(tmp_path / "file")
        with monkeypatch.context() as patch:
            patch.setattr(trl._thread.trainer, "_save_checkpoint", full)
            with pytest.raises(CheckpointError, match=r"unexpected pos.* MB"):
                await trl.save(tmp_path)
        assert (await trl.update(kit.batch(kit.ragged())))["grad_norm"] > 0


async def test_a_cancelled_update_leaves_the_adapter_usable_and_leaving_is_quick():
    async with adapter() as trl:
        await trl.update(kit.batch(kit.ragged()))
        task = asyncio.create_task(trl.update(kit.batch(kit.ragged())))
        await asyncio.sleep(0)  # let it submit
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await trl.publish() == 1
        scratch = trl._scratch.name
        assert on_disk(scratch)
    assert not on_disk(scratch)
    assert not threads_now()


@pytest.mark.parametrize(
    ("error", "message", "keys"),
    [
        (RuntimeError, "the user's", {}),
        (ConfigError, "model", {"sections": {"model": "./nowhere"}}),
        (ConfigError, "adamm", {"args": {"optim": "adamm"}}),
    ],
)
async def test_an_error_at_the_start_or_in_the_run_ends_the_threads(error, message, keys):
    with pytest.raises(error, match=message):
        async with adapter(**keys):
            raise RuntimeError("the user's")
    assert not threads_now()


async def test_the_trainers_thread_has_its_own_number_of_threads():
    async with adapter(threads=1) as trl:
        torch.set_num_threads(2)
        trl._thread.trainer.look = torch.get_num_threads
        assert await trl._in_thread("look") == 1


async def test_the_run_is_silent(capfd):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        async with adapter(lora={"r": 4}, sections={"train": {"total_train_steps": 1}}) as trl:
            await trl.update(kit.batch(kit.ragged()))
            await trl.publish()
    output = capfd.readouterr()
    assert output.out == ""
    assert output.err == ""
