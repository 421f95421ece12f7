"""Writes the table of seats.md: `python docs/seats.py [RUN_DIR ...]`.

The folders are those of runs of configs/nim.yaml with the seeds 0, 1 and 2; without them, the
script does these runs, which takes some minutes. The text outside the marks is kept.
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from retrain.config import load_config
from retrain.observe.run_dir import read_metrics
from retrain.pipeline import train

PAGE = Path(__file__).with_suffix(".md")
CONFIG = PAGE.parent.parent / "configs" / "nim.yaml"
BLOCK = re.compile(r"(<!-- table: wins, by docs/seats\.py -->\n).*?(<!-- end -->)", re.DOTALL)
SEEDS = range(3)


def page(present: str, wins: Sequence[dict[int, float]]) -> str:
    """The page with the shares of games won by step, one for each seed; `present` is its text."""
    rows = ["| steps | " + " | ".join(f"seed {seed}" for seed in SEEDS) + " | mean |"]
    rows.append("|---" * (len(SEEDS) + 2) + "|")
    for step in wins[0]:
        shares = [by_step[step] for by_step in wins]
        shown = [f"{100 * share:.0f}" for share in (*shares, fmean(shares))]
        rows.append(f"| {step} | {' | '.join(shown)} |")
    return BLOCK.sub(lambda found: "\n".join([found[1].rstrip(), *rows, found[2]]), present)


def wins_of(run_dir: Path) -> dict[int, float]:
    """The share of games won in each evaluation: the reward is 1 for a win, else -1."""
    rows = [row for row in read_metrics(run_dir) if "eval/step" in row]
    return {int(row["eval/step"]): (1 + row["eval/reward/mean"]) / 2 for row in rows}


def played(folder: Path) -> list[Path]:
    """The folders of new runs."""
    found = [folder / f"nim_{seed}" for seed in SEEDS]
    for seed, run_dir in zip(SEEDS, found, strict=True):
        config = load_config(CONFIG, [f"train.seed={seed}", f"run_dir={run_dir}"])
        asyncio.run(train(config, console=False))
    return found


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(name) for name in sys.argv[1:]] or played(Path(folder))
        shares = [wins_of(run_dir) for run_dir in folders]
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), shares), encoding="utf-8")
