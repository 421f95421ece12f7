"""Run a program to its end, with its output kept in bounds; all that it started ends with it.

A process that left the program's process group, such as a daemon, is found by a variable in its
environment. That works on Linux only.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import signal
import stat
import time
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from retrain.supervision.children import Child, plain_environment
from retrain.supervision.crashes import ProgramError, headline
from retrain.supervision.threads import in_thread

GRACE_SECONDS = 1.0
"""How long a cancelled program may take to end after SIGTERM."""
KEPT_BYTES = 2**20
"""Of each output of a program, and of a file that it wrote."""
TAIL = 2000
"""Characters of a program's output that an error shows."""
DRAIN_SECONDS = 1.0
"""How long its output is read after it ended, if a process that is left still holds the pipes."""


MARK = "RETRAIN_PROGRAM"
"""The environment variable of a program, and of all that it starts."""
MARKED_SECONDS = 3.0
"""How long marked processes may take to end."""
_TRACED = re.compile(r'File "(.+?)", line (\d+)')
"""A line of a Python traceback."""


@dataclass(frozen=True, slots=True)
class Finished:
    """How a program ended."""

    exit_code: int
    """Negative for a signal."""
    stdout: str
    stderr: str

    def failure(self, what: str, files: Sequence[str] = ()) -> ProgramError:
        """The error of `what` for a program that failed: its cause first, then its last output.

        The last line of `files` in a traceback is named with it. Its `info` has `exit_code` and
        `stderr`.
        """
        text, ending = self.stderr.strip() or self.stdout.strip(), ""
        info = {"exit_code": self.exit_code, "stderr": self.stderr[-TAIL:]}
        tail = text[-TAIL:]
        if tail:
            cause = headline(text)
            lines = [f"{Path(file).name}:{n}" for file, n in _TRACED.findall(text) if file in files]
            ending = f": {cause}" + (f" ({lines[-1]})" if lines else "")
            ending += f"\n{tail}" if tail != cause else ""
        return ProgramError(f"{what} ended with exit code {self.exit_code}{ending}", text, info)


async def run_program(
    argv: Sequence[str | Path],
    *,
    stdin: str = "",
    env: Mapping[str, str] | None = None,
    cwd: str | Path | None = None,
    keep: int = KEPT_BYTES,
) -> Finished:
    """Run a program; returns the last `keep` bytes of each of its outputs.

    `env` is added to the environment of this process. When the call is cancelled, or the program
    has ended, all processes that it started end. Raises OSError if the program can't be started.
    """
    mark = _new_mark()
    environment = {**plain_environment(), **(env or {}), MARK: mark}
    child = await Child.start(argv, env=environment, cwd=cwd, stderr=PIPE)
    kept = bytearray(), bytearray()
    pipes = [
        asyncio.create_task(_feed(child.stdin, stdin)),
        asyncio.create_task(_read(child.stdout, kept[0], keep)),
        asyncio.create_task(_read(child.stderr, kept[1], keep)),
    ]
    try:
        await child.exited()
    finally:
        # What the program started may still hold the pipes, so it ends before they are read.
        try:
            code = await child.end(GRACE_SECONDS)
        finally:
            await in_thread(partial(end_marked, mark))
            _, left = await asyncio.wait(pipes, timeout=DRAIN_SECONDS)
            for pipe in left:
                pipe.cancel()
    return Finished(code, *[text.decode(errors="replace") for text in kept])


async def file_of(folder: Path, name: str, keep: int = KEPT_BYTES) -> bytes:
    """The last `keep` bytes of a file that a program wrote into its folder.

    A program may leave anything there: what is no regular file (a pipe, which would block, or a
    device, which never ends), and what a link names, is an OSError.
    """
    return await in_thread(partial(_file_of, folder, name, keep))


def _file_of(folder: Path, name: str, keep: int) -> bytes:
    path = folder.resolve() / name
    if path.parent.resolve() != path.parent:
        raise OSError(f"{name} is in a folder that is a symbolic link")
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(f"{name} is not a regular file")
        file.seek(max(0, status.st_size - keep))
        return file.read(keep)


@asynccontextmanager
async def owned_programs() -> AsyncIterator[dict[str, str]]:
    """Environment variables for programs that a library starts.

    All processes that have them end with the block, also when it is cancelled, and with the run.
    """
    mark = _new_mark()
    try:
        yield {MARK: mark}
    finally:
        await in_thread(partial(end_marked, mark))  # the thread goes on if this is cancelled


def end_marked(mark: str) -> None:
    """Kill the processes with this mark, also those that left their group. Linux only; blocks."""
    until = time.monotonic() + MARKED_SECONDS
    while (left := _marked(mark)) and time.monotonic() < until:  # one may start another meanwhile
        for process in left:
            with suppress(OSError):  # it has just ended
                os.kill(process, signal.SIGKILL)
        time.sleep(0.01)


def _marked(mark: str) -> list[int]:
    """The processes with this mark; a zombie has no environment."""
    wanted, found = f"\0{MARK}={mark}\0".encode(), []
    for process in Path("/proc").glob("[0-9]*"):  # none on macOS
        with suppress(OSError), open(f"{process}/environ", "rb") as file:  # of somebody else
            if wanted in b"\0" + file.read() + b"\0":
                found.append(int(process.name))
    return found


def _new_mark() -> str:
    return f"{os.getpid()}-{secrets.token_hex(8)}"


async def _feed(stdin: StreamWriter, text: str) -> None:
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read it
        stdin.write(text.encode())
        await stdin.drain()
    stdin.close()


async def _read(stream: StreamReader, kept: bytearray, keep: int) -> None:
    while chunk := await stream.read(2**16):
        kept += chunk
        del kept[:-keep]
