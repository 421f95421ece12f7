"""Writes the tables of scaling.md, and the command for them: `python docs/scaling.py`.

The figures are those of the estimate that a run prints. The text outside the marks is written by
hand and kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from retrain.engine.memory import GROWTH, HALF, Memory, Setup, estimate, token_bytes
from retrain.engine.shapes import Shape

PAGE = Path(__file__).with_suffix(".md")
BLOCK = re.compile(r"(<!-- table: (\w+), by docs/scaling\.py -->\n).*?(<!-- end -->)", re.DOTALL)
GB = 1e9
MODELS: Mapping[str, Shape] = {
    "1 B (Llama-3.2-1B)": Shape(128256, 2048, 16, 32, 8, 64, 8192, tied=True),
    "4 B (Qwen3-4B)": Shape(151936, 2560, 36, 32, 8, 128, 9728, tied=True, head_norms=True),
    "8 B (Qwen3-8B)": Shape(151936, 4096, 36, 32, 8, 128, 12288, head_norms=True),
    "30 B (Qwen3-30B-A3B)": Shape(
        151936, 2048, 48, 32, 4, 128, 6144, head_norms=True,
        experts=128, active_experts=8, expert_intermediate=768, sparse_layers=48,
    ),
}  # fmt: skip
RANK, ROWS, LENGTH = 16, 64, 2_048
BASE = Setup(rows=ROWS, length=LENGTH)
TRAINING = {
    "LoRA, `sharding: none`": (True, "none"),
    "LoRA, `sharding: full`": (True, "full"),
    "full weights, `sharding: none`": (False, "none"),
    "full weights, `sharding: full`": (False, "full"),
}


def page(present: str) -> str:
    """The page with new tables; `present` is its current text."""
    tables = {"one": _one(), "command": _command(), "eight": _eight()}
    assert [found[2] for found in BLOCK.finditer(present)] == list(tables), "a mark is missing"
    return BLOCK.sub(lambda found: found[1] + tables[found[2]] + found[3], present)


def _one() -> str:
    """One GPU for training and sampling."""
    heads = ["model", "trained", "weights", "gradients", "optimizer", "activations"]
    heads += ["sampler", "cache", "total"]
    rows = []
    for name, shape in MODELS.items():
        for trained in ("LoRA", "full"):
            need = estimate(shape, _setup(shape, lora=trained == "LoRA"))
            parts = (need.weights, need.gradients, need.optimizer, need.activations)
            sampled = need.sampler, need.cache
            rows.append([name, trained, *map(_gb, (*parts, *sampled)), _total(need)])
    return _table(heads, rows)


def _command() -> str:
    """A dry run that estimates a row of the first table, on a machine without the GPU."""
    keys = {
        "model": "Qwen/Qwen3-8B",
        "sampling.max_tokens": LENGTH,
        "rollout.max_sequence_length": LENGTH,
        "backend.lora.r": RANK,
        "backend.max_rows": ROWS,
        "backend.micro_batch_tokens": BASE.tokens,
        "backend.gradient_checkpointing": "true",
        "backend.dtype": "bfloat16",
    }
    lines, line = [], "retrain run scaling.yaml --dry-run"
    for word in (f"{key}={value}" for key, value in keys.items()):
        if len(line) + len(word) > 96:
            lines.append(f"{line} \\")
            line = " "
        line += f" {word}"
    return "```sh\n" + "\n".join([*lines, line]) + "\n```\n"


def _eight() -> str:
    """Seven GPUs that train, and one with vLLM."""
    rows = []
    for name, shape in MODELS.items():
        cells = []
        for lora, sharding in TRAINING.values():
            setup = _setup(shape, lora=lora)
            setup = replace(setup, processes=7, sharding=sharding, local_sampler=False)
            setup = replace(setup, publishes_adapters=lora)
            cells.append(_total(estimate(shape, setup)))
        server = HALF * shape.parameters, ROWS * LENGTH * token_bytes(shape)
        rows.append([name, *cells, " + ".join(map(_gb, server))])
    return _table(["model", *TRAINING, "vLLM: weights + cache"], rows)


def _setup(shape: Shape, *, lora: bool) -> Setup:
    return replace(BASE, lora_parameters=shape.lora(RANK) if lora else 0)


def _total(need: Memory) -> str:
    return f"**{_gb(need.total)}**"


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if size < 9.95 * GB else f"{size / GB:.0f}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---")


if __name__ == "__main__":
    assert GROWTH == 1.5, "the page names this factor"
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
