"""Simulated histories of the pipe: seeded faults, crashes and Ctrl-C, in virtual time.

A history is one run of the real `train()` on the mock engine, from its first start to its end. Its
seed decides the configuration, every latency, every fault of the environment and the rewards, and
when the process crashes or is interrupted; it is resumed until it is complete.

A crash is what the disk holds at that moment: the run directory is copied, and the copy resumed.
Lines that were still buffered are missing in the copy, as after a kill -9.

    python -m tests.chaos.simulation --histories 2000 --seed 0
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.mock_engine import LETTERS, mock_config
from retrain.assembly import Given
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.scoring import Scorer, WeightedReward
from tests.chaos.judgement import judge_credit, judge_faults, judge_log
from tests.chaos.virtual_time import DeadlockError, VirtualLoop, virtual
from tests.chaos.world import Engine, Faulty, Share, World
from tests.pipe_kit import parts_with

STARTS = 12
"""A history that still isn't complete after this many starts is a violation (of P4)."""


@dataclass
class History:
    """One run, from its first start to its end."""

    config: Any
    world: World
    folder: Path
    """The run directory: another one after each crash."""
    met: Counter[str] = field(default_factory=Counter)
    """Crashes, interrupts and faults."""
    ended: str = ""


def play(seed: int, folder: Path) -> History:
    """Play the history of `seed` in `folder`."""
    draw = random.Random(seed)
    target = draw.choice([0, 0, 1, 2, 3])
    config = mock_config(
        folder / "run_0",
        environment={"type": "a label"},
        rewards=[],
        algorithm={"type": "grpo", "group_size": draw.randint(2, 4)},
        staleness={"target": target, "max": target + draw.choice([0, 0, 1, 3])},
        train={
            "total_train_steps": draw.randint(2, 6),
            "groups_per_step": draw.randint(1, 4),
            "order": draw.choice(["ready", "in_order"]),
            "no_signal": draw.choice(["keep", "keep", "refill"]),
            "stop_after_flat_steps": 100,
            "max_failed_groups": 1000,
            "seed": seed,
        },
        rollout={"slots": draw.choice([None, 1, 3])},
        checkpoint={"every": draw.randint(0, 3), "keep": draw.randint(1, 2)},
        deadlines={"setup": 60, "reset": 20, "step": 20, "reward": 20, "close": 10},
    )
    world = World(draw, draw.choice([0.0, 0.02, 0.1]), config.staleness.bound)
    history = History(config, world, folder / "run_0")
    for start in range(1, STARTS + 1):
        history.ended = _start(history, folder / f"run_{start}")
        if history.ended:
            break
    return history


def violations(history: History) -> list[str]:
    """What the history broke, each once; empty when all guarantees held."""
    book, events = judge_log(history.folder, history.config, len(LETTERS))
    wrong = [*history.world.wrong, *book.wrong]
    wrong += judge_faults(history.folder, events, history.world.planted)
    wrong += judge_credit(events, history.world.batches)
    if history.ended != "completed":
        wrong.append(f"P4: the history ended as {history.ended or 'unfinished'!r}")
    elif (found := Checkpoints(history.folder / "checkpoints").newest()) is None:
        wrong.append("P2: there is no checkpoint at the end")
    else:
        ledger = found[1].ledger
        kept = {*ledger["open"], *ledger["again"]}
        if kept != set(book.unfinished()):
            wrong.append(f"P1: {book.unfinished()} are unfinished, the checkpoint has {kept}")
    return list(dict.fromkeys(wrong))


def _start(history: History, copy: Path) -> str:
    """Start or resume the run; returns how the history ended, empty when it goes on.

    A crash leaves its run directory in `copy`.
    """
    draw, world = history.world.draw, history.world
    event = draw.choice(["crash", "interrupt", None, None])
    begins = draw.uniform(1.0, 30.0)
    world.outage = draw.choice([(0.0, 0.0), (begins, begins + draw.uniform(1.0, 60.0))])
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(_train(history))

    def strike() -> None:
        if not task.done() and event is not None:
            history.met[event] += 1
            if event == "crash" and history.folder.exists():
                shutil.copytree(history.folder, copy, symlinks=True)
            task.cancel()

    loop.call_later(draw.uniform(0.0, 8.0 * history.config.train.total_train_steps), strike)
    try:
        loop.run_until_complete(asyncio.wait([task]))
        world.leftovers(len(asyncio.all_tasks(loop) - {task}))
        return _ending(history, task, copy)
    except DeadlockError:
        waiting = Counter(t.get_name().partition("#")[0] for t in asyncio.all_tasks(loop))
        world.wrong.append(f"P4: a deadlock of {dict(waiting)}")
        return "deadlock"
    finally:
        for other in asyncio.all_tasks(loop):
            other.cancel()
        with suppress(DeadlockError):
            loop.run_until_complete(asyncio.sleep(1e7))
        asyncio.set_event_loop(None)
        loop.close()


def _ending(history: History, task: asyncio.Task[str], copy: Path) -> str:
    cause = None if task.cancelled() else task.exception()
    if copy.exists():  # whatever this process did after its crash didn't happen
        history.folder = copy
        history.world.batches.clear()
        return ""
    if task.cancelled():
        return ""
    if cause is not None:
        history.world.wrong.append(f"P5: the run ended by {type(cause).__name__}: {cause!r:.200}")
    return "failed" if cause is not None else task.result()


async def _train(history: History) -> str:
    world = history.world
    config = history.config.model_copy(update={"run_dir": history.folder})
    scorer = Scorer([WeightedReward("share", 1.0, Share(world))], deadlines=config.deadlines)
    given = Given(environment=lambda: Faulty(world), scorer=scorer)
    parts = parts_with(config, Engine(world, config), given)
    started = (history.folder / "events.jsonl").exists()
    return str((await train(config, resume=started, parts=parts, console=False)).status)


def campaign(histories: int, seed: int) -> tuple[dict[int, list[str]], Counter[str]]:
    """Play histories; returns the violations by seed, and what the histories met."""
    found: dict[int, list[str]] = {}
    met: Counter[str] = Counter()
    with virtual():
        for number in range(seed, seed + histories):
            with tempfile.TemporaryDirectory() as folder:
                history = play(number, Path(folder))
                if wrong := violations(history):
                    found[number] = wrong
            met += history.met
            met["fault"] += history.world.planted.total()
    return found, met


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--histories", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)  # the outages of the histories
    started = time.monotonic()
    found, met = campaign(arguments.histories, arguments.seed)
    for seed, wrong in found.items():
        print(f"seed {seed}: " + "; ".join(wrong[:3]))
    shown = ", ".join(f"{count} x {name}" for name, count in met.most_common())
    print(
        f"{arguments.histories - len(found)} of {arguments.histories} histories held ({shown}), "
        f"in {time.monotonic() - started:.0f} s"
    )
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
