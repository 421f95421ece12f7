"""Runs in forked processes: a start costs no import of torch or trl where the parent has them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


def run_forked(
    argv: Sequence[str],
    log: Path,
    *,
    before: Callable[[], object] = lambda: None,
    limit: float = 60.0,
) -> int:
    """`python -m retrain.run ARGV` in a forked process; its exit code, negative for a signal.

    Its output is appended to `log`, and `before` is called in it. After `limit` seconds it is
    killed, and the result is -SIGALRM.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        try:
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w"), open(2, "w")  # noqa: SIM115 - until it exits
            from retrain.cli.process import leave
            from retrain.cli.run import main

            before()
            leave(main(list(argv)))
        except SystemExit as end:
            sys.stderr.flush()
            os._exit(end.code if isinstance(end.code, int) else 70)
        finally:
            os._exit(70)
    until = time.monotonic() + limit
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGALRM
        time.sleep(0.02)


def beside(jobs: Sequence[Callable[[], T]], folder: Path, at_once: int) -> list[T]:
    """The results of all jobs, each done in a forked process; they come back by pickle."""
    running: dict[int, Path] = {}
    results: dict[Path, T] = {}
    waiting = list(enumerate(jobs))
    while waiting or running:
        if waiting and len(running) < at_once:
            number, job = waiting.pop(0)
            file = folder / f"result_{number}"
            if not (child := os.fork()):
                try:
                    file.write_bytes(pickle.dumps(job()))
                finally:
                    os._exit(0)
            running[child] = file
            continue
        child, _ = os.wait()
        file = running.pop(child)
        results[file] = pickle.loads(file.read_bytes())
    return [results[folder / f"result_{number}"] for number in range(len(jobs))]


def play_table(
    rows: Sequence[Any],
    play: Callable[[Any, Path], list[str]],
    what: str,
    *,
    words: Sequence[str] | None = None,
    at_once: int = 2 * (os.cpu_count() or 1),
) -> int:
    """Play the rows whose names have one of `words` (by default the command line's) in them, or
    all; print the score.

    `play` returns what went wrong. Returns the exit code.
    """
    started = time.monotonic()
    words = (sys.argv[1:] if words is None else words) or [""]
    chosen = [row for row in rows if any(part in row.name for part in words)]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [partial(play, row, Path(folder)) for row in chosen]
        results = beside(jobs, Path(folder), at_once)
    for row, wrong in zip(chosen, results, strict=True):
        if wrong:
            print(f"{row.name}: " + "; ".join(wrong))
    held = sum(not wrong for wrong in results)
    print(f"{held} of {len(chosen)} {what} handled, in {time.monotonic() - started:.0f} s")
    return held < len(chosen)
