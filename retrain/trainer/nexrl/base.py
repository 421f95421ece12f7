"""NexRL's BaseTrainer: a blocking `train(trajectories)`, and a thread that calls it in a loop.

Building a trainer does no I/O; the backend opens when it is first needed. `service` runs the
optimizer: it is one of retrain's adapters, with its losses, schedules, clipping and checkpoints.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

from retrain.errors import ConfigError, DeadlineError, RunError
from retrain.trainer.nexrl.metrics import floats, log_rollout_metrics
from retrain.trainer.nexrl.pool import ActivityTracker, Pool, WeightSyncController
from retrain.trainer.nexrl.service import TrainingService
from retrain.trainer.nexrl.settings import RecipeSection, RecipeSettings, read_settings
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories
from retrain.types import Metrics

STOP_SECONDS = 60.0


class BaseTrainer(ABC):
    """Base class of NexRL's trainers, and a context manager that stops the trainer."""

    algorithm_keys: ClassVar[tuple[str, ...] | None] = None
    """Keys of `algorithm` that this class reads; any other is an error.

    None means any key. A subclass doesn't inherit the check, since it may read more keys.
    """

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is any mapping: the `trainer:` section, or a whole recipe that has one.

        `self._config` is its `trainer:` section, with attribute and item access. Raises ConfigError
        with every problem of the config.
        """
        self.settings: RecipeSettings = read_settings(config)
        self._config: RecipeSection = self.settings.section
        known = vars(type(self)).get("algorithm_keys")
        unknown = [] if known is None else [k for k in self._config.algorithm if k not in known]
        if unknown:
            raise ConfigError(
                f"trainer.algorithm: {type(self).__name__} doesn't read {', '.join(unknown)}, "
                f"only {', '.join(known or ())}; a custom trainer can read any key"
            )
        self.service: TrainingService = self._make_service(self.settings)
        """The backend: opened on first use."""
        self._total_train_steps = self.settings.run.train.total_train_steps
        self._train_step = 0
        self._stop_event = threading.Event()
        self._trajectory_pool: Pool | None = None
        self._weight_sync_controller: WeightSyncController | None = None
        self._activity_tracker = ActivityTracker()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    @abstractmethod
    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Take one optimizer step on the trajectories and return its metrics."""

    def initialize_workers(self) -> None:
        """Open the backend now; otherwise the first step does. Raises ConfigError, AdapterError."""
        self.service.open()

    def set_module_references(
        self,
        trajectory_pool: Pool,
        weight_sync_controller: WeightSyncController | None = None,
    ) -> None:
        """Set where `run` gets its batches, and what it notifies of new weights."""
        self._trajectory_pool = trajectory_pool
        self._weight_sync_controller = weight_sync_controller

    # --- the loop

    def run(self) -> None:
        """Start the training loop in a thread. It ends after `total_train_steps`, or at `stop`.

        Raises RunError when there is no pool, or when the loop is already running.
        """
        if self._trajectory_pool is None:
            raise RunError("run() has no pool: call set_module_references(pool, ...) first")
        if self._thread is not None:
            raise RunError("the training loop is already running: call stop() first")
        self._stop_event.clear()
        self._thread = threading.Thread(target=self._run, name="retrain-trainer", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the loop ends. Raises the loop's exception, or DeadlineError on timeout."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"the training loop is still running after {timeout} s, at step "
                    f"{self._train_step} of {self._total_train_steps}"
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the loop after the current step and close the backend.

        Raises the loop's exception, or DeadlineError after `timeout` seconds: the step takes
        longer, or the loop waits for a pool that has no `close`.
        """
        self._stop_event.set()
        close = getattr(self._trajectory_pool, "close", None)
        if self._thread is not None and callable(close):
            close()
        try:
            self.wait(timeout)
        finally:
            close = getattr(self.service, "close", None)
            if callable(close):  # a custom holder may have none
                close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._main_loop()
        except (Exception, SystemExit) as error:  # noqa: BLE001 - wait() and stop() raise it
            self._failure = error

    def _main_loop(self) -> None:
        pool = self._trajectory_pool
        assert pool is not None
        while not self._stop_event.is_set() and self._train_step < self._total_train_steps:
            trajectories = pool.get_batch_blocking()
            if not trajectories:
                return
            self.advance(trajectories)

    def advance(self, trajectories: Sequence[Trajectory]) -> Metrics:
        """Take one step: train, count the step, log its metrics as floats, notify of new weights.

        `_train_step` is set after `train`, so a subclass whose `train` counts too changes nothing.
        """
        step = self._train_step + 1
        metrics = floats(self.train(as_trajectories(trajectories)))
        self._train_step = step
        self._activity_tracker.log_train_step(metrics, step)
        if self._weight_sync_controller is not None:
            self._weight_sync_controller.train_worker_notify_weight_update()
        return metrics

    # --- the backend

    def _make_service(self, settings: RecipeSettings) -> TrainingService:
        return TrainingService(settings.run)

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._train_step

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights and optimizer to `folder`."""
        self.service.save(Path(folder))

    def load_checkpoint(self, folder: str | Path, step: int = 0) -> None:
        """Continue from a checkpoint, before the first step. `step` is the number of steps done."""
        self.service.load(Path(folder))
        self._train_step = step

    # --- for subclasses

    @property
    def _pad_token_id(self) -> int:
        return self.service.pad_token_id

    def _log_rollout_metrics(self, batch: Any) -> dict[str, Any]:
        """The rollout metrics of a batch or of trajectories; `train` adds those of its own."""
        found = getattr(batch, "metadata", {"trajectories": batch}).get("trajectories", ())
        return log_rollout_metrics(found, {})
