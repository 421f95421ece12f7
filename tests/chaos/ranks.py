"""Every loss on two and three ranks against one process, and a rank killed at any moment.

`python -m tests.chaos.ranks --kills N` kills each rank of two N times, half of them while the run
starts, and resumes what is left. `--part 0` plays only these.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch

from retrain.config import load_config
from retrain.losses import LOSSES
from retrain.observe.run_dir import read_metrics
from tests.chaos.judgement import judge_log
from tests.chaos.processes import run_forked
from tests.ranks_kit import CASES, Run, check_equal, launched

ROOT = Path(__file__).parent.parent.parent
QUICKSTART, DATA = ROOT / "configs/quickstart.yaml", ROOT / "data/echo.jsonl"
FREQUENT = ("checkpoint.every=5",)
LATEST_SECONDS = (8.0, 3.0)
"""How long after the start of the follower, or after the first step, a rank is killed at most."""


async def matrix(folder: Path, part: float) -> tuple[int, list[str]]:
    """How many cases were played, and those that differ."""
    cases = [(name, *how) for name in CASES for how in ((3, "none"), (2, "full"))]
    wrong = []
    async with launched(3, folder):
        played = cases[: max(1, round(len(cases) * part))]
        for name, processes, sharding in played:
            try:
                await check_equal(name, processes, sharding)
            except Exception as error:  # noqa: BLE001 - a violated guarantee, whatever it is
                wrong.append(f"{name} on {processes} ranks, sharding {sharding}: {error}")
    return len(played), wrong


@dataclass
class Kill:
    """A run of two processes of which one is killed; then one process resumes it."""

    rank: int
    trains: bool
    """Whether it is killed after its first step; else while it starts."""
    moment: float
    """Seconds after the start of the follower, or after the first step."""
    step: int = 0
    """The last step before the kill."""
    code: int | None = None
    seconds: float = 0.0
    """From the kill to the end of both."""
    wrong: list[str] = field(default_factory=list)

    def play(self, folder: Path) -> None:
        try:
            self._kill(Run(folder, *FREQUENT))
            self._resume(folder)
        except (Exception, AssertionError) as error:  # noqa: BLE001 - the same
            self.wrong.append(str(error))

    def _kill(self, run: Run) -> None:
        try:
            run.until_it_trains() if self.trains else run.until_it_starts()
            time.sleep(self.moment)
            started = time.monotonic()
            (run.followers[0] if self.rank else run.process).kill()
            self.code = run.end()
            self.seconds = time.monotonic() - started
        finally:
            run.process.kill()
        said = "rank 1 of 2" in run.output and "SIGKILL" in run.output
        held = self.code == 1 and said if self.rank else self.code == -signal.SIGKILL
        if not held:
            self.wrong.append(f"exit code {self.code}: {run.output[-300:]}")

    def _resume(self, folder: Path) -> None:
        """Nothing was lost or trained twice, and the run completes."""
        if not (folder / "events.jsonl").exists():
            return
        self.step = len(read_metrics(folder))
        keys = [*FREQUENT, f"train.total_train_steps={self.step + 3}"]
        log = folder.with_suffix(".txt")
        code = run_forked(["quickstart", *keys, "--run-dir", str(folder), "--resume"], log)
        if code:
            self.wrong.append(f"the resume ended with {code}: {log.read_text()[-300:]}")
            return
        config = load_config(QUICKSTART, keys)
        book, _ = judge_log(folder, config, len(DATA.read_text().splitlines()))
        self.wrong += book.wrong

    def __str__(self) -> str:
        when = f"{'training' if self.trains else 'starting'} {self.moment:5.2f} s"
        held = "; ".join(self.wrong) or "held"
        return f"rank {self.rank}  {when}  step {self.step:3}  {self.seconds:5.1f} s  {held}"


def kills(folder: Path, each: int, rng: random.Random) -> list[Kill]:
    """Kill each rank `each` times, half of them while the run starts."""
    played = [
        Kill(rank, trains, rng.uniform(0, LATEST_SECONDS[trains]))
        for rank in range(2)
        for trains in (number % 2 == 1 for number in range(each))
    ]
    for number, kill in enumerate(played):
        kill.play(folder / f"run_{number}")
        print(kill, flush=True)
    return played


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.ranks", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=2, help="of each rank")
    parser.add_argument("--part", type=float, default=1.0, help="of the cases; 0: only kills")
    arguments = parser.parse_args()
    started, rng = time.monotonic(), random.Random(arguments.seed)
    for loss in LOSSES:
        CASES.setdefault(loss, (loss, {}, {}))
    with tempfile.TemporaryDirectory() as name:
        played = kills(Path(name), arguments.kills, rng)  # first: they fork
        wrong = [str(kill) for kill in played if kill.wrong]
        count = len(played)
        if arguments.part:
            cases, found = asyncio.run(matrix(Path(name), arguments.part))
            count, wrong = count + cases, wrong + found
    print("\n".join(wrong), end="\n" * bool(wrong))
    seconds = time.monotonic() - started
    print(f"{count - len(wrong)} of {count} cases of several ranks held, in {seconds:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    import trl  # noqa: F401 - loaded once, for all forks

    torch.set_num_threads(1)
    sys.exit(main())
