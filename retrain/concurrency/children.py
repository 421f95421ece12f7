"""Child processes that end with the run."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress


async def start(argv: Sequence[str], *, env: Mapping[str, str] | None = None) -> Process:
    """Start a program in a process group of its own, with pipes for its input and output."""
    return await asyncio.create_subprocess_exec(
        *argv, stdin=PIPE, stdout=PIPE, env=env, start_new_session=True
    )


async def end(process: Process) -> None:
    """Kill the process and its group, and wait for it."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
