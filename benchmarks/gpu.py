"""Everything that a GPU changes, in one command; without one, the same on the CPU and smaller.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --device cpu --quick

With CUDA, a model with random weights and the shape of Qwen3-0.6B, in bfloat16; on the CPU, a small
model of the same architecture, in float32. Four tables:

- tokens per second of the local sampler, `model.generate` and transformers' continuous batching, on
  the same ragged work (see benchmarks/sampler.py);
- a step of the TRL adapter beside TRL alone (see benchmarks/trl_adapter.py);
- a step of the pipe with `staleness.target` 0 and 1;
- the peak of memory of these, and of a GRPO step with LoRA at the shape of Qwen3-4B (only CUDA; the
  bar is 80 GB), beside the estimate that a run prints.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks import sampler, trl_adapter
from benchmarks.pipe_beside_trl import WARM_UP, Clock
from retrain.adapters.trl.adapter import TrlAdapter
from retrain.adapters.trl.build import hush
from retrain.adapters.trl.memory import GB, forecast
from retrain.adapters.trl.options import TrlOptions
from retrain.batching import batch_of
from retrain.config import RunConfig
from retrain.engine.models import choose_device
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_tokenizer
from retrain.pipeline import train
from retrain.sampler import SamplingParams

BAR_GB = 80.0


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    hush()
    cuda = arguments.device == "cuda"
    arguments.shape = "qwen3-0.6b" if cuda else "qwen3-small"
    with tempfile.TemporaryDirectory() as folder:
        model = sampler.SHAPES[arguments.shape]()
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(f"device: {sampler.device_name(arguments.device)}")
        print(f"model: {arguments.shape}, {size:.2f} M parameters, random weights")
        model = model.to(arguments.device, torch.bfloat16 if cuda else torch.float32).eval()
        sampling(model, arguments)
        vocabulary = model.config.vocab_size
        del model
        stepping(arguments, folder, vocabulary)
        pipe(arguments, folder)
    large(arguments)


# --- sampling


def sampling(model: PreTrainedModel, arguments: argparse.Namespace) -> None:
    """Tokens per second of three samplers that take turns."""
    heading("sampling", arguments)
    seconds, tokens = asyncio.run(compare(model, arguments))
    print(f"{'':24}{'tokens/s':>12}{'of generate':>14}")
    rates = {n: sum(tokens[n]) / sum(taken) for n, taken in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:24}{rate:12.0f}{rate / rates['model.generate']:13.2f}x")
    peak(arguments)


async def compare(
    model: PreTrainedModel, arguments: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    vocabulary = model.config.vocab_size
    prompts = torch.randint(vocabulary, (arguments.groups, arguments.prompt)).tolist()
    stops = tuple(range(0, vocabulary, sampler.STOP_SHARE))
    seconds: dict[str, list[float]] = {}
    tokens: dict[str, list[int]] = {}
    async with LocalSampler(model, tiny_tokenizer(), threads=arguments.threads) as local:
        for repeat in range(arguments.repeats + 1):
            params = SamplingParams(arguments.tokens, stop_token_ids=stops, seed=repeat)
            taken, rows = await sampler.sample(local, prompts, params, arguments.size)
            lengths = [len(row.token_ids) for row in rows]
            generating = await asyncio.to_thread(
                sampler.generate, model, prompts, lengths, arguments
            )
            batching, count = await asyncio.to_thread(continuous, model, prompts, stops, arguments)
            if not repeat:  # the first warms up
                continue
            for name, spent, made in (
                ("model.generate", generating, sum(lengths)),
                ("continuous batching", batching, count),
                ("LocalSampler", taken, sum(lengths)),
            ):
                seconds.setdefault(name, []).append(spent)
                tokens.setdefault(name, []).append(made)
    return seconds, tokens


def continuous(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    stops: Sequence[int],
    arguments: argparse.Namespace,
) -> tuple[float, int]:
    """Seconds and tokens of transformers' `generate_batch`; its rows end at the same tokens."""
    torch.set_num_threads(arguments.threads)
    start = time.perf_counter()
    outputs = model.generate_batch(
        list(prompts),
        generation_config=GenerationConfig(
            do_sample=True,
            top_k=0,
            max_new_tokens=arguments.tokens,
            num_return_sequences=arguments.size,
            eos_token_id=list(stops),
            pad_token_id=0,
        ),
        # without a card there is no memory to infer the size of the cache from
        continuous_batching_config=None
        if model.device.type == "cuda"
        else ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=512),
    )
    return time.perf_counter() - start, sum(len(o.generated_tokens) for o in outputs.values())


# --- training


def stepping(arguments: argparse.Namespace, folder: str, vocabulary: int) -> None:
    """The adapter beside TRL alone."""
    heading("TRL adapter", arguments)
    rows = trl_adapter.rows(arguments, vocabulary)
    asyncio.run(trl_adapter.compare(arguments, folder, rows))
    peak(arguments)


def pipe(arguments: argparse.Namespace, folder: str) -> None:
    """Milliseconds per step of a whole run with S=0 and S=1."""
    heading("the pipe", arguments)
    print(f"{'':12}{'ms per step':>12}")
    for staleness in (0, 1):
        with tempfile.TemporaryDirectory() as run_dir:
            config = run_config(arguments, folder, staleness, Path(run_dir))
            clock = Clock()
            asyncio.run(train(config, callbacks=[clock]))
        print(f"S={staleness:<10}{clock.per_step(arguments.steps).wall:12.1f}")
    peak(arguments)
    estimated = forecast(TrlOptions.model_validate(config.backend.arguments), config)
    print(estimated.text if estimated else "no estimate")


def run_config(
    arguments: argparse.Namespace, folder: str, staleness: int, run_dir: Path, **backend: Any
) -> RunConfig:
    """GRPO on random prompts; the reward is the share of even token ids in the text."""
    return RunConfig.model_validate(
        {
            "model": folder,
            "run_dir": run_dir,
            "prompts": {"type": "list", "rows": ["abcdefgh" * 3]},
            "rewards": [{"type": f"{__name__}:even"}],
            "algorithm": {"type": "grpo", "group_size": arguments.size},
            "sampling": {"max_tokens": arguments.tokens},
            "train": {
                "total_train_steps": WARM_UP + arguments.steps + staleness + 1,
                "groups_per_step": arguments.groups,
            },
            "staleness": {"target": staleness},
            "checkpoint": {"every": 0},
            "backend": {
                "type": "trl",
                "device": arguments.device,
                "threads": arguments.threads,
                **backend,
            },
        }
    )


def even(completion: str) -> float:
    """A reward that differs between random completions."""
    return sum(ord(letter) % 2 for letter in completion) / max(1, len(completion))


def large(arguments: argparse.Namespace) -> None:
    """The peak of memory of sampling, a GRPO step with LoRA and a publish, at 4 B parameters."""
    heading("GRPO with LoRA at the shape of Qwen3-4B", arguments)
    if arguments.device != "cuda":
        print("skipped: no CUDA device")
        return
    with tempfile.TemporaryDirectory() as folder:
        model = sampler.SHAPES["qwen3-4b"]().to(torch.bfloat16)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        vocabulary = model.config.vocab_size
        del model
        sizes = argparse.Namespace(**{**vars(arguments), "tokens": 1024, "prompt": 512})
        config = run_config(sizes, folder, 1, Path(folder), lora={"r": 16})
        options = TrlOptions.model_validate(config.backend.arguments)
        asyncio.run(one_step(options, config, sizes, vocabulary))
        estimated = forecast(options, config)
    allocated = peak(arguments)
    print(estimated.text if estimated else "no estimate")
    print(f"bar {BAR_GB:.0f} GB {'met' if allocated <= BAR_GB else 'missed'}")


async def one_step(
    options: TrlOptions, config: RunConfig, arguments: argparse.Namespace, vocabulary: int
) -> None:
    """Sampling beside an update, and a publish while rows decode, as in a run."""
    prompts = torch.randint(vocabulary, (arguments.groups, arguments.prompt)).tolist()
    params = SamplingParams(arguments.tokens)
    samples = trl_adapter.rows(arguments, vocabulary)
    async with TrlAdapter(options, config) as adapter:
        decoding = [adapter.sampler.sample(p, params, arguments.size) for p in prompts]
        going = asyncio.gather(*decoding)
        await adapter.update(batch_of(samples, loss="dapo", loss_config={}))
        await adapter.publish()
        await going


# --- output


def heading(title: str, arguments: argparse.Namespace) -> None:
    print(f"\n{title}")
    if arguments.device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(arguments: argparse.Namespace) -> float:
    """Print and return the peak of memory in GB: of a table on CUDA, so far on the CPU."""
    if arguments.device == "cuda":
        found, what = torch.cuda.max_memory_allocated() / GB, "allocated on the card"
    else:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
        what = "resident, of all tables so far"
    print(f"peak of memory: {found:.2f} GB {what}")
    return found


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--quick", action="store_true", help="one repeat of little work")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args(argv)
    if arguments.device == "auto":
        arguments.device = choose_device()
    cuda, quick = arguments.device == "cuda", arguments.quick
    sizes = {"groups": 2, "tokens": 8, "repeats": 1, "steps": 1, "blocks": 1}
    if not quick and cuda:
        sizes = {"groups": 8, "tokens": 256, "repeats": 3, "steps": 5, "blocks": 3}
    elif not quick:
        sizes = {"groups": 4, "tokens": 32, "repeats": 2, "steps": 3, "blocks": 2}
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    return argparse.Namespace(**vars(arguments), size=8, prompt=24, **sizes)


if __name__ == "__main__":
    main()
