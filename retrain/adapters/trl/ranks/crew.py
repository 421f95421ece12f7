"""The followers that a run starts on its own machine: ranks 1 to N - 1, watched until their end.

The leader holds the store in which the ranks meet, on a port that the system chooses, before it
starts the first follower. Each follower reads its work from its standard input, whose end is the
leader's end. Its output goes to a file.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from retrain.adapters.trl.ranks.contract import Place
from retrain.adapters.trl.ranks.group import open_store
from retrain.errors import AdapterError
from retrain.supervision.children import Child

ADDRESS = "127.0.0.1"
LAST_LINES = 12
STOP_SECONDS = 10.0
"""How long a follower may take to end after the order to stop."""
NOTICE_SECONDS = 3.0
"""How long the end of a process may take to be seen after its connection broke."""


class Crew:
    """Running followers; belongs to one event loop."""

    def __init__(self, size: int, folder: Path, lost: Callable[[AdapterError], None]) -> None:
        self.store = open_store(ADDRESS, 0, size, serve=True)
        self.place = Place(0, size, 0, size, ADDRESS, self.store.port, spawned=True)
        self._folder, self._lost = folder, lost
        self._followers: list[Child] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._loss: asyncio.Future[AdapterError] = asyncio.get_running_loop().create_future()
        self._ending = False

    @classmethod
    async def start(
        cls,
        size: int,
        target: str,
        payload: Any,
        *,
        folder: Path,
        lost: Callable[[AdapterError], None],
    ) -> Crew:
        """Start `size` - 1 followers, which call `target`, a "module:function", with their Place
        and `payload`, which must be picklable.

        `folder` gets their output. `lost` is called once, with what the first follower that ends
        by itself has left. Raises AdapterError if a process can't be started.
        """
        crew = cls(size, folder, lost)
        work = pickle.dumps((target, payload, sys.path), protocol=5)
        async with AsyncExitStack() as unless_started:
            unless_started.push_async_callback(crew.end, 0.0)
            try:
                for rank in range(1, size):
                    await crew._start(rank, work)
            except OSError as error:
                raise AdapterError(f"could not start the processes to train: {error}") from error
            unless_started.pop_all()
        return crew

    @property
    def pids(self) -> list[int]:
        """Of the followers, by rank from 1."""
        return [child.pid for child in self._followers]

    async def loss(self) -> AdapterError | None:
        """What a follower's end has left, waiting a while until its end is seen; else None."""
        with suppress(TimeoutError):
            async with asyncio.timeout(NOTICE_SECONDS):
                return await asyncio.shield(self._loss)
        return None

    async def end(self, grace: float = STOP_SECONDS) -> None:
        """End the followers: wait `grace` seconds for those that are to stop, then kill."""
        self._ending = True
        await asyncio.gather(*(child.end(grace) for child in self._followers))
        for watcher in self._watchers:
            watcher.cancel()

    async def _start(self, rank: int, work: bytes) -> None:
        size, port = self.place.size, self.place.port
        place = Place(rank, size, rank, size, ADDRESS, port, spawned=True)
        child = await Child.start(
            [sys.executable, "-m", "retrain.adapters.trl.ranks.follower"],
            env={**os.environ, **place.variables()},
            log=self.log(rank),
        )
        self._followers.append(child)
        self._watchers.append(asyncio.create_task(self._watch(rank, child)))
        child.stdin.write(work)

    def log(self, rank: int) -> Path:
        """The file with a follower's output."""
        return self._folder / f"rank_{rank}.log"

    async def _watch(self, rank: int, child: Child) -> None:
        await child.exited()
        if self._ending or self._loss.done():
            return
        last = child.last_lines()[-LAST_LINES:]
        error = AdapterError(
            f"rank {rank} of {self.place.size} (process {child.pid}) ended with {child.how_ended}"
            + "".join(f"\n    {line}" for line in (["; its last lines:", *last] if last else []))
        )
        self._loss.set_result(error)
        self._lost(error)
