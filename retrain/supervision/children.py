"""Child processes that end with this process, whatever ends it, `kill -9` included.

Each child leads a session and a process group, so that its own children end with it and Ctrl-C in a
terminal doesn't reach it; where others compute, a session also has a share of the CPU for itself.
`leash` ends the groups that are left when this process is gone.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
from asyncio import StreamReader, StreamWriter, SubprocessTransport
from asyncio.subprocess import PIPE, SubprocessStreamProtocol
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import cast

from retrain.supervision.leash import leash

GRACE_SECONDS = 5.0
TAIL_BYTES = 2**18
"""How much of the end of a log is read."""
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


class _Streams(SubprocessStreamProtocol):
    """The streams of a child and its end, for which asyncio waits with that of its pipes only."""

    def __init__(self) -> None:
        super().__init__(limit=2**16, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


class Child:
    """A child process, with the processes that it starts; whoever starts it calls `end`.

    Its output begins at the byte `begin` of its log.
    """

    def __init__(
        self, transport: SubprocessTransport, streams: _Streams, log: Path | None, begin: int
    ) -> None:
        self.pid, self._transport, self._streams = transport.get_pid(), transport, streams
        self._log, self.begin = log, begin
        # None if it is no pipe; then nobody asks for it.
        self.stdin = cast(StreamWriter, streams.stdin)
        self.stdout = cast(StreamReader, streams.stdout)
        self.stderr = cast(StreamReader, streams.stderr)

    @classmethod
    async def start(
        cls,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        stdin: int = PIPE,
        stdout: int = PIPE,
        stderr: int | None = None,
        log: Path | None = None,
    ) -> Child:
        """Start a child; raises OSError if it can't be started.

        `env` defaults to `plain_environment()`, `cwd` and `stderr` to those of this process. A
        stream may be the descriptor of a file. Both outputs are appended to the file `log`.
        """
        loop = asyncio.get_running_loop()
        with (log or Path(os.devnull)).open("ab") as file:
            begin = file.tell()
            transport, streams = await loop.subprocess_exec(
                _Streams,
                *argv,
                env=plain_environment() if env is None else env,
                cwd=cwd,
                stdin=stdin,
                stdout=file if log else stdout,
                stderr=file if log else stderr,
                start_new_session=True,
            )
        leash.add_child(transport.get_pid())
        return cls(transport, streams, log, begin)

    @property
    def exit_code(self) -> int | None:
        """Negative for a signal; None while it runs."""
        return self._transport.get_returncode()

    @property
    def how_ended(self) -> str:
        """`SIGKILL` or `exit code 3`; empty while it runs."""
        code = self.exit_code
        if code is None or code >= 0:
            return "" if code is None else f"exit code {code}"
        killed = " (often out of memory: see dmesg)" if code == -signal.SIGKILL else ""
        return signal.Signals(-code).name + killed

    def last_lines(self) -> list[str]:
        """The lines with text at the end of its log."""
        return tail(self._log, self.begin) if self._log else []

    def signal(self, number: int) -> bool:
        """Send a signal to it and its own children; False if all have ended."""
        try:
            os.killpg(self.pid, number)
        except (ProcessLookupError, PermissionError):  # macOS: only zombies
            return False
        return True

    async def exited(self) -> int:
        """Wait for its end, though others may still hold its pipes; returns its exit code."""
        await self._streams.exited.wait()
        code = self.exit_code
        assert code is not None
        return code

    async def end(self, grace: float = GRACE_SECONDS) -> int:
        """End it and its own children: SIGTERM, then SIGKILL after `grace` seconds.

        Returns its exit code. If it has ended, its children are killed. If the call is cancelled,
        all are killed at once.
        """
        try:
            if self.exit_code is None:
                self.signal(signal.SIGTERM)
                with suppress(TimeoutError):
                    async with asyncio.timeout(grace):
                        await self.exited()
                        while self.signal(0):  # noqa: ASYNC110 - a group can only be polled
                            await asyncio.sleep(0.01)
        finally:
            self.signal(signal.SIGKILL)
            leash.drop_child(self.pid)
        return await self.exited()


def tail(log: Path, begin: int = 0) -> list[str]:
    """The lines with text at the end of a file, after the byte `begin`; none if there is none."""
    try:
        with log.open("rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    return [line for line in lines if line.strip()]
