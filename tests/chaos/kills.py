"""The kill campaign: real runs, killed at named points with SIGKILL, resumed and judged.

Each case is one run of one variant. Its first process is killed at a point that the seed chooses,
some of its resumes too, and the last one completes the run. A case holds when no prompt was lost or
trained twice, every step and evaluation is logged once, each evaluation is of one version of the
weights (P15), and `best` is right. Where the
documentation promises the same numbers as without an interruption (`Variant.exact`), losses,
evaluations, `best` and the final weights are compared with those of an uninterrupted run.

    python -m tests.chaos.kills --kills 60 --seed 0

A process is forked from this one, which has loaded torch and trl: a start costs a second, not ten.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

from retrain.config import load_config
from retrain.observe.journal import read_lines
from retrain.observe.run_dir import RunDirectory
from retrain.scoring import reward
from tests.chaos.judgement import judge_log
from tests.chaos.processes import beside, run_forked

ROOT = Path(__file__).parent.parent.parent
LETTERS = "abcdefgh"
STEPS, EVERY, EVALUATE = 8, 2, 3
MOST_STARTS = 6
EVENTS = (
    "issued", "rollout", "batch", "update", "publish", "snapshot", "checkpoint", "eval", "end",
)  # fmt: skip
DISK = ["fsync", "rename", "replace", "rmtree", "unlink", "write"]
BASE: dict[str, Any] = {
    "model": "tiny",
    "prompts": {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in LETTERS]},
    "eval": {
        "prompts": {"type": "list", "rows": [{"prompt": "c=", "answer": "cccc"}]},
        "every": EVALUATE,
        "samples": 4,
    },
    "rewards": ["tests.chaos.kills:even_letters"],
    "algorithm": {"type": "grpo", "group_size": 4},
    "sampling": {"max_tokens": 4},
    "staleness": {"target": 0},
    "train": {"total_train_steps": STEPS, "groups_per_step": 2, "order": "in_order"},
    "checkpoint": {"every": EVERY, "keep": 2},
}
RATE = {"learning_rate": 2.0e-3}
TALKS = [{"prompt": f"{c}=", "answer": c * 4} for c in LETTERS]


@reward
def even_letters(completion: str) -> float:
    """Every completion gets some reward, so that each step has a gradient."""
    return sum(ord(letter) % 2 == 0 for letter in completion) / max(1, len(completion))


@dataclass(frozen=True)
class Variant:
    """A kind of run, as changes of BASE."""

    changes: Mapping[str, Any]
    exact: float | None = None
    """How close a resumed run is to an uninterrupted one (0: equal); None is not promised."""


VARIANTS: dict[str, Variant] = {
    "trl": Variant({"backend": {"type": "trl", **RATE}}, exact=0.0),
    "trl_async": Variant(
        {
            "backend": {"type": "trl", **RATE},
            "staleness": {"target": 2, "max": 4},
            "train": {"total_train_steps": STEPS, "groups_per_step": 2},
        }
    ),
    "trl_lora": Variant({"backend": {"type": "trl", "lora": {"r": 4}, **RATE}}, exact=0.0),
    "tinker": Variant({"backend": {"type": "tinker", "url": "local", **RATE}}, exact=1e-3),
    "weaver": Variant({"backend": {"type": "weaver", "url": "local", **RATE}}, exact=1e-3),
    "sft": Variant(
        {
            "backend": {"type": "trl", **RATE},
            "algorithm": {"type": "sft"},
            "rewards": [],
            "sampling": {},
            "staleness": {},
            "eval": {"prompts": {"type": "list", "rows": TALKS[:2]}, "every": EVALUATE},
        },
        exact=0.0,
    ),
}


@dataclass
class Case:
    """One run that is killed and resumed until it is complete."""

    variant: str
    folder: Path
    points: Sequence[str]
    """Where each process is killed, in turn; the ones after the last are not killed."""
    codes: list[int] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def kills(self) -> int:
        return self.codes.count(-signal.SIGKILL)


# --- one process


def play(case: Case) -> None:
    """Start and resume the run of a case until it ends by itself."""
    case.folder.mkdir(parents=True)
    (case.folder / "run.yaml").write_text(yaml.safe_dump(sections(case.variant)))
    for start in range(MOST_STARTS):
        point = case.points[start] if start < len(case.points) else ""
        case.codes.append(_start(case, point))
        if case.codes[-1] != -signal.SIGKILL:
            return


def _start(case: Case, point: str) -> int:
    """Start or resume the run; the process kills itself at `point`."""
    log = case.folder / "log.txt"
    with log.open("a") as file:
        file.write(f"--- killed at: {point or 'nowhere'}\n")
    resume = ["--resume"] if (case.run_dir / "events.jsonl").exists() else []
    argv = [str(case.folder / "run.yaml"), "--run-dir", str(case.run_dir), *resume]
    return run_forked(argv, log, before=partial(arm, point, case.run_dir), limit=180.0)


def sections(variant: str) -> dict[str, Any]:
    """The config of a variant, as a YAML file has it."""
    merged = {**BASE, **VARIANTS[variant].changes}
    return {key: value for key, value in merged.items() if value not in ({}, [])}


def arm(point: str, run_dir: Path) -> None:
    """Kill this process at the nth occurrence of a point: `event update 3`, `disk rename 2`.

    Calls to the disk count only for files of the run directory; the kill comes before the call.
    """
    if not point:
        return
    kind, name, nth = point.split()
    left = int(nth)

    def count() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    if kind == "event":
        logged = RunDirectory.event

        def event(self: RunDirectory, kind: str, /, **fields: object) -> None:
            logged(self, kind, **fields)
            if kind == name:
                count()

        mock.patch.object(RunDirectory, "event", event).start()
        return
    module, attribute = {
        "write": (Path, "write_text"),
        "rmtree": (shutil, "rmtree"),
    }.get(name, (os, name))
    original = getattr(module, attribute)

    def call(*args: Any, **keys: Any) -> Any:
        if name == "fsync" or any(str(run_dir) in str(a) for a in args):
            count()
        return original(*args, **keys)

    mock.patch.object(module, attribute, call).start()


# --- the judgement


def judge(case: Case, reference: Case) -> None:
    """Add what is wrong with a case that has ended to `wrong`."""
    if case.codes[-1] != 0:
        text = (case.folder / "log.txt").read_text(errors="replace").splitlines()[-1:]
        case.wrong.append(f"exit code {case.codes[-1]}: {text}")
        return
    config = load_config(case.folder / "run.yaml")
    book, events = judge_log(case.run_dir, config, len(LETTERS))
    case.wrong += book.wrong
    if book.step != STEPS:
        case.wrong.append(f"{book.step} steps, expected {STEPS}")
    case.wrong += _each_once(case.run_dir, events)
    case.wrong += _leftovers(case.run_dir)
    exact = VARIANTS[case.variant].exact
    if exact is not None and case is not reference:
        case.wrong += _differences(case.run_dir, reference.run_dir, exact)


def _each_once(run_dir: Path, events: Sequence[Mapping[str, Any]]) -> list[str]:
    """The plain lines of the files hold each step, evaluation and rollout once."""
    wrong = []
    rows = list(read_lines(run_dir / "metrics.jsonl"))
    steps = [row["step"] for row in rows if "loss" in row]
    if steps != list(range(1, STEPS + 1)):
        wrong.append(f"metrics.jsonl has the steps {steps}")
    wanted = sorted({*range(0, STEPS + 1, EVALUATE), STEPS})
    if (got := [row["eval/step"] for row in rows if "eval/step" in row]) != wanted:
        wrong.append(f"metrics.jsonl has the evaluations {got}, expected {wanted}")
    if (got := [e["eval/step"] for e in events if e["event"] == "eval"]) != wanted:
        wrong.append(f"events.jsonl has the evaluations {got}, expected {wanted}")
    version_of = {row["eval/step"]: row["eval/version"] for row in rows if "eval/step" in row}
    rollouts = run_dir / "rollouts.jsonl"
    for line in read_lines(rollouts):
        held_out, own = line["ticket"].startswith("-1"), version_of.get(line["step"])
        if held_out and set(line["versions"]) != {own}:
            wrong.append(f"P15: evaluation {line['step']} of {own} has {line['versions']}")
    lines = Counter(
        (line["ticket"], line["index"], line["step"] if line["ticket"].startswith("-1") else None)
        for line in read_lines(rollouts)
    )
    if twice := [key for key, count in lines.items() if count > 1]:
        wrong.append(f"rollouts.jsonl has {len(twice)} rollouts twice: {twice[:3]}")
    return wrong


def _leftovers(run_dir: Path) -> list[str]:
    """Temporary files that no process will finish."""
    names = [p.name for p in (run_dir / "checkpoints").iterdir()]
    return [f"left behind: {n}" for n in names if n.endswith((".partial", ".tmp"))]


def _differences(run_dir: Path, reference: Path, exact: float) -> list[str]:
    """Where a resumed run differs from an uninterrupted one by more than `exact`."""
    wrong = []
    ours, theirs = (list(read_lines(d / "metrics.jsonl")) for d in (run_dir, reference))
    for key in ("loss", "grad_norm", "reward/mean", "eval/reward/mean", "eval/loss"):
        a, b = ([row[key] for row in rows if key in row] for rows in (ours, theirs))
        if len(a) != len(b) or any(abs(x - y) > exact for x, y in zip(a, b, strict=True)):
            wrong.append(f"{key}: {a}, uninterrupted {b}")
    marks = [
        os.path.basename(os.path.realpath(d / "checkpoints" / "best")) for d in (run_dir, reference)
    ]
    if marks[0] != marks[1]:
        wrong.append(f"best is {marks[0]}, uninterrupted {marks[1]}")
    if exact == 0.0:
        files = sorted((reference / "final").glob("*.safetensors"))
        wrong += [
            f"the weights in final/{file.name} differ"
            for file in files
            if file.read_bytes() != (run_dir / "final" / file.name).read_bytes()
        ]
    return wrong


# --- the campaign


def points(draw: random.Random, number: int) -> list[str]:
    """Where the processes of the case `number` are killed: every kind of point in turn."""
    kinds = [f"event {name}" for name in EVENTS] + [f"disk {name}" for name in DISK]
    chosen = [kinds[number % len(kinds)]]
    chosen += draw.choices(kinds, k=draw.choice([0, 0, 1, 2]))
    return [f"{kind} {draw.randint(1, 4 if 'disk' not in kind else 12)}" for kind in chosen]


def campaign(variant: str, kills: int, seed: int, folder: Path) -> list[Case]:
    """Kill runs of a variant until `kills` processes died; the first case is uninterrupted."""
    draw = random.Random(f"{seed}/{variant}")
    reference = Case(variant, folder / f"{variant}_reference", [])
    play(reference)
    judge(reference, reference)
    cases = [reference]
    first = draw.randrange(len(EVENTS) + len(DISK))
    if reference.wrong:
        return cases
    while sum(case.kills for case in cases) < kills and len(cases) < 4 * kills:
        number = first + len(cases)
        case = Case(variant, folder / f"{variant}_{number}", points(draw, number))
        play(case)
        judge(case, reference)
        cases.append(case)
    return cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--keep", metavar="DIR", help="leave the runs in this folder")
    arguments = parser.parse_args()
    variants = arguments.variants.split(",")
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.keep or temporary)
        folder.mkdir(exist_ok=True)
        each = math.ceil(arguments.kills / len(variants))
        jobs = [partial(campaign, name, each, arguments.seed, folder) for name in variants]
        cases = list(chain.from_iterable(beside(jobs, folder, arguments.jobs)))
    wrong = [case for case in cases if case.wrong]
    for case in wrong:
        print(f"{case.folder.name}, killed at {list(case.points)}: " + "; ".join(case.wrong[:4]))
    kills = Counter({name: sum(c.kills for c in cases if c.variant == name) for name in variants})
    shown = ", ".join(f"{count} x {name}" for name, count in kills.items())
    print(
        f"{len(cases) - len(wrong)} of {len(cases)} runs held, with {kills.total()} kills "
        f"({shown}), in {time.monotonic() - started:.0f} s"
    )
    return bool(wrong)


if __name__ == "__main__":
    import torch
    import trl  # noqa: F401 - loaded once, for all forks

    torch.set_num_threads(1)
    sys.exit(main())
