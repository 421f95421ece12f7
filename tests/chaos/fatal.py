"""Ends a real vLLM server at a request: `--middleware fatal.Fatal`.

It runs in the environment of vLLM, and takes those faults of the stand-in that end a server
(`standin_requests.Faults`), from the same variable.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

App = Callable[..., Awaitable[None]]
GENERATE = "/inference/v1/generate"
SOON = 0.05
"""Seconds: a batch is being decoded then, or the server is idle again."""


class Fatal:
    """The server behind its faults."""

    def __init__(self, app: App) -> None:
        self.app = app
        self.faults: dict[str, Any] = json.loads(os.environ.get("VLLM_STANDIN", "{}"))
        self.worker = {GENERATE: self.faults.get("kill_worker_at", 0)}

    async def __call__(self, scope: MutableMapping[str, Any], receive: App, send: App) -> None:
        path, later = scope.get("path", ""), asyncio.get_running_loop().call_later
        if last(self.faults.get("die", {}), path):
            die()
        if last(self.worker, path):
            later(SOON, kill_worker)
        lost, idle = (last(self.faults.get(kind, {}), path) for kind in ("die_after", "die_idle"))

        async def answer_with(message: MutableMapping[str, Any]) -> None:
            if not lost:
                await send(message)

        await self.app(scope, receive, answer_with)
        if lost:
            die()
        if idle:
            later(SOON, die)


def last(left: dict[str, int], path: str) -> bool:
    """Whether this is the nth request; counts it down."""
    left[path] = left.get(path, 0) - 1
    return left[path] == 0


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_worker() -> None:
    """The process of the engine, a child of this one."""
    for folder in Path("/proc").glob("[0-9]*"):
        name, _, rest = (folder / "stat").read_text().rpartition(")")
        if "Engine" in name and int(rest.split()[1]) == os.getpid():
            os.kill(int(folder.name), signal.SIGKILL)
