"""A small model for the local sampler, and how to wait for what the sampler does."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.sampler import SamplingParams
from retrain.types import Completion

TOKENIZER = tiny_tokenizer()

A, B, C = TOKENIZER.encode("abc")

SEEDED = SamplingParams(max_tokens=12, seed=5)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """tiny, with weights far enough from 0 that a wrong position or mask shows."""
    return sharpened(load_model(tiny_folder()))


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
    if params.temperature == 0 or (params.top_k, params.top_p) == (0, 1):
        return logprobs
    order = logprobs.argsort(descending=True).tolist()
    kept = order[: params.top_k or None]
    probs = logprobs[kept].softmax(0).tolist()
    nucleus, total = [], 0.0
    for token, prob in zip(kept, probs, strict=True):
        if total >= params.top_p < 1:
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
