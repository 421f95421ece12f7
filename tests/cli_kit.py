"""The command in another process, and the events of its run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import retrain

ROOT = Path(retrain.__file__).resolve().parent.parent


CONFIG = """
prompts: [{prompt: a=, answer: aaaa}, {prompt: b=, answer: bbbb}]
environment: single_turn
rewards: slot_match
algorithm: {type: grpo, group_size: 4}
backend: benchmarks.mock_engine:MockOptions
sampling: {max_tokens: 4}
chat: none
train: {total_train_steps: 3, groups_per_step: 2}
"""


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
