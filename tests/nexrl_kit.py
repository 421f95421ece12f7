"""What the examples of NexRL's pages share: rows, trajectories, and files of a workspace."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from retrain.trainer.nexrl import Trajectory

ROWS = [{"prompt": f"{letter}=", "answer": letter * 2} for letter in "abcd"]

REST = f"""
model: tiny
prompts: {json.dumps(ROWS)}
environment: echo
rewards: [{{type: slot_match}}]
sampling: {{max_tokens: 2}}
train: {{groups_per_step: 2}}
"""
"""The rest of a recipe: what is trained on, small."""


def write(path: str, text: str) -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    return file


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def text_trajectories() -> list[Trajectory]:
    """Two prompts with two replies each, as the page shows a trajectory."""
    return [
        Trajectory(prompt=f"{p}=", response=r, reward=float(p == r[0]), run_id=f"uid_{p}_run_0")
        for p in "ab"
        for r in ("aa", "bb")
    ]


LOCAL = {"backend": "tinker", "url": "local"}


def replies() -> list[Trajectory]:
    """Two groups of two replies, none of them sampled."""
    return [
        Trajectory(prompt=f"{p}=", response=r, reward=float(p == r[0]), group_id=p, run_id=i)
        for p in "ab"
        for i, r in enumerate(("aa", "bb"))
    ]
