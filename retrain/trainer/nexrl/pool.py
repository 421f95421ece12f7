"""Where a trainer's loop gets its batches, and where it reports its metrics."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from retrain.errors import ConfigError
from retrain.trainer.nexrl.advantages import group_key
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories
from retrain.types import Metrics

log = logging.getLogger(__name__)


class Pool(Protocol):
    """What a trainer's loop calls on its pool."""

    def get_batch_blocking(self) -> Sequence[Trajectory]:
        """The next batch; empty when no more batches will come."""
        ...


class WeightSyncController(Protocol):
    """What a trainer's loop calls when new weights are served."""

    def train_worker_notify_weight_update(self) -> None: ...


class TrajectoryPool:
    """Collects trajectories into groups, and returns batches of whole groups.

    A group is complete when it has `group_size` trajectories. A batch takes complete groups, in the
    order of their completion, until it has at least `batch_size` trajectories. Threads may put and
    get at the same time.
    """

    def __init__(self, batch_size: int = 32, *, group_size: int = 1) -> None:
        """Raises ConfigError when a size is less than 1."""
        if batch_size < 1 or group_size < 1:
            raise ConfigError(
                f"TrajectoryPool: got batch_size {batch_size} and group_size {group_size}, "
                "expected both to be at least 1"
            )
        self._batch_size = batch_size
        self._group_size = group_size
        self._open: dict[Hashable, list[Trajectory]] = {}
        self._complete: deque[list[Trajectory]] = deque()
        self._closed = False
        self._changed = threading.Condition()

    def put_trajectory(self, trajectory: Mapping[str, Any]) -> None:
        """Add one trajectory. Raises RuntimeError when the pool is closed."""
        [made] = as_trajectories([trajectory])
        with self._changed:
            if self._closed:
                raise RuntimeError("the pool is closed and takes no more trajectories")
            key = id(made) if self._group_size == 1 else group_key(made, id(made))
            group = self._open.setdefault(key, [])
            group.append(made)
            if len(group) >= self._group_size:
                self._complete.append(self._open.pop(key))
                self._changed.notify_all()

    def put_batch(self, trajectories: Sequence[Mapping[str, Any]]) -> None:
        """Add several trajectories."""
        for trajectory in trajectories:
            self.put_trajectory(trajectory)

    def get_batch_blocking(self, timeout: float | None = None) -> list[Trajectory]:
        """The next batch; empty when the pool is closed and nothing is left.

        After `close`, the last batch may be smaller. Raises TimeoutError after `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(self._has_batch, timeout):
                raise TimeoutError(f"the pool has no batch after {timeout} s")
            batch: list[Trajectory] = []
            while self._complete and len(batch) < self._batch_size:
                batch += self._complete.popleft()
            return batch

    def close(self) -> None:
        """Take no more trajectories, and wake everyone who waits.

        Logs a warning about incomplete groups, and drops them.
        """
        with self._changed:
            if self._open:
                log.warning("the pool is closed: dropping %d incomplete groups", len(self._open))
            self._open.clear()
            self._closed = True
            self._changed.notify_all()

    def _has_batch(self) -> bool:
        return self._closed or sum(map(len, self._complete)) >= self._batch_size


class ActivityTracker:
    """Keeps the metrics of every step in `history`, and logs them."""

    def __init__(self) -> None:
        self.history: list[Metrics] = []

    def log_train_step(self, metrics: Metrics, step: int) -> None:
        """Record the metrics of optimizer step `step`; steps count from 1."""
        self.history.append({"step": step, **metrics})
        log.info("step %d: %s", step, ", ".join(f"{k} {v:.4g}" for k, v in metrics.items()))
