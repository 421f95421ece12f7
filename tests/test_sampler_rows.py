"""The rows of the local sampler that come and go, its weights, failures and end."""

from __future__ import annotations

import asyncio
import gc
import random
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.engine.weights import snapshot
from retrain.errors import AdapterError
from retrain.sampler import SamplingParams
from tests import sampler_kit as kit
from tests.pipe_kit import until
from tests.sampler_kit import (
    SEEDED,
    TOKENIZER,
    A,
    B,
    C,
    forward_logprobs,
    load_like,
    never_ending,
)

model, sampler, endless = kit.model, kit.sampler, kit.endless


# -- rows that come and go ------------------------------------------------------------------------


async def test_no_more_rows_than_the_cap_and_a_larger_request_is_served_in_parts(
    model: LlamaForCausalLM, sampler: LocalSampler
) -> None:
    async with LocalSampler(model, TOKENIZER, max_rows=4) as small:
        seen: list[int] = []

        async def watch() -> None:
            while True:
                seen.append(small.stats.rows)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        some, many = await asyncio.gather(
            asyncio.gather(*(small.sample([A], SEEDED, n=3) for _ in range(5))),
            small.sample([A, B], SEEDED, n=11),
        )
        watching.cancel()
    assert max(seen) <= 4
    assert [len(group) for group in some] == [3] * 5
    reference = await sampler.sample([A, B], SEEDED, n=11)
    assert [c.token_ids for c in many] == [c.token_ids for c in reference]


async def test_cancelling_a_request_retires_its_rows_and_no_others(endless: LocalSampler) -> None:
    alone = await endless.sample([A, B], SEEDED, n=2)
    long = asyncio.create_task(endless.sample([A], SamplingParams(max_tokens=1000), n=8))
    await until(lambda: endless.stats.rows == 8)
    beside = asyncio.create_task(endless.sample([A, B], SEEDED, n=2))
    long.cancel()
    with pytest.raises(asyncio.CancelledError):
        await long
    assert [c.token_ids for c in await beside] == [c.token_ids for c in alone]
    await until(lambda: endless.stats.rows == 0)
    assert endless.stats.tokens < 8 * 1000


async def test_the_event_loop_turns_while_rows_decode(endless: LocalSampler) -> None:
    task = asyncio.create_task(endless.sample([A], SamplingParams(max_tokens=200), n=4))
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    assert turns > 100


async def test_requests_of_one_turn_of_the_loop_are_prefilled_together(
    endless: LocalSampler,
) -> None:
    params = SamplingParams(max_tokens=5)
    await asyncio.gather(*(endless.sample([A] * k, params, n=2) for k in range(1, 20)))
    assert endless.stats.steps == 4


# -- weights --------------------------------------------------------------------------------------


def scaled(model: LlamaForCausalLM, factor: float) -> LlamaForCausalLM:
    other = load_like(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(factor)
    return other


async def test_rows_in_flight_at_a_publish_finish_on_the_weights_they_began_with(
    endless: LocalSampler, model: LlamaForCausalLM
) -> None:
    new = scaled(model, 0.9)
    params = SamplingParams(max_tokens=300, seed=3)
    before = asyncio.create_task(endless.sample([A], params, n=2))
    await until(lambda: endless.stats.rows == 2)
    await endless.load_weights(snapshot(new), 7)
    assert endless.version == 7
    after = await endless.sample([A], SEEDED, n=2)
    assert not before.done()
    for completion in after:
        assert completion.version == 7
        expected = forward_logprobs(new, [A], completion, SEEDED)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)
    for completion in await before:
        assert completion.version == 0
        expected = forward_logprobs(model, [A], completion, params)
        assert completion.logprobs == pytest.approx(expected, abs=1e-5)


async def test_old_weights_are_kept_no_longer_than_their_rows(
    endless: LocalSampler, model: LlamaForCausalLM
) -> None:
    def models() -> int:
        gc.collect()
        return sum(type(thing) is LlamaForCausalLM for thing in gc.get_objects())

    weights, first = snapshot(model), models()
    for version in range(1, 6):
        task = asyncio.create_task(endless.sample([A], SamplingParams(max_tokens=60)))
        await until(lambda: endless.stats.rows == 1)
        await endless.load_weights(weights, version)
        (completion,) = await task
        assert completion.version == version - 1
    await until(lambda: models() <= first + 1)  # one to spare, for the next publish


async def test_the_sampler_has_its_own_copy_of_the_weights(model: LlamaForCausalLM) -> None:
    mine = load_like(model)
    async with LocalSampler(mine, TOKENIZER) as sampler:
        before = await sampler.sample([A], SEEDED)
        with torch.no_grad():
            for parameter in mine.parameters():
                parameter.zero_()
        assert await sampler.sample([A], SEEDED) == before
        weights = snapshot(model)
        await sampler.load_weights(weights, 1)
        for tensor in weights.values():
            tensor.zero_()
        (again,) = await sampler.sample([A], SEEDED)
        assert again.logprobs == before[0].logprobs


async def test_wrong_weights_are_refused_and_the_old_ones_served_on(sampler: LocalSampler) -> None:
    before = await sampler.sample([A], SEEDED)
    with pytest.raises(AdapterError, match=r"missing.*model\."):
        await sampler.load_weights({"x": torch.ones(1)}, 1)
    assert await sampler.sample([A], SEEDED) == before


def test_a_model_whose_forward_was_patched_is_refused(model: LlamaForCausalLM) -> None:
    patched = load_like(model)
    patched.lm_head.forward = patched.lm_head.forward  # as accelerate and TRL do
    with pytest.raises(ValueError, match="lm_head "):
        LocalSampler(patched, TOKENIZER)


# -- failure and the end --------------------------------------------------------------------------


class Failing(LlamaForCausalLM):
    """Fails at the first pass that sees token C."""

    def forward(  # type: ignore[override]  # the arguments that the sampler gives, in order
        self, input_ids: Tensor, past_key_values: Any = None, **kwargs: Any
    ) -> Any:
        if C in input_ids:
            raise FloatingPointError("the device burns")
        return super().forward(input_ids, past_key_values=past_key_values, **kwargs)


@pytest.mark.parametrize("joins", [False, True])
async def test_a_failing_pass_fails_what_waits_and_what_comes_later(
    model: LlamaForCausalLM, joins: bool
) -> None:
    failing, tokenizer = Failing(model.config), never_ending(model)[1]
    failing.generation_config.eos_token_id = None
    async with LocalSampler(failing, tokenizer) as sampler:
        if joins:  # greedy, and without a stop: it is under way until the other's pass fails
            params = SamplingParams(max_tokens=1000, temperature=0)
            waits = asyncio.create_task(sampler.sample([A], params))
            await until(lambda: sampler.stats.rows == 1)
        else:
            waits = asyncio.create_task(sampler.sample([A, C], SEEDED))
        with pytest.raises(AdapterError, match="FloatingPointError") as raised:
            await sampler.sample([C], SEEDED)
        assert isinstance(raised.value.__cause__, FloatingPointError)
        with pytest.raises(AdapterError, match="the device burns"):
            await waits
        for call in (
            sampler.sample([A], SEEDED),
            sampler.logprobs([A]),
            sampler.load_weights(snapshot(model), 1),
        ):
            with pytest.raises(AdapterError, match="the device burns"):
                await call
        assert sampler.failed


async def test_closing_fails_what_is_under_way_or_asked_later(model: LlamaForCausalLM) -> None:
    async with LocalSampler(*never_ending(model)) as sampler:
        task = asyncio.create_task(sampler.sample([A], SamplingParams(max_tokens=1000), n=2))
        await until(lambda: sampler.stats.rows == 2)
    with pytest.raises(AdapterError, match="closed"):
        await task
    with pytest.raises(AdapterError, match="closed"):
        await sampler.sample([A], SEEDED)


async def test_closing_leaves_no_thread_and_may_be_repeated(model: LlamaForCausalLM) -> None:
    before = set(threading.enumerate())
    async with LocalSampler(model, TOKENIZER) as sampler:
        assert len(set(threading.enumerate()) - before) == 1
        await sampler.close()
    await LocalSampler(model, TOKENIZER).close()
    assert set(threading.enumerate()) == before


async def test_a_pass_that_never_ends_cannot_hold_a_cancelled_close(
    model: LlamaForCausalLM,
) -> None:
    begun, wedge = threading.Event(), threading.Event()
    sampler = await LocalSampler(model, TOKENIZER).__aenter__()
    stuck = asyncio.create_task(sampler._call(lambda: (begun.set(), wedge.wait())))
    await until(begun.is_set)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await sampler.close()
    wedge.set()
    await sampler.close()
    assert await stuck == (None, True)


async def test_a_sampler_that_was_never_entered_says_so(model: LlamaForCausalLM) -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await LocalSampler(model, TOKENIZER).sample([A], SEEDED)


async def test_the_worker_leaves_other_threads_their_thread_count(model: LlamaForCausalLM) -> None:
    before = torch.get_num_threads()
    async with LocalSampler(model, TOKENIZER, threads=before + 1) as sampler:
        await sampler.sample([A], SEEDED)
        assert torch.get_num_threads() == before


def test_a_program_that_forgets_to_close_still_ends() -> None:
    script = """
import asyncio
from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.sampler import SamplingParams

async def main():
    sampler = await LocalSampler(load_model(tiny_folder()), tiny_tokenizer()).__aenter__()
    asyncio.ensure_future(sampler.sample([7], SamplingParams(max_tokens=1000), n=100))
    while not sampler.stats.tokens:
        await asyncio.sleep(0.001)
    print("sampling")

asyncio.run(main())
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], check=True, timeout=60, capture_output=True, text=True
    )
    assert ended.stdout == "sampling\n"


async def test_log_probs_of_many_sequences_are_those_of_each_alone(monkeypatch):
    draw = random.Random(0)
    sequences = [[draw.randrange(10, 90) for _ in range(n)] for n in (5, 1, 17, 9, 17, 2)]
    monkeypatch.setattr("retrain.engine.sampler.SCORED_TOKENS", 40)
    async with LocalSampler(load_model(tiny_folder()), tiny_tokenizer()) as sampler:
        together = await sampler.logprobs_of(sequences)
        for token_ids, scores in zip(sequences, together, strict=True):
            assert scores == pytest.approx(await sampler.logprobs(token_ids), abs=1e-5)
        assert together[1] == [0.0]
        assert await sampler.logprobs_of([[7], [8]]) == [[0.0], [0.0]]
        assert await sampler.logprobs_of([]) == []
