"""Servers that are killed: runs that start vLLM servers, which die by SIGKILL at named moments.

    python -m tests.chaos.servers [--python PYTHON] [WORDS]

Each row is a run whose server has several lives. Each life ends at another moment; the run starts
the server again, gives it the present weights, and completes. Nothing is lost or trained twice. A
last row has a run that may not start it again, which ends clearly and is resumed.

The servers are stand-ins, or real ones with the Python of an environment that has vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from retrain.config import load_config
from tests.chaos.judgement import judge_log
from tests.chaos.kills import BASE, LETTERS, RATE
from tests.chaos.processes import play_table, run_forked

TESTS = Path(__file__).parents[1]
GENERATE = "/inference/v1/generate"
Life = dict[str, Any]
"""`standin_requests.Faults` that end it; `start` is a number of seconds after the process began."""


@dataclass(frozen=True)
class Deaths:
    """The lives of the server of one run, before the last one, which does not end."""

    name: str
    lives: Sequence[Life]
    publish: str = "folder"
    restarts: int = 20


def before(path: str, nth: int) -> Life:
    return {"die": {path: nth}}


def after(path: str, nth: int) -> Life:
    """The answer is lost."""
    return {"die_after": {path: nth}}


# A life begins with the checks and with a publish of the present weights: one request to each path
# of it, and one more to /resume.
TABLE = (
    Deaths(
        "requests",
        (
            before(GENERATE, 7),
            after(GENERATE, 4),
            {"kill_worker_at": 4},
            {"die_idle": {GENERATE: 4}},
            before(GENERATE, 1),
            {"start": 0.5},
        ),
    ),
    Deaths(
        "folder, begun", (before("/pause", 2), after("/pause", 1), before("/collective_rpc", 2))
    ),
    Deaths(
        "folder, ended",
        (
            after("/collective_rpc", 2),
            before("/update_weight_version", 2),
            before("/resume", 3),
            after("/resume", 3),
        ),
    ),
    Deaths(
        "group",
        (before("/collective_rpc", 3), before("/collective_rpc", 2), after("/collective_rpc", 3)),
        "group",
    ),
    Deaths(
        "adapter",
        (before("/v1/load_lora_adapter", 4), before("/v1/unload_lora_adapter", 1)),
        "adapter",
    ),
    Deaths("no restart is left", (before(GENERATE, 9),), restarts=0),
)
REAL = (
    Deaths("before a request", (before(GENERATE, 7),)),
    Deaths("the worker in a batch", ({"kill_worker_at": 4},)),
    Deaths("idle, and just after a restart", ({"die_idle": {GENERATE: 4}}, before(GENERATE, 2))),
    Deaths("while it loads", (before("/resume", 3), {"start": 8})),
    Deaths("folder", (after("/pause", 2), after("/collective_rpc", 2))),
    Deaths("group", (before("/collective_rpc", 3),), "group"),
    Deaths("adapter", (before("/v1/load_lora_adapter", 4),), "adapter"),
)
"""A real server takes longer to start."""


def play(deaths: Deaths, folder: Path, python: Path | None = None) -> list[str]:
    """What went wrong."""
    folder = folder / deaths.name
    (folder / "begun").mkdir(parents=True)
    sampler = {
        "type": "vllm",
        "python": str(program(deaths, folder, python)),
        "publish": deaths.publish,
        "restarts": deaths.restarts,
    }
    steps = 3 * len(deaths.lives) + 2
    backend = {"type": "trl", "sampler": sampler, **RATE}
    if deaths.publish == "adapter":
        backend["lora"] = {"r": 4}
    config = {
        **BASE,
        "model": model(folder) if python else "tiny",
        "backend": backend,
        "staleness": {"target": 1, "max": 2},
        "train": {"total_train_steps": steps, "groups_per_step": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    argv = [str(folder / "run.yaml"), "--run-dir", str(folder / "run")]
    log = folder / "log.txt"
    code, wrong = run_forked(argv, log, limit=600), []
    if not deaths.restarts:
        if code != 1 or "--resume" not in log.read_text():
            wrong.append(f"exit code {code}, expected 1 and advice")
        code = run_forked([*argv, "--resume"], log, limit=300)
    book, _ = judge_log(folder / "run", load_config(folder / "run.yaml"), len(LETTERS))
    wrong += book.wrong
    if (code, book.step) != (0, steps):
        said = log.read_text()[-300:]
        wrong.append(f"exit code {code} after {book.step} of {steps} steps: {said}")
    if (begun := len([*(folder / "begun").iterdir()])) != len(deaths.lives) + 1:
        wrong.append(f"{begun} lives of the server, expected {len(deaths.lives) + 1}")
    return wrong


def program(deaths: Deaths, folder: Path, python: Path | None) -> Path:
    """A `sampler.python` whose nth start is the nth life of the server."""
    import vllm_kit

    for number, life in enumerate(deaths.lives):
        faults = {kind: fault for kind, fault in life.items() if kind != "start"}
        (folder / f"faults.{number}").write_text(json.dumps(faults))
        if "start" in life:
            (folder / f"start.{number}").write_text(str(life["start"]))
    (folder / "path").mkdir()
    shutil.copy(TESTS / "chaos/fatal.py", folder / "path")  # alone: `requests.py` is beside it
    given = "--middleware fatal.Fatal" if python else ""
    script = folder / "python"
    script.write_text(
        f"#!/bin/sh\n[ \"$1\" = -c ] && echo True && exit\ncd '{folder}'\n"
        "life=$(ls begun | wc -l); touch begun/$life\n"
        'export VLLM_STANDIN="$(cat faults.$life 2>/dev/null || echo {})"\n'
        '[ -e start.$life ] && (sleep "$(cat start.$life)"; kill -9 $$) &\n'
        f'export PYTHONPATH="$PYTHONPATH:{folder}/path"\n'
        f"exec '{python or vllm_kit.standin_python(folder)}' \"$@\" {given}\n"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


def model(folder: Path) -> str:
    """One that vLLM can serve on a CPU."""
    import vllm_kit

    return str(vllm_kit.saved(vllm_kit.small_model(), folder / "model"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.servers", description=__doc__)
    parser.add_argument("words", nargs="*", help="rows whose names have one of them")
    parser.add_argument("--python", type=Path, help="of an environment with vLLM, for real servers")
    given = parser.parse_args()
    what = "runs with servers that die"
    if given.python is None:
        return play_table(TABLE, play, what, words=given.words)
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    play_real = partial(play, python=given.python.absolute())
    return play_table(REAL, play_real, what, words=given.words, at_once=1)


if __name__ == "__main__":
    import torch
    import trl  # noqa: F401 - loaded once, for all forks

    sys.path.append(str(TESTS))  # the kits
    torch.set_num_threads(1)
    sys.exit(main())
