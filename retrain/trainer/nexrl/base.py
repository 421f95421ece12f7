"""NexRL's BaseTrainer: a blocking `train(trajectories)`, and a loop in a thread that calls it.

A trainer is built from its config alone, without any I/O; the backend opens with the first thing
that needs it. Who counts the steps is the loop alone: a subclass whose `train` counts too changes
nothing.

The trainer doesn't run the optimizer: `service` does, which is one of our adapters, so that losses,
schedules, clipping and checkpoints are those of every other run.
"""

from __future__ import annotations

import difflib
import threading
from abc import ABC, ABCMeta, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from retrain.config import RunConfig
from retrain.errors import ConfigError, DeadlineError, RunError
from retrain.trainer.nexrl.metrics import floats, log_rollout_metrics
from retrain.trainer.nexrl.pool import ActivityTracker, Pool, WeightSyncController
from retrain.trainer.nexrl.service import TrainingService
from retrain.trainer.nexrl.settings import Section, Settings, as_section, read_settings
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories
from retrain.types import Metrics

STOP_SECONDS = 60.0


class _FromAnyMapping(ABCMeta):
    """Hands every constructor, a subclass's included, its config as a Section."""

    def __call__(cls, config: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
        return super().__call__(as_section(config), *args, **keywords)


class BaseTrainer(ABC, metaclass=_FromAnyMapping):
    """What all of NexRL's trainers share; a context manager that stops it."""

    algorithm_keys: ClassVar[tuple[str, ...] | None] = None
    """Keys of `algorithm` that this very class reads; None: any, they are a custom trainer's."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        """`config` is any mapping: the `trainer:` section, or a whole recipe that holds one.

        Raises ConfigError listing everything in it that can't be honoured.
        """
        self._settings: Settings = read_settings(config)
        self._config: Section = self._settings.section
        self._total_train_steps = self._settings.run.train.total_train_steps
        self._train_step = 0
        self._stop_event = threading.Event()
        self._trajectory_pool: Pool | None = None
        self._weight_sync_controller: WeightSyncController | None = None
        self._activity_tracker = ActivityTracker()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._service: TrainingService | None = None
        self._check_algorithm_keys()

    @abstractmethod
    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Train on trajectories; the step's metrics."""

    def initialize_workers(self) -> None:
        """Open the backend now rather than with the first step; raises ConfigError, AdapterError"""
        self.service.open()

    def set_module_references(
        self,
        trajectory_pool: Pool,
        weight_sync_controller: WeightSyncController | None = None,
        activity_tracker: ActivityTracker | None = None,
    ) -> None:
        """Where `run` gets its batches, and who is told of new weights and of metrics."""
        self._trajectory_pool = trajectory_pool
        self._weight_sync_controller = weight_sync_controller
        self._activity_tracker = activity_tracker or self._activity_tracker

    # --- the loop

    def run(self) -> None:
        """Start the training loop in a thread; it ends after `total_train_steps`, or by `stop`.

        Raises RunError when there is no pool, or a loop is running already.
        """
        if self._trajectory_pool is None:
            raise RunError("run() needs batches: call set_module_references(pool, ...) first")
        if self._thread is not None:
            raise RunError("the training loop is running already: call stop() first")
        self._stop_event.clear()
        self._thread = threading.Thread(target=self._run, name="retrain-trainer", daemon=True)
        self._thread.start()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the loop ends by itself; raises what it failed with, or DeadlineError."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise DeadlineError(
                    f"the training loop has not ended within {timeout} s: it is at step "
                    f"{self._train_step} of {self._total_train_steps}"
                )
            self._thread = None
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def stop(self, timeout: float = STOP_SECONDS) -> None:
        """End the loop after the step under way and free the backend.

        Raises what the loop failed with; DeadlineError when it doesn't end, because the step takes
        too long, or a pool without `close` gives it no batch.
        """
        self._stop_event.set()
        close = getattr(self._trajectory_pool, "close", None)
        if self._thread is not None and callable(close):
            close()
        try:
            self.wait(timeout)
        finally:
            if self._service is not None:
                self._service.close()

    def __enter__(self) -> Any:  # Self, which a metaclass's __call__ hides from subclasses
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._main_loop()
        except BaseException as error:  # noqa: BLE001 - wait() and stop() raise it
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
        """One step: train, count it, log its metrics as floats, tell of the new weights."""
        step = self._train_step + 1
        metrics = floats(self.train(as_trajectories(trajectories)))
        self._train_step = step
        self._activity_tracker.log_train_step(metrics, step)
        if self._weight_sync_controller is not None:
            self._weight_sync_controller.train_worker_notify_weight_update()
        return metrics

    # --- the backend

    @property
    def service(self) -> TrainingService:
        """Who executes the steps; made when it is first asked for, opened when first used."""
        if self._service is None:
            self._service = TrainingService(self._settings.run)
        return self._service

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self._train_step

    @property
    def run_config(self) -> RunConfig:
        """The run that the config describes."""
        return self._settings.run

    @property
    def backend(self) -> str:
        """`self-hosted`, `tinker` or `weaver`."""
        return self._settings.service.backend

    def save_checkpoint(self, folder: str | Path) -> None:
        """Write weights and optimizer so that `load_checkpoint` continues from here."""
        self.service.save(Path(folder))

    def load_checkpoint(self, folder: str | Path, step: int = 0) -> None:
        """Continue from a checkpoint, before the first step; `step` is what has been done."""
        self.service.load(Path(folder))
        self.resume_at(step)

    def resume_at(self, step: int) -> None:
        """Count on from `step`."""
        self._train_step = step

    # --- for subclasses

    @property
    def _pad_token_id(self) -> int:
        return self.service.pad_token_id

    def _log_rollout_metrics(
        self, trajectories: Sequence[Mapping[str, Any]], metrics: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """`log_rollout_metrics` into `metrics`, or a dict of its own."""
        return log_rollout_metrics(trajectories, {} if metrics is None else metrics)

    def _tokenised(self, trajectories: Sequence[Mapping[str, Any]]) -> list[Trajectory]:
        """With `tokens` and `loss_mask`; a text's are written into it, so it's encoded once."""
        made = as_trajectories(trajectories)
        for trajectory in made:
            if trajectory.get("tokens") is None or trajectory.get("loss_mask") is None:
                trajectory["tokens"], trajectory["loss_mask"] = self.service.encode(trajectory)
        return made

    def _check_algorithm_keys(self) -> None:
        """Of a class that lists its keys; not of its subclasses, which may read more."""
        known = self.algorithm_keys if "algorithm_keys" in vars(type(self)) else None
        problems = []
        for key in self._config.algorithm:
            if known is not None and key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                problems.append(
                    f"trainer.algorithm.{key}: {type(self).__name__} does not read it{hint} "
                    f"(it reads {', '.join(known)}; a custom trainer reads what it likes)"
                )
        if problems:
            raise ConfigError(*problems)
