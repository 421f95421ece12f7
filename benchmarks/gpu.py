"""Everything that a GPU changes, in one command; without a GPU, the same on the CPU with less work.

    python -m benchmarks.gpu
    python -m benchmarks.gpu --parts sampling decoding
    python -m benchmarks.gpu --device cpu --quick

With CUDA, a model with random weights and the shape of Qwen3-0.6B, in bfloat16; on the CPU, a small
model of the same architecture, in float32. The parts, most useful first:

- sampling: tokens per second of the local sampler, `model.generate` and transformers' continuous
  batching, on the same ragged work (see benchmarks/sampler.py);
- adapter: a step of the TRL adapter compared with plain TRL (see benchmarks/trl_adapter.py);
- pipe: a step of a whole run with `staleness.target` 0 and 1;
- large: GRPO with LoRA at the shape of Qwen3-4B (only CUDA; the bar is 80 GB);
- options: a step of the adapter for each dtype, gradient checkpointing and attention setting;
- decoding: one pass of 64 rows, as it is and compiled (with CUDA graphs on a GPU).

Each prints its peak memory. Each runs in its own process, which is ended after its time limit, so
that a part that fails or hangs does not stop the others. `sampling` and `decoding` need no TRL.
All limits together are 27 minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence

import torch

from benchmarks import gpu_parts
from retrain.engine.models import choose_device

SECONDS = {
    "sampling": 240,
    "adapter": 240,
    "pipe": 300,
    "large": 420,
    "options": 240,
    "decoding": 180,
}
"""The parts in their order, and when each is ended."""


def main(argv: Sequence[str] | None = None) -> None:
    arguments = parse(argv)
    for part in arguments.parts:
        if arguments.here:
            run(part, arguments)
        else:
            run_apart(part, arguments)


def run(part: str, arguments: argparse.Namespace) -> None:
    """Run a part in this process; an error is printed, with its last lines."""
    print(f"\n{part}", flush=True)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    try:
        getattr(gpu_parts, part)(arguments)
    except Exception:  # noqa: BLE001 - the next part goes on, whatever it is
        print(f"{part} failed:", *traceback.format_exc().splitlines()[-6:], sep="\n  ", flush=True)


def run_apart(part: str, arguments: argparse.Namespace) -> None:
    """Run a part in its own process, and end its process group after its time limit."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--here", "--parts", part]
    command += ["--device", arguments.device, "--threads", str(arguments.threads)]
    command += ["--quick"] if arguments.quick else []
    environment = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ}
    limit = arguments.limit or SECONDS[part]
    with subprocess.Popen(command, env=environment, start_new_session=True) as process:
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            print(f"{part} was ended after its limit of {limit:g} s", flush=True)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode > 0 or process.returncode < -signal.SIGKILL:
        print(f"{part} ended with exit code {process.returncode}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=SECONDS, default=list(SECONDS))
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--quick", action="store_true", help="one repeat with little work")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--limit", type=float, help="seconds of each part, instead of its own")
    parser.add_argument(
        "--here", action="store_true", help="run the parts in this process, without time limits"
    )
    arguments = parser.parse_args(argv)
    if arguments.device == "auto":
        arguments.device = choose_device()
    cuda, quick = arguments.device == "cuda", arguments.quick
    sizes = {"groups": 2, "tokens": 8, "repeats": 1, "steps": 1, "blocks": 1}
    if not quick and cuda:
        sizes = {"groups": 8, "tokens": 256, "repeats": 3, "steps": 5, "blocks": 3}
    elif not quick:
        sizes = {"groups": 4, "tokens": 32, "repeats": 2, "steps": 3, "blocks": 2}
    return argparse.Namespace(**vars(arguments), size=8, prompt=24, **sizes)


if __name__ == "__main__":
    main()
