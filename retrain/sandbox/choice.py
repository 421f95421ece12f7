"""From the keys of a config to a sandbox that everybody with the same keys shares."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from retrain.config.plugins import Kind, construct, find_plugin
from retrain.errors import ConfigError
from retrain.sandbox.base import Sandbox
from retrain.sandbox.local import LocalSandbox, why_not
from retrain.sandbox.plain import NoSandbox

MODES = ("namespaces", "bubblewrap")
REMEDY = (
    "Allow unprivileged user namespaces (sysctl kernel.unprivileged_userns_clone=1, and on "
    "Ubuntu kernel.apparmor_restrict_unprivileged_userns=0) or install bubblewrap; set `sandbox` "
    "to your own class, for example for containers; or set `sandbox: none` to run the programs "
    "of the model without isolation"
)


@dataclass(frozen=True)
class SandboxChoice:
    """The keys of a sandbox, checked: one program has run in it.

    `kind` is "auto", "namespaces", "bubblewrap", "none", or a class as module:Class or
    path/file.py:Class. `processes` defaults to the number of cores. Raises ConfigError if there is
    no such sandbox here.
    """

    kind: str = "auto"
    processes: int | None = None
    packages: bool = False
    base_dir: Path = Path()
    where: str = "environment"

    def __post_init__(self) -> None:
        if self.processes is not None and self.processes < 1:
            raise ConfigError(f"{self.where}.processes: got {self.processes}, expected at least 1")
        self._maker()

    def make(self) -> Sandbox:
        return self._maker()()

    def _maker(self) -> Callable[[], Sandbox]:
        where, processes = f"{self.where}.sandbox", self.processes or os.cpu_count() or 1
        if ":" in self.kind or self.kind.endswith(".py"):
            found = find_plugin(Kind("sandbox", Sandbox), self.kind, where, self.base_dir)
            return partial(construct, where, found)
        if self.kind == "none":
            return partial(NoSandbox, processes, self.packages)
        return partial(LocalSandbox, self._mode(), processes, self.packages)

    def _mode(self) -> str:
        """The first of the modes that works here."""
        if self.kind not in ("auto", *MODES):
            expected = ", ".join(("auto", *MODES, "none"))
            raise ConfigError(
                f"{self.where}.sandbox: got {self.kind!r}, expected {expected} or "
                "path/file.py:Class"
            )
        wanted = MODES if self.kind == "auto" else (self.kind,)
        for mode in wanted:
            if not why_not(mode):
                return mode
        reasons = "; ".join(f"{mode}: {why_not(mode)}" for mode in wanted)
        raise ConfigError(f"{self.where}.sandbox: no sandbox works here ({reasons}). {REMEDY}")


_Open = dict[SandboxChoice, tuple[Sandbox, list[int]]]
_open: WeakKeyDictionary[asyncio.AbstractEventLoop, _Open] = WeakKeyDictionary()
"""The sandboxes of each event loop, and how many use them."""


@asynccontextmanager
async def sandbox_of(choice: SandboxChoice) -> AsyncIterator[Sandbox]:
    """The sandbox of this choice, one per event loop; the last one to leave closes it."""
    opened = _open.setdefault(asyncio.get_running_loop(), {})
    if choice not in opened:
        opened[choice] = choice.make(), [0]
    sandbox, users = opened[choice]
    users[0] += 1
    try:
        yield sandbox
    finally:
        users[0] -= 1
        if users[0] == 0:
            del opened[choice]
            await sandbox.close()
