"""The local sampler against plain forwards of the same model."""

from __future__ import annotations

import asyncio
import functools
import random
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.stopping import Stopping
from retrain.engine.tiny import tiny_folder
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
    sharpened,
)

model, sampler, endless = kit.model, kit.sampler, kit.endless


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
