"""Child processes that end with this process, whatever ends it, `kill -9` included.

Each child leads a process group, so that its own children end with it and Ctrl-C in a terminal
doesn't reach it. Whoever starts a child calls `end`. `leash` ends the groups that are left.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from retrain.concurrency.leash import leash

GRACE_SECONDS = 5.0


_OF_RANKS = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_NAME|"
    r"MASTER_(ADDR|PORT))$|TORCHELASTIC_|ACCELERATE_|FSDP_"
)
"""Variables of torchrun and accelerate, which make a rank of whoever reads them."""


def is_of_ranks(name: str) -> bool:
    """Whether an environment variable says that a process trains together with others."""
    return _OF_RANKS.match(name) is not None


def plain_environment() -> dict[str, str]:
    """A copy of the environment for a child that is no rank, whatever this process is."""
    return {name: value for name, value in os.environ.items() if not is_of_ranks(name)}


async def start(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    stdin: int = PIPE,
    stdout: int = PIPE,
    stderr: int | None = None,
) -> Process:
    """Start a child with pipes for its input and output; raises OSError if it can't be started.

    `env` defaults to `plain_environment()`, `cwd` and `stderr` to those of this process. A
    stream may be the descriptor of a file.
    """
    process = await asyncio.create_subprocess_exec(
        *argv,
        env=plain_environment() if env is None else env,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        process_group=0,
    )
    leash.add_child(process.pid)
    return process


async def exited(process: Process) -> int:
    """Wait for the end of the process only: `wait` also waits for whoever else holds its pipes.

    Returns its exit code, negative for a signal.
    """
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:  # it has ended
        descriptor = -1
    except (AttributeError, OSError):  # not on this system
        return await process.wait()
    if descriptor >= 0:
        await _readable(descriptor)
    while process.returncode is None:  # noqa: ASYNC110 - a thread of asyncio is about to set it
        await asyncio.sleep(0.001)
    return process.returncode


def how_ended(code: int) -> str:
    """`SIGKILL` or `exit code 3`, from an exit code that is negative for a signal."""
    if code >= 0:
        return f"exit code {code}"
    killed = " (often out of memory: see dmesg)" if code == -signal.SIGKILL else ""
    return signal.Signals(-code).name + killed


async def _readable(descriptor: int) -> None:
    """Wait for a descriptor, then close it."""
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(descriptor, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def end(process: Process, grace: float = GRACE_SECONDS) -> int:
    """End a child and its own children: SIGTERM, then SIGKILL after `grace` seconds.

    Returns its exit code, negative for a signal. A child that has ended is no error. If the call is
    cancelled, the children are killed at once.
    """
    try:
        if process.returncode is None:
            _signal(process, signal.SIGTERM)
            with suppress(TimeoutError):
                async with asyncio.timeout(grace):
                    await exited(process)
    finally:
        _signal(process, signal.SIGKILL)
        leash.drop_child(process.pid)
    return await exited(process) if process.returncode is None else process.returncode


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # the group is gone; macOS: only zombies
        os.killpg(process.pid, number)
