"""Servers that are killed: runs that start the stand-in of a vLLM server, which dies by SIGKILL.

    python -m tests.chaos.servers [WORDS]

Each row is a moment of a server's life at which it dies, again and again: the run starts it anew,
gives it the present weights, and completes. Nothing is lost or trained twice, and a last row has a
run that may not start it again, which ends clearly and is resumed.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from retrain.config import load_config
from tests.chaos.judgement import judge_log
from tests.chaos.kills import BASE, LETTERS, RATE, STEPS
from tests.chaos.processes import play_table, run_forked

GENERATE = "/inference/v1/generate"


@dataclass(frozen=True)
class Moment:
    """`fault` is of each life of the server; see `vllm_standin.Faults`."""

    name: str
    fault: dict[str, Any]
    publish: str = "folder"
    restarts: int = 20


def at(path: str, nth: int, publish: str = "folder", *, after: bool = False) -> Moment:
    kind = "die_after" if after else "die"
    return Moment(f"{publish}: {kind} {path}", {kind: {path: nth}}, publish)


MOMENTS = (
    at(GENERATE, 7),
    at(GENERATE, 7, after=True),
    Moment("folder: the worker dies", {"kill_worker_at": 7}),
    at("/pause", 4),
    at("/pause", 4, after=True),
    at("/collective_rpc", 4),
    at("/collective_rpc", 4, after=True),
    at("/update_weight_version", 4),
    at("/resume", 4),
    at("/resume", 4, after=True),
    at("/start_weight_update", 4, "group"),
    at("/update_weights", 4, "group"),
    at("/finish_weight_update", 4, "group", after=True),
    at("/v1/load_lora_adapter", 4, "adapter"),
    at("/v1/unload_lora_adapter", 3, "adapter"),
    Moment("no restart is left", {"die": {GENERATE: 9}}, restarts=0),
)


def play(moment: Moment, folder: Path) -> list[str]:
    """What went wrong."""
    import vllm_kit

    folder = folder / moment.name.replace("/", "-")
    folder.mkdir()
    sampler = {
        "type": "vllm",
        "python": str(vllm_kit.standin_python(folder)),
        "publish": moment.publish,
        "restarts": moment.restarts,
    }
    backend = {"type": "trl", "sampler": sampler, **RATE}
    if moment.publish == "adapter":
        backend["lora"] = {"r": 4}
    config = {
        **BASE,
        "backend": backend,
        "staleness": {"target": 1, "max": 2},
        "train": {"total_train_steps": STEPS, "groups_per_step": 2},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    argv = [str(folder / "run.yaml"), "--run-dir", str(folder / "run")]
    fault = partial(os.environ.__setitem__, "VLLM_STANDIN", json.dumps(moment.fault))
    log = folder / "log.txt"
    code = run_forked(argv, log, before=fault, limit=240)
    wrong = []
    if not moment.restarts:
        if code != 1 or "--resume" not in log.read_text():
            wrong.append(f"exit code {code}, expected 1 and advice")
        code = run_forked([*argv, "--resume"], log, limit=120)
    book, _ = judge_log(folder / "run", load_config(folder / "run.yaml"), len(LETTERS))
    wrong += book.wrong
    if (code, book.step) != (0, STEPS):
        wrong.append(f"exit code {code} after {book.step} steps: {log.read_text()[-300:]}")
    if "is taken out" not in log.read_text():
        wrong.append("the server did not die")
    return wrong


if __name__ == "__main__":
    import torch
    import trl  # noqa: F401 - loaded once, for all forks

    sys.path.append(str(Path(__file__).parents[1]))  # the kits
    torch.set_num_threads(1)
    sys.exit(play_table(MOMENTS, play, "deaths of a server"))
