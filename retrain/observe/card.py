"""The model card of an exported model, from the run's own records."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.config import RunConfig
from retrain.config.paths import is_hub_id
from retrain.observe.callbacks import tenths
from retrain.observe.progress import evaluation
from retrain.observe.run_dir import resolved


def model_card(
    config: RunConfig,
    history: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
    model: Path,
) -> str:
    """A README.md in the form of the Hugging Face Hub for the exported folder `model`."""
    adapters = (model / "adapter_config.json").exists()
    hub = is_hub_id(config.model, config.base_dir)
    base = config.model if hub else Path(config.model).name  # no folder: the card may be published
    rows = "".join(
        f"| {name} | {value} |\n" for name, value in _facts(config, history, evaluations)
    )
    return f"""\
---
{_metadata(config, adapters, hub)}
---
# {config.name or model.parent.name}

{"LoRA weights for" if adapters else "A model trained from"} `{base}` with `retrain`.

| key | value |
|---|---|
{rows}
`config.yaml` in the run directory contains every key, and `metrics.jsonl` every step.
"""


def _metadata(config: RunConfig, adapters: bool, hub: bool) -> str:
    """The YAML that the Hub reads."""
    library = "peft" if adapters else "transformers"
    base = [f"base_model: {config.model}"] if hub else []
    tags = ["tags:", "  - retrain", f"  - {_public(config.algorithm.type)}"]
    return "\n".join([f"library_name: {library}", "pipeline_tag: text-generation", *base, *tags])


def _facts(
    config: RunConfig,
    history: Sequence[Mapping[str, float]],
    evaluations: Sequence[Mapping[str, float]],
) -> Iterator[tuple[str, object]]:
    shown = resolved(config)
    yield "algorithm", _plugin({"type": config.algorithm.type})
    yield "steps", len(history)
    yield "seed", config.train.seed
    yield "prompts", _plugin(shown["prompts"])
    if shown["rewards"]:
        yield "environment", _plugin(shown["environment"])
    for reward in shown["rewards"]:
        yield "reward", _plugin(reward)
    yield "backend", _plugin(shown["backend"])
    first, last = tenths(history)
    if not math.isnan(first):
        yield "mean reward, first tenth of the steps", f"{first:.3f}"
        yield "mean reward, last tenth of the steps", f"{last:.3f}"
    for row in evaluations[-1:]:
        yield f"evaluation of step {row['eval/step']:.0f}", evaluation(row)


def _plugin(section: Mapping[str, Any]) -> str:
    """The type, and the keys that are set, on one line of a table."""
    short = _public({key: value for key, value in section.items() if value is not None})
    name = short.pop("type")
    text = json.dumps(short, ensure_ascii=False) if short else ""
    return f"`{name}` {text}".strip().replace("|", "\\|")


def _public(value: Any) -> Any:  # any: JSON values
    """`value` without folders of this machine and without rows of data."""
    if isinstance(value, Mapping):
        return {
            key: f"{len(inner)} rows"
            if isinstance(inner, list) and key in ("rows", "sources")
            else _public(inner)
            for key, inner in value.items()
        }
    if isinstance(value, list):
        return [_public(inner) for inner in value]
    return os.path.basename(value) if isinstance(value, str) and os.path.isabs(value) else value
