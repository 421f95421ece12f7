"""The local sampler compared with `model.generate` on the same ragged work, in one run.

    python benchmarks/sampler.py
    python benchmarks/sampler.py --shape qwen3-0.6b --device cuda --dtype bfloat16

64 rows in groups of 8 that share a prompt of 24 tokens. One token in 20 is a stop token, so lengths
are geometric with a mean of about 16, at most 64. The sampler draws them first; `generate` then
makes the same number of tokens for each row, all rows in one batch, in the same dtype and with the
same threads. They take turns. On the CPU the time is the process's CPU time, which other load
changes less. The bar is 2.5x.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)

from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_tokenizer
from retrain.sampler import SamplingParams
from retrain.types import Completion

STOP_SHARE = 20  # one token in so many is a stop token
BAR = 2.5


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    model = SHAPES[arguments.shape]().to(dtype=dtype, device=arguments.device).eval()
    print(
        f"{arguments.shape}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, "
        f"{arguments.dtype}, {device_name(arguments.device)}, {arguments.threads} thread(s)"
    )
    asyncio.run(compare(model, arguments))


async def compare(model: PreTrainedModel, arguments: argparse.Namespace) -> None:
    vocabulary = model.config.vocab_size
    prompts = torch.randint(vocabulary, (arguments.groups, arguments.prompt)).tolist()
    stops = tuple(range(0, vocabulary, STOP_SHARE))
    ours, theirs, tokens = [], [], 0
    async with LocalSampler(model, tiny_tokenizer(), threads=arguments.threads) as sampler:
        for repeat in range(arguments.repeats + 1):
            params = SamplingParams(arguments.tokens, stop_token_ids=stops, seed=repeat)
            sampling, rows = await sample(sampler, prompts, params, arguments.size)
            lengths = [len(row.token_ids) for row in rows]
            generating = await asyncio.to_thread(generate, model, prompts, lengths, arguments)
            if repeat:  # the first warms up
                ours.append(sampling)
                theirs.append(generating)
                tokens += sum(lengths)
    report(ours, theirs, tokens / arguments.repeats)


async def sample(
    sampler: LocalSampler, prompts: Sequence[list[int]], params: SamplingParams, size: int
) -> tuple[float, list[Completion]]:
    start = now()
    groups = await asyncio.gather(*(sampler.sample(p, params, n=size) for p in prompts))
    return now() - start, [row for group in groups for row in group]


def generate(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    lengths: Sequence[int],
    arguments: argparse.Namespace,
) -> float:
    """Seconds that `model.generate` takes for rows of these lengths."""
    torch.set_num_threads(arguments.threads)
    ids = torch.tensor(prompts, device=model.device)
    ends = Lengths(torch.tensor(lengths, device=model.device) + ids.shape[1])
    start = now()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        num_return_sequences=arguments.size,
        max_new_tokens=arguments.tokens,
        stopping_criteria=StoppingCriteriaList([ends]),
        eos_token_id=None,
        pad_token_id=0,
    )
    if model.device.type == "cuda":
        torch.cuda.synchronize()
    return now() - start


def now() -> float:
    """Seconds of this process on the CPU; of the clock with a GPU, and with several threads."""
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_available()
    return time.process_time() if alone else time.perf_counter()


class Lengths(StoppingCriteria):
    """Each row ends at its own length."""

    def __init__(self, ends: torch.Tensor) -> None:
        self.ends = ends

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object
    ) -> torch.Tensor:
        return self.ends <= input_ids.shape[1]


def report(ours: list[float], theirs: list[float], tokens: float) -> None:
    print(f"{'':16}{'ms, median':>12}{'least':>10}{'tokens/s':>12}")
    for name, seconds in (("model.generate", theirs), ("LocalSampler", ours)):
        middle = statistics.median(seconds)
        print(f"{name:16}{middle * 1e3:12.1f}{min(seconds) * 1e3:10.1f}{tokens / middle:12.0f}")
    ratio = statistics.median(g / s for g, s in zip(theirs, ours, strict=True))
    verdict = "met" if ratio >= BAR else "missed"
    print(f"{len(ours)} repeats of {tokens:.0f} tokens: {ratio:.2f}x, bar {BAR}x {verdict}")


def qwen3(
    hidden: int,
    intermediate: int,
    *,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int = 128,
    vocab_size: int = 151936,
) -> PreTrainedModel:
    """A Qwen3 with random weights."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocab_size,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=head_dim,
            max_position_embeddings=40960,
            tie_word_embeddings=True,
        )
    )


SHAPES: dict[str, Callable[[], PreTrainedModel]] = {
    "small": lambda: LlamaForCausalLM(
        LlamaConfig(
            vocab_size=112,
            hidden_size=128,
            intermediate_size=344,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=1024,
            tie_word_embeddings=True,
        )
    ),
    "qwen3-0.6b": lambda: qwen3(1024, 3072, layers=28, heads=16, kv_heads=8),
    "qwen3-4b": lambda: qwen3(2560, 9728, layers=36, heads=32, kv_heads=8),
    "qwen3-small": lambda: qwen3(
        128, 384, layers=4, heads=4, kv_heads=2, head_dim=32, vocab_size=112
    ),
}


def device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "CPU"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8, help="rows per group")
    parser.add_argument("--prompt", type=int, default=24, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="maximum tokens per completion")
    parser.add_argument("--repeats", type=int, default=9)
    return parser.parse_args()


if __name__ == "__main__":
    main()
