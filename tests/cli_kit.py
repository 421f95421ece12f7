"""The command in another process, and the events of its run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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


def written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run without a model, in `folder`, which becomes the working directory."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    path = folder / "task.yaml"
    path.write_text(CONFIG)
    return path


def events(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
