"""The extra cost of a step of the TRL adapter over plain TRL on the same rows, in one run.

    python -m benchmarks.trl_adapter
    python -m benchmarks.trl_adapter --shape qwen3-0.6b --device cuda --groups 8 --tokens 256
    python -m benchmarks.trl_adapter --processes 2

Plain TRL is a GRPOTrainer that gets ready-made tensors instead of generating: its forward,
backward, clipping, optimizer, schedule and loop, without its padding and scoring. The adapter's
step is one `update(batch)`, from plain lists to metrics. Blocks of steps alternate, so that other
load on the machine slows both. The bar is 15 ms per step.

With `--processes N` it compares one process with N instead, DDP and (on GPUs) FSDP2, without a bar:
on a CPU, processes pay off only if each has its own cores, and if a step takes longer than their
messages.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback
from trl import GRPOTrainer

from benchmarks.sampler import SHAPES, device_name
from retrain.adapters.trl.adapter import TrlAdapter
from retrain.adapters.trl.build import grpo_args, hush, place_model
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.rows import collate
from retrain.config import RunConfig
from retrain.engine.models import load_model, load_tokenizer
from retrain.engine.tiny import tiny_tokenizer
from retrain.types import Batch, Denominators, Sample

BAR_MS = 15.0


def main() -> None:
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    hush()
    with tempfile.TemporaryDirectory() as scratch:
        model = SHAPES[arguments.shape]()
        model.save_pretrained(scratch)
        tiny_tokenizer().save_pretrained(scratch)
        size = sum(p.numel() for p in model.parameters()) / 1e6
        print(
            f"{arguments.shape}: {size:.2f} M parameters, {device_name(arguments.device)}, "
            f"{arguments.threads} thread(s); {arguments.groups} x {arguments.size} rows of "
            f"{arguments.prompt} + {arguments.tokens} tokens"
        )
        samples = rows(arguments, model.config.vocab_size)
        del model
        mode = compare if arguments.processes == 1 else divide
        asyncio.run(mode(arguments, scratch, samples))


async def divide(arguments: argparse.Namespace, folder: str, samples: Sequence[Sample]) -> None:
    """The time of an update in one process and in several."""
    options, config, batch = prepared(arguments, folder, samples)
    medians: list[float] = []
    many = arguments.processes
    cuda = torch.cuda.is_available()  # accelerate shards on GPUs only
    for processes, sharding in [(1, "none"), (many, "none"), *[(many, "full")] * cuda]:
        several = options.model_copy(update={"processes": processes, "sharding": sharding})
        seconds = []
        async with TrlAdapter(several, config) as adapter:
            for _ in range(arguments.steps * (arguments.blocks + 1)):
                start = time.perf_counter()
                await adapter.update(batch)
                seconds.append(time.perf_counter() - start)
        seconds = seconds[arguments.steps :]  # the first warm up
        medians.append(statistics.median(seconds))
        print(
            f"{processes} process(es), sharding {sharding:5}{medians[-1] * 1e3:10.1f} ms per "
            f"update, {medians[-1] / medians[0]:.2f} times that of one process"
        )


def prepared(
    arguments: argparse.Namespace, folder: str, samples: Sequence[Sample]
) -> tuple[TrlOptions, RunConfig, Batch]:
    steps = arguments.steps * (arguments.blocks + 1)
    options = TrlOptions(device=arguments.device, threads=arguments.threads)
    config = RunConfig.model_validate(
        {
            "model": folder,
            "prompts": {"type": "list"},
            "sampling": {"max_tokens": arguments.tokens},
            "train": {"total_train_steps": steps},
        }
    )
    counts = [sum(sample.loss_mask) for sample in samples]
    return options, config, Batch(samples, "dapo", {}, Denominators(sum(counts), len(counts)))


async def compare(arguments: argparse.Namespace, folder: str, samples: Sequence[Sample]) -> None:
    options, config, batch = prepared(arguments, folder, samples)
    alone = Alone(options, config, folder, samples)
    ours, theirs = [], []
    async with TrlAdapter(options, config) as adapter:
        for block in range(arguments.blocks + 1):
            start = time.perf_counter()
            await asyncio.to_thread(alone.run, arguments.steps)
            middle = time.perf_counter()
            for _ in range(arguments.steps):
                await adapter.update(batch)
            if block:  # the first warms up
                theirs.append((middle - start) / arguments.steps)
                ours.append((time.perf_counter() - middle) / arguments.steps)
    report(ours, theirs)


class Alone:
    """TRL's own trainer in a thread; `run` makes the given number of steps."""

    def __init__(
        self, options: TrlOptions, config: RunConfig, folder: str, samples: Sequence[Sample]
    ) -> None:
        placement = place_model(options)
        args = grpo_args(options, config, run_plan(config), placement, Path(folder))
        ready = self

        class Given(GRPOTrainer):
            def _generate_and_score_completions(self, inputs: Any) -> Any:
                ready.steps.acquire()
                return dict(ready.tensors)

        class Counted(TrainerCallback):
            def on_step_end(self, *_: Any, **__: Any) -> None:
                ready.done.release()

        self.steps, self.done = threading.Semaphore(0), threading.Semaphore(0)
        self.tensors = native(samples, placement.device)
        self.trainer = Given(
            load_model(folder, placement.device),
            reward_funcs=lambda **_: [],
            args=args,
            train_dataset=Dataset.from_dict({"prompt": [""] * config.train.total_train_steps}),
            processing_class=load_tokenizer(folder),
            callbacks=[Counted()],
        )
        self.trainer.remove_callback(PrinterCallback)
        threading.Thread(target=self._train, args=(options.threads,), daemon=True).start()

    def run(self, steps: int) -> None:
        self.steps.release(steps)
        for _ in range(steps):
            self.done.acquire()
        if self.tensors["advantages"].is_cuda:
            torch.cuda.synchronize()

    def _train(self, threads: int) -> None:
        torch.set_num_threads(threads)
        self.trainer.train()


def native(samples: Sequence[Sample], device: torch.device) -> dict[str, torch.Tensor]:
    """The rows in TRL's form: one advantage per row."""
    tensors = {k: v.to(device) for k, v in collate(samples, 0).items()}
    tensors["advantages"] = tensors["advantages"].amax(-1) + tensors["advantages"].amin(-1)
    tensors["num_items_in_batch"] = tensors["tool_mask"].sum()
    return tensors


def rows(arguments: argparse.Namespace, vocabulary: int) -> list[Sample]:
    """Groups that share a prompt, with lengths from half of `tokens` to `tokens`."""
    rng = random.Random(0)
    made = []
    for group in range(arguments.groups):
        prompt = [rng.randrange(vocabulary) for _ in range(arguments.prompt)]
        for _ in range(arguments.size):
            length = rng.randint(max(1, arguments.tokens // 2), arguments.tokens)
            ids = [rng.randrange(vocabulary) for _ in range(length)]
            advantage = rng.uniform(-1, 1)
            given, sampled = len(prompt), len(ids)
            made.append(
                Sample(
                    [*prompt, *ids],
                    [0] * given + [1] * sampled,
                    [0.0] * given + [-5.0] * sampled,
                    [0.0] * given + [advantage] * sampled,
                    [-1] * given + [0] * sampled,
                    group_id=f"0.{group}.0",
                )
            )
    return made


def report(ours: Sequence[float], theirs: Sequence[float]) -> None:
    print(f"{'':12}{'ms per step':>12}{'least':>10}")
    for name, seconds in (("TRL alone", theirs), ("TrlAdapter", ours)):
        print(f"{name:12}{statistics.median(seconds) * 1e3:12.1f}{min(seconds) * 1e3:10.1f}")
    over = statistics.median(a - b for a, b in zip(ours, theirs, strict=True)) * 1e3
    verdict = "met" if over <= BAR_MS else "missed"
    print(f"the adapter costs {over:+.1f} ms per step, bar {BAR_MS:.0f} ms {verdict}")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default=next(iter(SHAPES)))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--size", type=int, default=8, help="rows per group")
    parser.add_argument("--prompt", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=5, help="steps per block")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--processes", type=int, default=1, help="compare one process with this many"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
