"""The program of a process of the crew: `python -m retrain.adapters.trl.ranks.follower`."""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import threading
import traceback
from contextlib import suppress
from dataclasses import replace

from retrain.adapters.trl.ranks.contract import ignore_signals, launched
from retrain.errors import ConfigError
from retrain.supervision.loading import uncollected


def main() -> int:
    """Do the work on standard input; ends with the leader. Returns the exit code."""
    ignore_signals()
    try:
        target, payload, sys.path[:] = pickle.load(sys.stdin.buffer)
        threading.Thread(target=_leave_with_leader, name="retrain-leader", daemon=True).start()
        place = launched()
        if place is None:
            raise ConfigError("a follower needs RANK and WORLD_SIZE; the run starts it")
        module, _, function = target.partition(":")
        with uncollected():
            work = getattr(importlib.import_module(module), function)
        work(replace(place, spawned=True), payload)
    except Exception:  # noqa: BLE001 - the leader quotes the last lines
        traceback.print_exc()
        return 1
    return 0


def _leave_with_leader() -> None:
    """A collective on CUDA doesn't notice that the leader is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


if __name__ == "__main__":
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)  # unloading torch takes a second
