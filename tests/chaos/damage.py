"""Damaged runs: what a crash, a full disk or a person did to a run directory, and what follows.

Each row damages the directory of a run that stopped at step 4 (checkpoints at 3 and 4), and resumes
it to step 6; or damages it while the run goes on.

    python -m tests.chaos.damage [PART OF A NAME ...]
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from retrain.observe.callbacks import Callback
from retrain.pipeline.checkpoint import FORMAT
from tests.chaos.judgement import judge_log
from tests.chaos.processes import play_table, run_forked

CONFIG: dict[str, Any] = {
    "model": "tiny",
    "prompts": {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in "abcdefgh"]},
    "rewards": ["slot_match"],
    "algorithm": {"type": "grpo", "group_size": 2},
    "backend": {"type": "benchmarks.mock_engine:MockOptions"},
    "sampling": {"max_tokens": 4},
    "chat": {"template": "none"},
    "staleness": {"target": 1},
    "train": {"total_train_steps": 4, "groups_per_step": 2, "stop_after_flat_steps": 100},
    "checkpoint": {"every": 1, "keep": 2},
}


@dataclass(frozen=True)
class Damage:
    """A row of the table."""

    name: str
    do: Callable[[Path], Any]
    """Damages the run directory."""
    code: int = 0
    """The exit code afterwards."""
    words: str = ""
    """A regular expression for the output."""
    live: bool = False
    """The damage is done in the running process, after step 2, instead of before a resume."""


def newest(run: Path) -> Path:
    return run / "checkpoints" / "step_4"


def manifest(text: str) -> Callable[[Path], Any]:
    return lambda run: (newest(run) / "manifest.json").write_text(text)


def files(text: str) -> Callable[[Path], Any]:
    """A manifest of this format that lists `text`."""
    return lambda run: manifest(json.dumps({"format": FORMAT})[:-1] + f', "files": {text}}}')(run)


def truncate(name: str) -> Callable[[Path], Any]:
    return lambda run: os.truncate(newest(run) / name, 5)


def all_torn(run: Path) -> None:
    for file in (run / "checkpoints").glob("step_*/manifest.json"):
        file.unlink()


def add(name: str, text: str = "") -> Callable[[Path], Any]:
    def do(run: Path) -> None:
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text(text)

    return do


def append(name: str, data: bytes) -> Callable[[Path], Any]:
    def do(run: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(data)

    return do


def blocked_by_a_file(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").write_text("")


def unreadable_state(run: Path) -> None:
    """A run.json that is no checkpoint, with a manifest that fits it."""
    from retrain.pipeline.checkpoint import _digest

    state, listed = newest(run) / "run.json", newest(run) / "manifest.json"
    state.write_text("[]")
    entries = json.loads(listed.read_text())
    entries["files"]["run.json"] = [2, _digest(state)]
    listed.write_text(json.dumps(entries))


STEP_4 = "step_4"
"""The output names the checkpoint that is skipped."""
DAMAGES = [
    Damage("nothing", lambda run: None),
    Damage("no manifest", lambda run: (newest(run) / "manifest.json").unlink(), words=STEP_4),
    Damage("an empty manifest", manifest(""), words=STEP_4),
    Damage("a manifest of null", manifest("null"), words=STEP_4),
    Damage("a manifest of a list", manifest("[]"), words=STEP_4),
    Damage("files as a list", files('["a"]'), words=STEP_4),
    Damage("files as null", files("null"), words=STEP_4),
    Damage("a number per file", files('{"run.json": 3}'), words="step_4"),
    Damage("a deep manifest", manifest("[" * 100_000), words=STEP_4),
    Damage("a path outside", files('{"../../x": [1, "a"]}'), words="step_4"),
    Damage("a short run.json", truncate("run.json"), words=STEP_4),
    Damage("a short weight file", truncate("adapter/skill.txt"), words=STEP_4),
    Damage(
        "no weight file", lambda run: (newest(run) / "adapter/skill.txt").unlink(), words="step_4"
    ),
    Damage("an unreadable run.json", unreadable_state, words=STEP_4),
    Damage("another format", manifest('{"format": 99, "files": {}}'), 1, "format 99"),
    Damage("a folder step_²", lambda run: (run / "checkpoints/step_²").mkdir()),
    Damage("a folder step_x", lambda run: (run / "checkpoints/step_x").mkdir()),
    Damage("a file step_9", add("checkpoints/step_9")),
    Damage("a partial checkpoint", add("checkpoints/.step_21.partial/run.json")),
    Damage("a temporary file", add("config.yaml.tmp")),
    Damage(
        "all checkpoints torn", all_torn, 1, r"checkpoint.*(start over|new run|--run-dir|delete)"
    ),
    Damage(
        "no checkpoints folder", lambda run: shutil.rmtree(run / "checkpoints"), 1, "checkpoint"
    ),
    Damage("a short last event", append("events.jsonl", b'{"event": "iss')),
    Damage("zeros after the events", append("events.jsonl", b"\0" * 4096)),
    Damage("a short last row", append("metrics.jsonl", b'{"step": 5, "lo')),
    Damage("no metrics.jsonl", lambda run: (run / "metrics.jsonl").unlink()),
    Damage("no rollouts.jsonl", lambda run: (run / "rollouts.jsonl").unlink()),
    Damage("no config.yaml", lambda run: (run / "config.yaml").unlink()),
    Damage("an empty best link", lambda run: (run / "checkpoints/best").symlink_to("step_99")),
    Damage(
        "the run directory deleted", shutil.rmtree, 1, "run directory|deleted|No such", live=True
    ),
    Damage("checkpoints is a file", blocked_by_a_file, 1, "checkpoint", live=True),
    Damage(
        "events.jsonl deleted", lambda run: (run / "events.jsonl").unlink(), 1, "events", live=True
    ),
]
BY_NAME = {damage.name: damage for damage in DAMAGES}


class Vandal(Callback):
    """Does the damage after step 2."""

    def __init__(self, damage: str) -> None:
        self.damage = BY_NAME[damage]

    def on_step_end(self, trainer: Any, step: int, metrics: Any) -> None:
        if step == 2:
            self.damage.do(trainer.run_dir.path)


def play(damage: Damage, folder: Path) -> list[str]:
    """Damage a run, resume it, and return what went wrong."""
    home = folder / re.sub(r"\W+", "_", damage.name)
    home.mkdir()
    loggers = [{"type": "tests.chaos.damage:Vandal", "damage": damage.name}] if damage.live else []
    sections = {**CONFIG, **({"loggers": loggers} if loggers else {})}
    (home / "run.yaml").write_text(yaml.safe_dump(sections))
    run_dir, log = home / "run", home / "log.txt"
    argv = [str(home / "run.yaml"), "--run-dir", str(run_dir)]
    code = run_forked(argv, log)
    if not damage.live:
        damage.do(run_dir)
        log.write_text("")
        code = run_forked([*argv, "--resume", "train.total_train_steps=6"], log)
    said = log.read_text(errors="replace")
    wrong = []
    if code != damage.code or "Traceback" in said:
        wrong.append(f"exit code {code}, expected {damage.code}: {said[-400:]}")
    if not re.search(damage.words, said, re.DOTALL):
        wrong.append(f"the output has no {damage.words!r}: {said[-400:]}")
    if not code:
        wrong += _complete(run_dir)
    return wrong


def _complete(run_dir: Path) -> list[str]:
    from retrain.config import load_config

    config = load_config(run_dir.parent / "run.yaml")
    book, _ = judge_log(run_dir, config, rows=8)
    hidden = [p.name for p in run_dir.rglob("*") if p.name.endswith((".partial", ".tmp"))]
    wrong = [*book.wrong, *(f"left behind: {name}" for name in hidden)]
    return wrong if book.step == 6 else [*wrong, f"{book.step} steps, expected 6"]


if __name__ == "__main__":
    sys.exit(play_table(DAMAGES, play, "kinds of damage"))
