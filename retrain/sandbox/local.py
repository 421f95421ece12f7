"""Sandboxes of this machine: namespaces or bubblewrap, which server processes set up.

A server runs on plain Python without this package's imports, see `server` and `jail`.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from asyncio.subprocess import Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from retrain.concurrency import children
from retrain.sandbox.base import Sandbox, SandboxError, SandboxLimits, SandboxResult

PER_SERVER = 8
"""Programs that one server runs at the same time; a server is one thread."""
FRAME = 2**27
"""The most bytes of one reply."""
ROOT = Path(__file__).resolve().parent
START = """
import sys, types, json
for name, folder in json.loads(sys.argv[1]).items():
    sys.modules[name] = package = types.ModuleType(name)
    package.__path__ = [folder]
from retrain.sandbox import server
server.main(json.loads(sys.argv[2]))
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
    are installed for this process.
    """

    def __init__(self, mode: str, processes: int, packages: bool = False) -> None:
        self.mode = mode
        self._free = asyncio.Semaphore(processes)
        self._config = config_of(mode, packages)
        self._servers = [_Server(self._config) for _ in range(-(-processes // PER_SERVER))]

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
            return await min(self._servers, key=lambda server: server.load).run(request)

    async def close(self) -> None:
        await asyncio.gather(*(server.close() for server in self._servers))


class _Server:
    """A server process; it starts with its first program, and again if it dies."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._argv = argv_of(config)
        self._starting = asyncio.Lock()
        self._process: Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = count()
        self.load = 0

    async def run(self, request: Mapping[str, Any]) -> SandboxResult:
        self.load += 1
        try:
            reply = await self._answer(next(self._numbers), request)
        finally:
            self.load -= 1
        return _result(reply)

    async def _answer(self, number: int, request: Mapping[str, Any]) -> dict[str, Any]:
        process = await self._started()
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        await _send(process, {**request, "id": number})
        try:
            return await future
        except asyncio.CancelledError:
            with suppress(SandboxError):
                await _send(process, {"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def _started(self) -> Process:
        async with self._starting:
            if self._process is None:
                self._process = await children.start(self._argv, env={}, limit=2**20)
                self._reader = asyncio.create_task(self._read(self._process))
            return self._process

    async def _read(self, process: Process) -> None:
        """Hand out the replies until the server ends."""
        assert process.stdout is not None
        try:
            while True:
                (size,) = struct.unpack(">I", await process.stdout.readexactly(4))
                reply = json.loads(await process.stdout.readexactly(min(size, FRAME)))
                future = self._waiting.get(reply["id"])
                if future is not None and not future.done():
                    future.set_result(reply)
        except asyncio.IncompleteReadError:
            pass
        finally:
            self._process = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(SandboxError("the server of the sandboxes ended"))
            await children.end(process, grace=0.5)

    async def close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.wait([self._reader])


async def _send(process: Process, message: Mapping[str, Any]) -> None:
    assert process.stdin is not None
    data = json.dumps(message).encode()
    try:
        process.stdin.write(struct.pack(">I", len(data)) + data)
        await process.stdin.drain()
    except (BrokenPipeError, ConnectionResetError, RuntimeError) as error:
        raise SandboxError("the server of the sandboxes ended") from error


def _request(
    config: Mapping[str, Any],
    command: Sequence[str],
    files: Mapping[str, str],
    stdin: str,
    limits: SandboxLimits,
) -> dict[str, Any]:
    for name in files:
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise ValueError(f"got the file {name!r}, expected one in the working folder")
    argv = [*config["interpreter"], *command[1:]] if command[0] == "python" else list(command)
    clean = {name: _encodable(text) for name, text in files.items()}
    return {"argv": argv, "files": clean, "stdin": _encodable(stdin), "limits": asdict(limits)}


def _encodable(text: str) -> str:
    """The text without lone surrogates, which UTF-8 doesn't have."""
    return text.encode(errors="replace").decode()


def _result(reply: Mapping[str, Any]) -> SandboxResult:
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


def argv_of(config: Mapping[str, Any]) -> list[str]:
    """The command of a server."""
    packages = {"retrain": str(ROOT.parent), "retrain.sandbox": str(ROOT)}
    own = [config["python"], "-I", "-S", "-B", "-c", START]
    return [*own, json.dumps(packages), json.dumps(dict(config))]


@cache
def why_not(mode: str) -> str:
    """Why sandboxes of this mode don't work here, "" if they do: one program is tried."""
    if not sys.platform.startswith("linux"):
        return f"this system is {platform.system()}, not Linux"
    if platform.machine() not in ("x86_64", "aarch64"):
        return f"this machine is {platform.machine()}, not x86_64 or aarch64"
    release = platform.release()
    if tuple(int(n) for n in re.findall(r"\d+", release)[:2]) < (5, 14):
        return f"this is Linux {release}, expected 5.14 or later"
    config = config_of(mode, packages=False)
    if mode == "bubblewrap" and not config["bubblewrap"]:
        return "there is no program bwrap"
    if mode == "bubblewrap" and os.geteuid() == 0:
        return "as root, programs would have the rights of root's files: run as another user"
    request = {**_request(config, ["python", "-c", "print(1)"], {}, "", SandboxLimits()), "id": 0}
    data = json.dumps(request).encode()
    try:
        with subprocess.Popen(argv_of(config), env={}, stdin=-1, stdout=-1, stderr=-1) as server:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.write(struct.pack(">I", len(data)) + data)
            server.stdin.flush()
            (size,) = struct.unpack(">I", server.stdout.read(4))
            result = _result(json.loads(server.stdout.read(size)))
    except (OSError, SandboxError, struct.error) as error:
        return str(error)
    return "" if result.stdout == "1\n" else result.stderr.strip()[-200:] or f"{result}"
