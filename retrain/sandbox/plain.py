"""`sandbox: none`: programs with limits, but with the files, network and user of the run."""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

from retrain.sandbox.base import LimitName, Sandbox, SandboxLimits, SandboxResult
from retrain.sandbox.local import python_of
from retrain.supervision.programs import MARK, run_program
from retrain.supervision.threads import in_thread

LIMITED = """
for limit in "-t $1" "-v $2" "-f $3" "-n 256" "-c 0"; do ulimit $limit 2>/dev/null || :; done
shift 3
exec env -i "%s=$%s" "PATH=/usr/local/bin:/usr/bin:/bin" "HOME=$PWD" LANG=C.UTF-8 "$@"
""" % (MARK, MARK)  # noqa: UP031 - braces and dollars belong to the shell
"""Sets the limits and removes the environment, but for the mark by which `run_program` ends all."""


@cache
def _warn() -> None:
    """Once per process."""
    logging.getLogger(__name__).warning(
        "sandbox: none: the programs of the model run with your files, your network and your "
        "user's rights"
    )


class NoSandbox(Sandbox):
    """Runs programs without isolation. The first one logs a warning.

    The limits of CPU time and address space hold per process, those of the size of a file and of
    the output too; those of all files and processes together don't.
    """

    def __init__(self, processes: int, packages: bool = False) -> None:
        _warn()
        self._free = asyncio.Semaphore(processes)
        self._interpreter, self._variables = python_of(packages)

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        limits = limits or SandboxLimits()
        argv = [*self._interpreter, *command[1:]] if command[0] == "python" else list(command)
        variables = [f"{name}={value}" for name, value in self._variables.items()]
        sizes = limits.cpu_seconds, limits.memory << 10, limits.disk << 11
        shell = ["sh", "-c", LIMITED, "sh", *map(str, sizes), *variables, *argv]
        async with self._free:
            # Not in a thread, which a cancellation would abandon with its folder.
            folder = Path(tempfile.mkdtemp(prefix="retrain-program-"))
            started = time.monotonic()
            try:  # nor these, which are small: such a thread would still write
                for name, text in files.items():
                    path = folder / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text, encoding="utf-8", errors="replace")
                async with asyncio.timeout(limits.seconds):
                    done = await run_program(
                        shell, stdin=stdin, cwd=folder, keep=limits.output << 10
                    )
            except TimeoutError:
                seconds = time.monotonic() - started
                return SandboxResult(-signal.SIGKILL, "", "", seconds, "time")
            finally:
                await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))
        code, seconds = done.exit_code, time.monotonic() - started
        limit: LimitName = "cpu" if code in (-signal.SIGXCPU, -signal.SIGKILL) else ""
        return SandboxResult(code, done.stdout, done.stderr, seconds, limit)
