"""The parts of benchmarks/gpu.py: each sets itself up, and prints a table and its peak memory.

TRL is imported where it is needed, so that the others run without it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import resource
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import DynamicCache
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from benchmarks import sampler
from retrain.algorithms.batching import batch_of
from retrain.config import RunConfig
from retrain.engine.fused import fused_step
from retrain.engine.kv_cache import RowCache
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_tokenizer
from retrain.pipeline import train
from retrain.sampler import SamplingParams

BAR_GB, GB = 80.0, 1e9
ROWS = 64
"""Rows of a decode pass."""
VARIANTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "checkpointing": {"gradient_checkpointing": True},
    "no checkpointing": {"gradient_checkpointing": False},
    "sdpa": {"attention": "sdpa"},
    "flash_attention_2": {"attention": "flash_attention_2"},
}


# --- without TRL


def sampling(arguments: argparse.Namespace) -> None:
    """Tokens per second of three samplers that take turns."""
    seconds, tokens = asyncio.run(compare(build(arguments), arguments))
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
            made = [
                ("model.generate", generating, sum(lengths)),
                ("LocalSampler", taken, sum(lengths)),
            ]
            with going_on("continuous batching"):
                batching = await asyncio.to_thread(continuous, model, prompts, stops, arguments)
                made.append(("continuous batching", *batching))
            if not repeat:  # the first warms up
                continue
            for name, spent, count in made:
                seconds.setdefault(name, []).append(spent)
                tokens.setdefault(name, []).append(count)
    return seconds, tokens


def continuous(
    model: PreTrainedModel,
    prompts: Sequence[list[int]],
    stops: Sequence[int],
    arguments: argparse.Namespace,
) -> tuple[float, int]:
    """Seconds and tokens of transformers' `generate_batch`; its rows end at the same tokens."""
    torch.set_num_threads(arguments.threads)
    start = sampler.now()
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
    return sampler.now() - start, sum(len(o.generated_tokens) for o in outputs.values())


def decoding(arguments: argparse.Namespace) -> None:
    """Milliseconds of one decode pass of 64 rows: what compilation or CUDA graphs could save."""
    model = build(arguments).requires_grad_(False)
    ids = torch.randint(model.config.vocab_size, (ROWS, arguments.prompt), device=model.device)
    width = arguments.prompt + 4 + 10 * (1 + arguments.repeats)  # each pass adds a column
    mode = "reduce-overhead" if model.device.type == "cuda" else "default"
    compiled = torch.compile(model.forward, mode=mode, fullgraph=False)
    makers: dict[str, Callable[[], Callable[[], Any]]] = {
        "model's forward": lambda: static_pass(model, model.forward, ids, width),
        "local sampler": lambda: sampler_pass(model, ids),
        "torch.compile": lambda: static_pass(model, compiled, ids, width),
    }
    print(f"{'':24}{'ms per pass':>12}{'first, s':>12}")
    for name, make in makers.items():
        with going_on(name), torch.inference_mode():
            run = make()
            first = seconds_of(run, 1, arguments)
            seconds_of(run, 3, arguments)
            each = min(seconds_of(run, 10, arguments) for _ in range(1 + arguments.repeats))
            print(f"{name:24}{each * 1e3:12.2f}{first:12.1f}", flush=True)
    peak(arguments)


def static_pass(
    model: PreTrainedModel, forward: Callable[..., Any], ids: torch.Tensor, width: int
) -> Callable[[], Any]:
    """A pass over a cache of fixed size, which a compiled forward needs."""
    cache = StaticCache(config=model.config, max_cache_len=width)
    model(ids, past_key_values=cache, use_cache=True)
    places = torch.full((len(ids), 1), ids.shape[1], device=ids.device)
    newest = ids[:, -1:].clone()
    return lambda: forward(newest, past_key_values=cache, use_cache=True, position_ids=places)


def sampler_pass(model: PreTrainedModel, ids: torch.Tensor) -> Callable[[], Any]:
    """A pass as the local sampler makes it."""
    cache, prefilled, step = RowCache(len(ids)), DynamicCache(), fused_step(model)
    model(ids, past_key_values=prefilled, use_cache=True)
    cache.add(prefilled, range(len(ids)), [ids.shape[1]] * len(ids))
    assert step is not None  # it is a Qwen3
    newest = ids[:, -1].clone()
    return lambda: step(newest, cache, **cache.step_inputs())


def seconds_of(run: Callable[[], Any], count: int, arguments: argparse.Namespace) -> float:
    """Mean seconds of a call."""
    start = time.perf_counter()
    for _ in range(count):
        run()
    if arguments.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / count


# --- with TRL


def adapter(arguments: argparse.Namespace) -> None:
    """The adapter compared with plain TRL."""
    from benchmarks import trl_adapter

    with saved(arguments) as (folder, vocabulary):
        rows = trl_adapter.rows(arguments, vocabulary)
        asyncio.run(trl_adapter.compare(arguments, folder, rows))
    peak(arguments)


def options(arguments: argparse.Namespace) -> None:
    """A step of the adapter and its peak memory for each option."""
    from benchmarks import trl_adapter

    with saved(arguments) as (folder, vocabulary):
        print(f"{'':24}{'ms per step':>12}")
        samples = trl_adapter.rows(arguments, vocabulary)
        for name, keys in VARIANTS.items():
            with going_on(name), tempfile.TemporaryDirectory() as scratch:
                config = run_config(arguments, folder, 0, Path(scratch), **keys)
                each = asyncio.run(update(config, samples, arguments))
                print(f"{name:24}{each * 1e3:12.1f}  ", end="")
                peak(arguments)


async def update(config: RunConfig, samples: Sequence[Any], arguments: argparse.Namespace) -> float:
    """Seconds per update, after one that warms up."""
    from retrain.adapters.trl.adapter import TrlAdapter

    batch = batch_of(samples, loss="dapo", loss_config={})
    async with TrlAdapter(checked(config), config) as trl:
        await trl.update(batch)
        start = time.perf_counter()
        for _ in range(arguments.steps):
            await trl.update(batch)
        return (time.perf_counter() - start) / arguments.steps


def pipe(arguments: argparse.Namespace) -> None:
    """Milliseconds per step of a whole run with S=0 and S=1."""
    from benchmarks.pipe_beside_trl import Clock

    with saved(arguments) as (folder, _):
        print(f"{'':12}{'ms per step':>12}")
        for staleness in (0, 1):
            with tempfile.TemporaryDirectory() as run_dir:
                config = run_config(arguments, folder, staleness, Path(run_dir))
                clock = Clock()
                asyncio.run(train(config, callbacks=[clock], console=False))
            print(f"S={staleness:<10}{clock.per_step(arguments.steps).wall:12.1f}", flush=True)
        peak(arguments)
        estimate(config)


def large(arguments: argparse.Namespace) -> None:
    """The peak memory of sampling, a GRPO step with LoRA and a publish, at 4 B parameters."""
    if arguments.device != "cuda":
        print("skipped: no CUDA device")
        return
    sizes = argparse.Namespace(**{**vars(arguments), "tokens": 1024, "prompt": 512})
    with saved(arguments, "qwen3-4b") as (folder, vocabulary), tempfile.TemporaryDirectory() as run:
        config = run_config(sizes, folder, 1, Path(run), lora={"r": 16})
        asyncio.run(one_step(config, sizes, vocabulary))
        allocated = peak(arguments)
        estimate(config)
    print(f"bar {BAR_GB:.0f} GB {'met' if allocated <= BAR_GB else 'missed'}")


async def one_step(config: RunConfig, arguments: argparse.Namespace, vocabulary: int) -> None:
    """Sampling during an update, and a publish while rows decode, as in a run."""
    from benchmarks import trl_adapter
    from retrain.adapters.trl.adapter import TrlAdapter

    prompts = torch.randint(vocabulary, (arguments.groups, arguments.prompt)).tolist()
    params = SamplingParams(arguments.tokens)
    samples = trl_adapter.rows(arguments, vocabulary)
    async with TrlAdapter(checked(config), config) as trl:
        decoding = [trl.sampler.sample(p, params, arguments.size) for p in prompts]
        going = asyncio.gather(*decoding)
        await trl.update(batch_of(samples, loss="dapo", loss_config={}))
        await trl.publish()
        await going


def run_config(
    arguments: argparse.Namespace, folder: str, staleness: int, run_dir: Path, **backend: Any
) -> RunConfig:
    """GRPO on random prompts with random rewards."""
    from benchmarks.pipe_beside_trl import WARM_UP

    return RunConfig.model_validate(
        {
            "model": folder,
            "run_dir": run_dir,
            "prompts": {"type": "list", "rows": ["abcdefgh" * 3]},
            "rewards": [{"type": f"{__name__}:luck"}],
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


def luck(completion: str) -> float:
    """A reward that differs between completions; their text is empty, as no token has any."""
    return random.random()


def checked(config: RunConfig) -> Any:
    """The backend's options; raises RuntimeError with what can't work, as a run's start does."""
    from retrain.adapters.trl.options import TrlOptions

    found = TrlOptions.model_validate(config.backend.arguments)
    problems = found.problems(config)
    if problems:
        raise RuntimeError("; ".join(problems))
    return found


def estimate(config: RunConfig) -> None:
    """Print the memory estimate that a run prints."""
    from retrain.adapters.trl.memory import forecast

    estimated = forecast(checked(config), config)
    print(estimated.text if estimated else "no estimate")


# --- models and output


def build(arguments: argparse.Namespace, shape: str | None = None) -> PreTrainedModel:
    """A model with random weights, made on the device in its dtype."""
    cuda = arguments.device == "cuda"
    shape = shape or ("qwen3-0.6b" if cuda else "qwen3-small")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if cuda else torch.float32)
    try:
        with torch.device(arguments.device):
            model = sampler.SHAPES[shape]().eval()
    finally:
        torch.set_default_dtype(before)
    size = sum(p.numel() for p in model.parameters()) / 1e6
    name = sampler.device_name(arguments.device)
    print(f"{shape} on {name}: {size:.2f} M parameters, random weights", flush=True)
    return model


@contextlib.contextmanager
def saved(arguments: argparse.Namespace, shape: str | None = None) -> Iterator[tuple[str, int]]:
    """A folder with a model and a tokenizer, and the size of its vocabulary."""
    from retrain.adapters.trl.build import hush

    hush()
    with tempfile.TemporaryDirectory() as folder:
        model = build(arguments, shape)
        model.save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        vocabulary = model.config.vocab_size
        del model
        if arguments.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        yield folder, vocabulary


@contextlib.contextmanager
def going_on(name: str) -> Iterator[None]:
    """Print the error of a row of a table, and go on with the next."""
    try:
        yield
    except Exception:  # noqa: BLE001 - the other rows are worth as much
        last = traceback.format_exc().strip().splitlines()[-1]
        print(f"{name:24}failed: {last[:300]}", flush=True)


def peak(arguments: argparse.Namespace) -> float:
    """Print and return the peak memory in GB since the last, and of the process on the CPU."""
    if arguments.device == "cuda":
        found, what = torch.cuda.max_memory_allocated() / GB, "allocated on the GPU"
        torch.cuda.reset_peak_memory_stats()
    else:
        found = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GB
        what = "resident, of the process so far"
    print(f"peak memory: {found:.2f} GB {what}", flush=True)
    return found
