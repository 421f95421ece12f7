"""Child processes that end with this process, whatever ends it, `kill -9` included.

Each child leads a process group, so that its own children end with it and Ctrl-C in a terminal
doesn't reach it. Whoever starts a child calls `end`. The guardian ends the groups that are left.
"""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.concurrency.guardian import guardian

GRACE_SECONDS = 5.0


async def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stderr: int | None = None,
    limit: int = 2**16,
) -> Process:
    """Start a child with pipes for its input and output; raises OSError if it can't be started.

    `env`, `cwd` and `stderr` default to those of this process. `limit` is the number of bytes that
    are read ahead from its output.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=env,
        cwd=cwd,
        stdin=PIPE,
        stdout=PIPE,
        stderr=stderr,
        limit=limit,
        process_group=0,
    )
    guardian.add_child(process.pid)
    return process


async def end(process: Process, grace: float = GRACE_SECONDS) -> int | None:
    """End a child and its own children: SIGTERM, then SIGKILL after `grace` seconds.

    Returns its exit code, negative for a signal. A child that has ended is no error. If the call is
    cancelled, the children are killed at once.
    """
    try:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await process.wait()
    finally:
        _signal(process, signal.SIGKILL)
        guardian.drop_child(process.pid)
    return await process.wait()


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is gone; macOS: only zombies
        os.killpg(process.pid, number)
