"""Writes the tables of scaling.md, and the command for them: `python docs/scaling.py`.

The figures are those of the estimate that a run prints. The text outside the marks is written by
hand and kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from retrain.adapters.trl.memory import HALF, Needs, Shape
from retrain.adapters.trl.options import TrlOptions
from retrain.config import parse_config

PAGE = Path(__file__).with_suffix(".md")
BLOCK = re.compile(r"(<!-- table: (\w+), by docs/scaling\.py -->\n).*?(<!-- end -->)", re.DOTALL)
GB = 1e9


def _shape(vocabulary: int, hidden: int, layers: int, keys: int, **others: Any) -> Shape:
    sizes = {"vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers}
    return Shape(
        {**sizes, "num_attention_heads": 32, "num_key_value_heads": keys, "head_dim": 128, **others}
    )


MODELS: Mapping[str, Shape] = {
    "1 B (Llama-3.2-1B)": _shape(
        128256, 2048, 16, 8, head_dim=64, intermediate_size=8192, tie_word_embeddings=True
    ),
    "4 B (Qwen3-4B)": _shape(151936, 2560, 36, 8, intermediate_size=9728, tie_word_embeddings=True),
    "8 B (Qwen3-8B)": _shape(151936, 4096, 36, 8, intermediate_size=12288),
    "30 B (Qwen3-30B-A3B)": _shape(
        151936, 2048, 48, 4, moe_intermediate_size=768, num_experts=128, num_experts_per_tok=8
    ),
}
RANK, ROWS, LENGTH = 16, 64, 2_048
CONFIG = parse_config(
    {
        "prompts": [],
        "sampling": {"max_tokens": LENGTH},
        "rollout": {"max_sequence_length": LENGTH},
        "staleness": {"target": 1},
        "train": {"groups_per_step": 8},
    }
)
SERVED = {"processes": 7, "sampler": {"type": "vllm", "url": "http://localhost:8000"}}
LORA = {"lora": {"r": RANK}}
TRAINING: Mapping[str, Mapping[str, Any]] = {
    "LoRA, `sharding: none`": {**LORA, "sharding": "none"},
    "LoRA, `sharding: full`": {**LORA, "sharding": "full"},
    "full weights, `sharding: none`": {"sharding": "none"},
    "full weights, `sharding: full`": {"sharding": "full"},
}


def page(present: str) -> str:
    """The page with new tables; `present` is its current text."""
    tables = {"one": _one(), "command": _command(), "eight": _eight()}
    assert [found[2] for found in BLOCK.finditer(present)] == list(tables), "a mark is missing"
    return BLOCK.sub(lambda found: found[1] + tables[found[2]] + found[3], present)


def _one() -> str:
    """One GPU for training and sampling."""
    names = ("weights", "optimizer", "activations", "publishing", "sampler", "cache")
    rows = []
    for name, shape in MODELS.items():
        for trained, keys in (("LoRA", LORA), ("full", {})):
            parts = _parts(shape, keys)
            sizes = [_gb(parts[part]) if part in parts else "-" for part in names]
            rows.append([name, trained, *sizes, _total(parts)])
    return _table(["model", "trained", *names, "total"], rows)


def _command() -> str:
    """A dry run that estimates a row of the first table, on a machine without the GPU."""
    return (
        "```text\nretrain run scaling.yaml --dry-run backend.device=cuda model=Qwen/Qwen3-8B \\\n"
        f"  sampling.max_tokens={LENGTH} rollout.max_sequence_length={LENGTH} "
        f"backend.max_rows={ROWS}\n```\n"
    )


def _eight() -> str:
    """Seven GPUs that train, and one with vLLM."""
    rows = []
    for name, shape in MODELS.items():
        cells = [_total(_parts(shape, {**SERVED, **keys})) for keys in TRAINING.values()]
        keys_and_values = 2 * HALF * shape.layers * shape.kv_heads * shape.head_size
        server = HALF * shape.parameters, ROWS * LENGTH * keys_and_values
        rows.append([name, *cells, " + ".join(map(_gb, server))])
    return _table(["model", *TRAINING, "vLLM: weights + cache"], rows)


def _parts(shape: Shape, keys: Mapping[str, Any]) -> dict[str, int]:
    options = TrlOptions.model_validate({"max_rows": ROWS, **keys})
    return Needs(shape, options, CONFIG, cuda=True).parts()


def _total(parts: Mapping[str, int]) -> str:
    return f"**{_gb(sum(parts.values()))}**"


def _gb(size: float) -> str:
    return f"{size / GB:.1f}" if size < 9.95 * GB else f"{size / GB:.0f}"


def _table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    heads = list(heads)
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines).replace("| --- ", "|---")


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
