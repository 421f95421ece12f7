"""Sandboxes of this machine: namespaces or bubblewrap, which a server process sets up.

The server runs on plain Python without this package's imports, see `server` and `jail`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
from asyncio.subprocess import DEVNULL
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from retrain.sandbox.base import Sandbox, SandboxError, SandboxLimits, SandboxResult
from retrain.supervision.children import Child

ROOT = Path(__file__).resolve().parent
START = """
import sys, types, json
for name, folder in json.loads(sys.argv[1]).items():
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [folder]
from retrain.sandbox import server
getattr(server, sys.argv[2])(json.loads(sys.argv[3]))
"""
"""Imports the server without executing the packages around it, which take longer to load."""


def python_of(packages: bool) -> tuple[list[str], dict[str, str]]:
    """The interpreter of programs and its options, and variables of its environment."""
    own = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    if not packages:
        return [own, "-I", "-S", "-B"], {}
    path = os.pathsep.join(_package_folders())
    return [own, "-S", "-s", "-P", "-B"], {"PYTHONPATH": path}


class LocalSandbox(Sandbox):
    """Runs up to `processes` programs at a time, each in namespaces of its own.

    `mode` is "namespaces" or "bubblewrap"; with `packages`, programs can import the packages that
    are installed for this process. The server starts with the first program, and again if it died.
    """

    def __init__(self, mode: str, processes: int, packages: bool = False) -> None:
        self.mode = mode
        self._free = asyncio.Semaphore(processes)
        self._config = config_of(mode, packages)
        self._starting = asyncio.Lock()
        self._server: Child | None = None
        self._programs: socket.socket | None = None

    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        request = _request(self._config, command, files, stdin, limits or SandboxLimits())
        async with self._free:
            reader, writer = await asyncio.open_connection(sock=await self._connected())
            try:
                writer.write(request)
                return _result(await reader.read())
            except OSError:
                return _result(b"")
            finally:
                writer.transport.abort()  # so a program that still runs ends

    async def close(self) -> None:
        server, programs = self._server, self._programs
        self._server = self._programs = None
        if programs is not None:
            programs.close()
        if server is not None:
            await server.end(grace=0.5)

    async def _connected(self) -> socket.socket:
        """A connection to a new process of the server."""
        async with self._starting:
            if self._programs is not None:
                with suppress(ConnectionError):
                    return _handed(self._programs)
                await self.close()  # it has ended
            self._programs, theirs = socket.socketpair()
            with theirs:
                self._server = await Child.start(
                    argv_of("main", self._config), env={}, stdin=theirs.fileno(), stdout=DEVNULL
                )
            return _handed(self._programs)


def _handed(programs: socket.socket) -> socket.socket:
    """One end of a connection, of which the server gets the other one."""
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            socket.send_fds(programs, [b"+"], [theirs.fileno()])
        except OSError:
            ours.close()
            raise
    return ours


def _request(
    config: Mapping[str, Any],
    command: Sequence[str],
    files: Mapping[str, str],
    stdin: str,
    limits: SandboxLimits,
) -> bytes:
    for name in files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"got the file {name!r}, expected one in the working folder")
    argv = [*config["interpreter"], *command[1:]] if command[0] == "python" else list(command)
    clean = {name: _encodable(text) for name, text in files.items()}
    request = {"argv": argv, "files": clean, "stdin": _encodable(stdin), "limits": asdict(limits)}
    return json.dumps(request).encode() + b"\n"


def _encodable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 doesn't have."""
    return text.encode(errors="replace").decode()


def _result(answer: bytes) -> SandboxResult:
    if not answer:
        raise SandboxError("the server of the sandboxes ended")
    reply = json.loads(answer)
    if "error" in reply:
        raise SandboxError(f"the sandbox failed: {reply['error']}")
    out, err = (base64.b64decode(reply[n]).decode(errors="replace") for n in ("stdout", "stderr"))
    return SandboxResult(reply["code"], out, err, reply["seconds"], reply["limit"])


def config_of(mode: str, packages: bool) -> dict[str, Any]:
    """What all requests to a server have in common."""
    interpreter, environment = python_of(packages)
    folders = [os.path.realpath(sys.base_prefix), sys.base_prefix]
    return {
        "mode": mode,
        "bubblewrap": shutil.which("bwrap") or "",
        "python": interpreter[0],
        "interpreter": interpreter,
        "environment": environment,
        "read_only": list(dict.fromkeys([*folders, *(_package_folders() if packages else ())])),
    }


def _package_folders() -> list[str]:
    """The folders of installed packages; not those of projects in editable mode."""
    return [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]


def argv_of(function: str, config: Mapping[str, Any]) -> list[str]:
    """The command that calls a function of `server`."""
    packages = {"retrain": str(ROOT.parent), "retrain.sandbox": str(ROOT)}
    own = [config["python"], "-I", "-S", "-B", "-c", START]
    return [*own, json.dumps(packages), function, json.dumps(dict(config))]


@cache
def why_not(mode: str) -> str:
    """Why sandboxes of this mode don't work here, "" if they do: one program is tried."""
    config = config_of(mode, packages=False)
    if why := _unsupported(mode, config):
        return why
    request = _request(config, ["python", "-c", "print(1)"], {}, "", SandboxLimits())
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(request)
        try:
            subprocess.run(
                argv_of("one", config), env={}, stdin=theirs.fileno(), capture_output=True
            )
            theirs.close()
            result = _result(ours.makefile("rb").read())
        except (OSError, SandboxError) as error:
            return str(error)
    return "" if result.stdout == "1\n" else result.stderr.strip()[-200:] or f"{result}"


def _unsupported(mode: str, config: Mapping[str, Any]) -> str:
    """What this machine lacks, as far as it can be asked."""
    system, release, machine = platform.system(), platform.release(), platform.machine()
    known = system == "Linux" and machine in ("x86_64", "aarch64")
    if not known or [int(number) for number in re.findall(r"\d+", release)[:2]] < [5, 14]:
        return f"this is {system} {release} on {machine}, not Linux 5.14 on x86_64 or aarch64"
    if mode == "bubblewrap" and not config["bubblewrap"]:
        return "there is no program bwrap"
    if mode == "bubblewrap" and os.geteuid() == 0:
        return "as root, programs would have the rights of root's files: run as another user"
    return ""
