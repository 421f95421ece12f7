"""The local sampler against plain forwards of the same model."""

from __future__ import annotations

import asyncio
import functools
import gc
import random
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.stopping import Stopping
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.engine.weights import snapshot
from retrain.errors import AdapterError
from retrain.sampler import SamplingParams
from retrain.types import Completion

TOKENIZER = tiny_tokenizer()

A, B, C = TOKENIZER.encode("abc")

SEEDED = SamplingParams(max_tokens=12, seed=5)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    """tiny, with weights far enough from 0 that a wrong position or mask shows."""
    model = load_model(tiny_folder(tmp_path_factory.mktemp("cache")))
    return sharpened(model)


@pytest.fixture
async def sampler(model: LlamaForCausalLM) -> AsyncIterator[LocalSampler]:
    async with LocalSampler(model, TOKENIZER) as sampler:
        yield sampler


@pytest.fixture
async def endless(model: LlamaForCausalLM) -> AsyncIterator[LocalSampler]:
    """A sampler whose rows end at max_tokens alone."""
    async with LocalSampler(*never_ending(model)) as sampler:
        yield sampler


def sharpened(model: Any) -> Any:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def never_ending(model: LlamaForCausalLM) -> tuple[LlamaForCausalLM, Any]:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    endless = load_like(model)
    endless.generation_config.eos_token_id = None
    return endless, tokenizer


def load_like(model: LlamaForCausalLM) -> LlamaForCausalLM:
    other = LlamaForCausalLM(model.config).eval()
    other.load_state_dict(model.state_dict())
    return other


def restricted(logits: Tensor, params: SamplingParams) -> Tensor:
    """Log-probs of what is sampled from, written out longhand for one position."""
    logprobs = (logits / (params.temperature or 1.0)).log_softmax(-1)
    if params.temperature == 0:
        return logprobs
    order = logprobs.argsort(descending=True).tolist()
    kept = order[: params.top_k or None]
    probs = logprobs[kept].softmax(0).tolist()
    nucleus, total = [], 0.0
    for token, prob in zip(kept, probs, strict=True):
        if total >= params.top_p:
            break
        nucleus.append(token)
        total += prob
    out = torch.full_like(logprobs, -torch.inf)
    out[nucleus] = logprobs[nucleus].log_softmax(0)
    return out


def forward_logprobs(
    model: Any, prompt: Sequence[int], completion: Completion, params: SamplingParams
) -> list[float]:
    ids = [*prompt, *completion.token_ids]
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    return [
        restricted(logits[place - 1], params)[ids[place]].item()
        for place in range(len(prompt), len(ids))
    ]


async def until(condition: Callable[[], bool]) -> None:
    """Turn the loop until the worker's thread has got there; a test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - the thread's counters have no event to wait for
        await asyncio.sleep(0.001)  # the thread needs the interpreter too


# -- what is sampled ------------------------------------------------------------------------------


async def crowd(sampler: LocalSampler, model: Any, count: int, longest: int) -> float:
    """Ragged requests that join at different passes; the greatest log-prob error."""
    rng = random.Random(0)

    async def one(i: int) -> float:
        prompt = [rng.randrange(7, 100) for _ in range(rng.randrange(1, longest))]
        params = SamplingParams(
            max_tokens=rng.randrange(1, longest),
            temperature=rng.choice([1.0, 0.7, 1.4, 0]),
            top_k=rng.choice([0, 0, 5]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            seed=i,
        )
        for _ in range(i % 5):
            await sampler.sample([A], SamplingParams(max_tokens=2))
        worst = 0.0
        for completion in await sampler.sample(prompt, params, n=3):
            expected = forward_logprobs(model, prompt, completion, params)
            errors = np.abs(np.subtract(expected, completion.logprobs))
            worst = max(worst, float(errors.max()))
        return worst

    return max(await asyncio.gather(*(one(i) for i in range(count))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
async def test_logprobs_equal_a_plain_forward_in_ragged_mixed_batches(
    model: LlamaForCausalLM, dtype: torch.dtype
) -> None:
    """tiny as it is, and in float64 with sharp weights, where a wrong position or mask shows.

    In float32 the rounding of two passes over the same tokens grows with the weights, and of sharp
    ones it would fill the bound.
    """
    tried = load_model(tiny_folder()) if dtype == torch.float32 else load_like(model).to(dtype)
    async with LocalSampler(tried, TOKENIZER) as sampler:
        assert await crowd(sampler, tried, 40, 40) < 1e-5
        await until(lambda: sampler.stats.rows == 0)
        assert sampler.stats.tokens > 500


SIZES: dict[str, Any] = {
    "vocab_size": 103,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "eos_token_id": None,
    "bos_token_id": None,
}

CONFIGS: dict[str, Any] = {
    "learned positions": lambda: transformers.GPT2Config(
        vocab_size=103, n_embd=32, n_layer=2, n_head=4, eos_token_id=None, bos_token_id=None
    ),
    "grouped query": lambda: transformers.Qwen3Config(**SIZES, head_dim=8),
    "biases": lambda: transformers.Qwen2Config(**SIZES),
    "a window of Mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=8),
    "sliding window": lambda: transformers.Gemma3TextConfig(
        **SIZES, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
    ),
    "positions from the mask": lambda: transformers.OPTConfig(
        vocab_size=103,
        hidden_size=32,
        ffn_dim=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        word_embed_proj_dim=32,
        pad_token_id=0,
        eos_token_id=None,
    ),
    "eager attention": lambda: transformers.LlamaConfig(**SIZES, attn_implementation="eager"),
    "convolution layers": lambda: transformers.Lfm2Config(
        **SIZES, layer_types=["conv", "full_attention"]
    ),
}


FUSED = ("grouped query", "biases")


@pytest.mark.parametrize("kind", CONFIGS)
async def test_any_causal_lm_gets_the_logprobs_of_its_own_forward(kind: str) -> None:
    torch.manual_seed(1)
    model = sharpened(transformers.AutoModelForCausalLM.from_config(CONFIGS[kind]()).eval())
    async with LocalSampler(model, TOKENIZER) as sampler:
        assert (sampler._worker.current.fused is not None) == (kind in FUSED)
        assert await crowd(sampler, model, 12, 30) < 1e-5


async def test_a_model_without_past_key_values_is_refused() -> None:
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=103, hidden_size=16, num_hidden_layers=1)
    )
    with pytest.raises(ValueError, match="past_key_values"):
        LocalSampler(model, TOKENIZER)


async def test_greedy_takes_the_likeliest_token(
    sampler: LocalSampler, model: LlamaForCausalLM
) -> None:
    params = SamplingParams(max_tokens=8, temperature=0, top_k=3)
    one, two = await sampler.sample([A, B], params, n=2)
    assert one.token_ids == two.token_ids
    ids = [A, B]
    for token in one.token_ids:
        with torch.no_grad():
            assert model(torch.tensor([ids])).logits[0, -1].argmax().item() == token
        ids.append(token)


async def test_a_seed_gives_the_same_tokens_whatever_shares_the_batch(
    sampler: LocalSampler,
) -> None:
    alone = await sampler.sample([A, B, C], SEEDED, n=4)
    crowd = [
        sampler.sample([A] * k, SamplingParams(max_tokens=3 * k, top_k=k % 3)) for k in range(1, 9)
    ]
    amid, *_ = await asyncio.gather(sampler.sample([A, B, C], SEEDED, n=4), *crowd)
    assert [c.token_ids for c in amid] == [c.token_ids for c in alone]
    assert len({tuple(c.token_ids) for c in alone}) == 4
    fewer = await sampler.sample([A, B, C], SEEDED, n=2)
    assert [c.token_ids for c in fewer] == [c.token_ids for c in alone[:2]]


async def test_without_a_seed_each_call_draws_anew(endless: LocalSampler) -> None:
    params = SamplingParams(max_tokens=20)
    drawn = [tuple((await endless.sample([A], params))[0].token_ids) for _ in range(3)]
    assert len(set(drawn)) == 3


async def test_isolated_requests_are_equal_to_the_bit_under_any_load(
    model: LlamaForCausalLM,
) -> None:
    prompts = [[A] * length for length in range(1, 9)]

    async def one(sampler: LocalSampler, prompt: list[int]) -> list[Any]:
        params = SamplingParams(max_tokens=30, seed=len(prompt))
        found = await sampler.sample(prompt, params, n=3)
        return [(c.token_ids, c.logprobs) for c in found]

    async with LocalSampler(model, TOKENIZER, isolate=True) as sampler:
        serial = [await one(sampler, prompt) for prompt in prompts]
        together = await asyncio.gather(*(one(sampler, prompt) for prompt in prompts))
    assert together == serial


async def test_logprobs_of_given_tokens_are_the_forwards(
    sampler: LocalSampler, model: LlamaForCausalLM
) -> None:
    (completion,) = await sampler.sample([A, B], SEEDED)
    ids = [A, B, *completion.token_ids]
    scores = await sampler.logprobs(ids)
    assert scores[0] == 0.0
    assert scores[2:] == pytest.approx(completion.logprobs, abs=1e-5)
    assert await sampler.logprobs([A]) == [0.0]


# -- when a row ends ------------------------------------------------------------------------------


async def test_alternatives_are_the_forwards(sampler: LocalSampler, model: Any) -> None:
    ids, given = [A, B, C, A], [[B, -1], [0, C], [-1, -1]]
    reference = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1).detach()
    found = await sampler.alternatives(ids, top=3, given=given)
    assert found.top is not None
    values, tokens = reference.topk(3)
    assert found.top.ids.tolist() == tokens.tolist()
    assert found.top.logprobs == pytest.approx(values.numpy(), abs=1e-5)
    wanted = [
        [float(lp[i]) if i >= 0 else 0.0 for i in row]
        for lp, row in zip(reference, given, strict=True)
    ]
    assert found.given == [pytest.approx(row, abs=1e-5) for row in wanted]
    wide = await sampler.alternatives(ids, top=200)  # of a vocabulary of 107
    assert wide.top is not None
    assert wide.given is None
    assert (wide.top.ids.shape, wide.top.logprobs[0, 107]) == ((3, 200), -np.inf)


async def test_the_likeliest_tokens_come_with_the_sampled_ones(sampler: LocalSampler) -> None:
    drawn = await sampler.sample_with_top([A], SamplingParams(8, temperature=0), 2, top=2)
    for completion, top in drawn:
        assert top is not None
        assert top.ids[:, 0].tolist() == completion.token_ids
        assert top.logprobs[:, 0].tolist() == completion.logprobs
    [(_, none)] = await sampler.sample_with_top([A], SEEDED)
    assert none is None


async def test_without_eos_only_max_tokens_ends_a_row(sampler: LocalSampler) -> None:
    stopped = [len(one.token_ids) for one in await sampler.sample([A], SamplingParams(60), 32)]
    assert min(stopped) < 60
    drawn = await sampler.sample_with_top([A], SamplingParams(60), 32, eos=False)
    assert [len(one.token_ids) for one, _ in drawn] == [60] * 32


async def test_a_row_ends_at_eos_a_stop_token_or_max_tokens(
    sampler: LocalSampler, endless: LocalSampler
) -> None:
    completions = await sampler.sample([A], SamplingParams(max_tokens=400, seed=1), n=8)
    for completion in completions:
        *body, last = completion.token_ids
        assert TOKENIZER.eos_token_id not in body
        assert (completion.stop_reason == "stop") == (last == TOKENIZER.eos_token_id)
        assert completion.text == TOKENIZER.decode(completion.token_ids, skip_special_tokens=True)
    assert any(c.stop_reason == "stop" for c in completions)
    (free,) = await endless.sample([A], SamplingParams(max_tokens=30, seed=1))
    assert (len(free.token_ids), free.stop_reason) == (30, "length")
    stop = free.token_ids[9]
    (cut,) = await endless.sample(
        [A], SamplingParams(max_tokens=30, seed=1, stop_token_ids=(stop,))
    )
    assert cut.stop_reason == "stop"
    assert cut.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]


async def test_a_stop_string_ends_a_row_with_the_token_that_completes_it(
    endless: LocalSampler,
) -> None:
    (free,) = await endless.sample([A], SamplingParams(max_tokens=60, seed=2))
    stop = TOKENIZER.decode(free.token_ids[20:23])
    params = SamplingParams(max_tokens=60, seed=2, stop=("not in it", stop))
    (cut,) = await endless.sample([A], params)
    assert cut.stop_reason == "stop"
    assert cut.token_ids == free.token_ids[: len(cut.token_ids)]
    assert stop in TOKENIZER.decode(cut.token_ids)
    assert stop not in TOKENIZER.decode(cut.token_ids[:-1])


@functools.cache
def byte_level() -> PreTrainedTokenizerFast:
    """A byte-level BPE: one character may be several tokens, and one token several characters."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<end>"],
        show_progress=False,
    )
    backend.train_from_iterator(["the END of the end. so the end"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>")


@given(
    st.text(alphabet="theEND .é✓𝄞", max_size=30),
    st.lists(st.text(alphabet="theEND .é✓𝄞", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_are_found_as_in_the_whole_text_at_once(text: str, stops: list[str]) -> None:
    tokenizer = byte_level()
    stopping = Stopping(SamplingParams(1000, stop=tuple(stops)), tokenizer, frozenset(), None)
    ids = tokenizer.encode(text)
    for end in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:end])
        found = any(stop in whole for stop in stops)
        assert (stopping.reason(ids[:end]) == "stop") == found
        if found:
            return


async def test_the_context_ends_a_row(endless: LocalSampler) -> None:
    prompt = [A] * 1020
    (completion,) = await endless.sample(prompt, SamplingParams(max_tokens=50))
    assert (len(completion.token_ids), completion.stop_reason) == (4, "context")
    (completion,) = await endless.sample(prompt, SamplingParams(max_tokens=4))
    assert (len(completion.token_ids), completion.stop_reason) == (4, "length")


BAD_CALLS: dict[str, tuple[list[int], SamplingParams, int]] = {
    "got no tokens": ([], SEEDED, 1),
    "1024": ([A] * 1024, SEEDED, 1),
    "got token id 107": ([A, 107], SEEDED, 1),
    "got token id -1": ([-1], SEEDED, 1),
    "n: got 0": ([A], SEEDED, 0),
    "max_tokens: got 0": ([A], SamplingParams(max_tokens=0), 1),
    "temperature: got -1": ([A], SamplingParams(temperature=-1), 1),
    "temperature: got 1e-40": ([A], SamplingParams(temperature=1e-40), 1),
    "temperature: got 1000000000+": ([A], SamplingParams(temperature=10**19), 1),
    "temperature: got nan": ([A], SamplingParams(temperature=float("nan")), 1),
    "top_p: got 1e-300": ([A], SamplingParams(top_p=1e-300), 1),
    "top_k: got 9223372036854775808": ([A], SamplingParams(top_k=2**63), 1),
    "top_p: got 0": ([A], SamplingParams(top_p=0), 1),
    "top_k: got -1": ([A], SamplingParams(top_k=-1), 1),
    "stop": ([A], SamplingParams(stop=("",)), 1),
}


@pytest.mark.parametrize("message", BAD_CALLS)
async def test_a_call_that_cannot_be_served_is_a_value_error_before_any_pass(
    message: str, sampler: LocalSampler
) -> None:
    prompt, params, n = BAD_CALLS[message]
    with pytest.raises(ValueError, match=message):
        await sampler.sample(prompt, params, n)
    assert sampler.stats.tokens == 0


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


def test_a_program_that_forgets_to_close_still_ends(tmp_path: Path) -> None:
    script = f"""
import asyncio, pathlib
from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.stopping import Stopping
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.sampler import SamplingParams

async def main():
    folder = tiny_folder(pathlib.Path({str(tmp_path)!r}))
    sampler = await LocalSampler(load_model(folder), tiny_tokenizer()).__aenter__()
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
