"""Every loss on two and three ranks against one process, and a rank killed at any moment.

The trainers of runs and of the service. `python -m tests.chaos.ranks --kills N` kills N runs of two
processes, either of the two in turn.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.losses import LOSSES
from retrain.service.bodies import TINKER_LOSSES
from tests.ranks_kit import CASES, Run, check_equal, launched
from tests.service_kit import in_process
from tests.test_service_ranks import check_end, check_loss

LATEST_SECONDS = 15.0
"""How long after the start of the follower a rank is killed at the latest: it trains by then."""


async def matrix(folder: Path, part: float) -> tuple[int, list[str]]:
    """How many cases were played, and those that differ."""
    cases = [(name, *how) for name in CASES for how in ((3, "none"), (2, "full"))]
    wrong = []
    async with launched(3, folder):
        played = cases[: max(1, round(len(cases) * part))]
        for name, processes, sharding in played:
            try:
                await check_equal(name, processes, sharding)
            except Exception as error:  # noqa: BLE001 - a broken promise, whatever it is
                wrong.append(f"{name} on {processes} ranks, sharding {sharding}: {error}")
    return len(played), wrong


async def service_matrix(folder: Path, part: float) -> tuple[int, list[str]]:
    """The same of the service's trainer, and an interrupt."""
    losses = list(TINKER_LOSSES)[: max(1, round(len(TINKER_LOSSES) * part))]
    base, wrong = load_model(tiny_folder()).requires_grad_(False), []
    for processes, sharding in ((3, "none"), (2, "full")):
        settings = {"processes": processes, "sharding": sharding}
        async with in_process(folder / sharding, **settings) as tinker:
            service = tinker.app.service
            for loss in losses:
                try:
                    await service.on_engine(
                        lambda loss=loss: check_loss(service, base, loss, sharding)  # noqa: B023
                    )
                except (Exception, AssertionError) as error:  # noqa: BLE001 - the same
                    wrong.append(f"service, {loss} on {processes} ranks, {sharding}: {error}")
    try:
        check_end(folder / "interrupted", lost=False)
    except (Exception, AssertionError) as error:  # noqa: BLE001 - the same
        wrong.append(f"service, interrupted: {error}")
    return 2 * len(losses) + 1, wrong


def killed(folder: Path, leader: bool, moment: float) -> str:
    """What went wrong with a run of which a rank is killed; empty if nothing did."""
    run = Run(folder)
    try:
        run.until_it_starts()
        time.sleep(moment)
        victim = run.process if leader else run.followers[0]
        victim.kill()
        code = run.end()
    except (Exception, AssertionError) as error:  # noqa: BLE001 - the same
        return str(error)
    finally:
        run.process.kill()
    if leader:
        return "" if code == -signal.SIGKILL else f"exit code {code}"
    said = "rank 1 of 2" in run.output and "SIGKILL" in run.output
    return "" if code == 1 and said else f"exit code {code}: {run.output[-300:]}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.ranks", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=4)
    parser.add_argument("--part", type=float, default=1.0, help="of the cases")
    arguments = parser.parse_args()
    started, rng = time.monotonic(), random.Random(arguments.seed)
    for loss in LOSSES:
        CASES.setdefault(loss, (loss, {}, {}))
    with tempfile.TemporaryDirectory() as name:
        count, wrong = asyncio.run(matrix(Path(name), arguments.part))
        more, different = asyncio.run(service_matrix(Path(name), arguments.part))
        count, wrong = count + more, wrong + different
        for number in range(arguments.kills):
            leader, moment = number % 2 == 0, rng.uniform(0, LATEST_SECONDS)
            problem = killed(Path(name) / f"run_{number}", leader, moment)
            if problem:
                who = "rank 0" if leader else "rank 1"
                wrong.append(f"{who} killed after {moment:.2f} s: {problem}")
    print("\n".join(wrong), end="\n" * bool(wrong))
    whole = count + arguments.kills
    seconds = time.monotonic() - started
    print(f"{whole - len(wrong)} of {whole} cases of several ranks held, in {seconds:.0f} s")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
