"""Where a trainer's loop gets its batches, and where it tells its metrics.

`TrajectoryPool` may be filled from any thread or event loop and waited for from either, without
polling. A group is handed out whole: with `group_size` G a prompt's trajectories wait until there
are G of them.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Protocol

from retrain.errors import ConfigError
from retrain.trainer.nexrl.advantages import group_key
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories
from retrain.types import Metrics

log = logging.getLogger(__name__)


class Pool(Protocol):
    """What a trainer's loop asks of its pool."""

    def get_batch_blocking(self) -> Sequence[Trajectory]:
        """The next batch; empty when there will be no more."""
        ...


class WeightSyncController(Protocol):
    """What is told when new weights are served."""

    def train_worker_notify_weight_update(self) -> None: ...


class TrajectoryPool:
    """Hands out whole groups, in the order of their completion, until there are at least
    `batch_size` trajectories."""

    def __init__(self, batch_size: int = 32, *, group_size: int = 1) -> None:
        """Raises ConfigError when a size is less than 1."""
        if batch_size < 1 or group_size < 1:
            raise ConfigError(
                f"a pool got batch_size {batch_size} and group_size {group_size}: both must be at "
                "least 1"
            )
        self._batch_size = batch_size
        self._group_size = group_size
        self._open: dict[Hashable, list[Trajectory]] = {}
        self._ready: deque[list[Trajectory]] = deque()
        self._waiting: list[Future[list[Trajectory]]] = []
        self._closed = False
        self._lock = threading.Lock()

    def put_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Add one; raises RuntimeError when the pool is closed."""
        [made] = as_trajectories([trajectory])
        with self._lock:
            if self._closed:
                raise RuntimeError("the pool is closed: it takes no further trajectory")
            key = ("alone", id(made)) if self._group_size == 1 else group_key(made, id(made))
            group = self._open.setdefault(key, [])
            group.append(made)
            if len(group) >= self._group_size:
                self._ready.append(self._open.pop(key))
            self._serve()

    def put_batch(self, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Add several."""
        for trajectory in trajectories:
            self.put_trajectory(trajectory)

    def get_batch_blocking(self, timeout: float | None = None) -> list[Trajectory]:
        """The next batch, or TimeoutError after `timeout` seconds; empty when closed and drained.

        What was left when the pool was closed is the last batch, though it be smaller.
        """
        future = self._request()
        try:
            return future.result(timeout)
        except TimeoutError:
            future.cancel()
            raise

    async def get_batch(self) -> list[Trajectory]:
        """The same for an event loop; cancelling it loses no batch."""
        return await asyncio.wrap_future(self._request())

    def close(self) -> None:
        """No more will come: who waits gets what is ready. Incomplete groups are dropped, told."""
        with self._lock:
            if self._open:
                log.warning("the pool closes with %d incomplete groups", len(self._open))
            self._open.clear()
            self._closed = True
            self._serve()

    def _request(self) -> Future[list[Trajectory]]:
        future: Future[list[Trajectory]] = Future()
        with self._lock:
            self._waiting.append(future)
            self._serve()
        return future

    def _serve(self) -> None:
        """Give batches to those who wait, first come, first served; the lock is held."""
        while self._waiting and (self._closed or self._count() >= self._batch_size):
            future = self._waiting.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            batch: list[Trajectory] = []
            while self._ready and len(batch) < self._batch_size:
                batch += self._ready.popleft()
            future.set_result(batch)

    def _count(self) -> int:
        return sum(map(len, self._ready))


class ActivityTracker:
    """Keeps every step's metrics, and logs them."""

    def __init__(self) -> None:
        self.history: list[Metrics] = []

    def log_train_step(self, metrics: Metrics, step: int) -> None:
        """The metrics of optimizer step `step`; 1 is the first."""
        self.history.append({"step": step, **metrics})
        log.info("step %d: %s", step, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
