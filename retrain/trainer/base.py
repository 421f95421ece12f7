"""BaseTrainer: one object that trains, goes on training, saves and loads, by the one pipe.

- Nothing loads until training begins; whatever is wrong with the arguments is told before that.
- Each run of the pipe has a run directory of its own. The next one begins from the newest
  checkpoint of the last, so weights, optimizer and step count go on; step limits are absolute.
- One training at a time; `fit` is `train` for callers without an event loop.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from retrain.assembly import Given, Parts, assemble
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.errors import CheckpointError, NotFoundError, RewardError, shown
from retrain.observe.callbacks import Callback, Callbacks, TrainingResult
from retrain.pipeline import train
from retrain.pipeline.checkpoint import DATA, MANIFEST, MODEL, changes, copy, verified
from retrain.pipeline.run import Run
from retrain.trainer.hooks import Gate, Hooks
from retrain.types import Metrics

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What one training is asked to do."""

    dataset: Any = None
    reward_fn: Any = None
    environment: Any = None
    max_steps: int | None = None
    max_epochs: int | None = None
    callbacks: Sequence[Callback] = ()


@dataclass(slots=True)
class Plan:
    """A training that is ready to begin: everything is checked, nothing is loaded."""

    config: RunConfig
    given: Given
    max_steps: int | None
    max_epochs: int | None
    close: Sequence[Callable[[], None]] = ()
    review: Any = None
    tweak: Callable[[Parts], Parts] = field(default=lambda parts: parts)


class BaseTrainer(ABC):
    """What all trainers can do. A subclass says how a Task becomes a Plan."""

    scored: ClassVar[bool] = True
    """Whether it learns from rewards."""

    def __init__(self) -> None:
        self._step = 0
        self._start: Path | None = None
        self._metrics: Metrics = {}
        self._hooks: Hooks | None = None
        self._busy = False
        self._reward_error: RewardError | None = None
        self._stepping: tuple[Gate, asyncio.Task[TrainingResult]] | None = None

    # --- training

    async def train(self, *task: Any, **keys: Any) -> TrainingResult:
        """Train to the end; a subclass gives its arguments. Raises what `train` of retrain does."""
        return await self._train(Task(*task, **keys))

    async def step(self, *task: Any, **keys: Any) -> Metrics:
        """Take one optimizer step and return its metrics.

        The first call opens the run, with the arguments of `train`; the model stays loaded until
        `close`. Raises RuntimeError when the run has ended.
        """
        if self._stepping is None:
            gate = Gate()
            running = asyncio.create_task(self._train(Task(*task, **keys), gate), name="trainer")
            self._stepping = gate, running
        gate, running = self._stepping
        gate.permits.release()
        getting = asyncio.create_task(gate.done.get())
        try:
            await asyncio.wait([getting, running], return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                return getting.result()
        finally:
            getting.cancel()
        self._stepping = None
        result = await running
        raise RuntimeError(
            f"the run has ended after {result.total_steps} steps ({result.status}): "
            "raise max_steps to go on"
        )

    async def close(self) -> TrainingResult | None:
        """End what `step` opened, with a checkpoint; None when nothing is open."""
        if self._stepping is None:
            return None
        (gate, running), self._stepping = self._stepping, None
        if self._hooks is not None and self._hooks.run is not None:
            self._hooks.request_stop()
        gate.permits.release()
        return await running

    def request_stop(self) -> None:
        """End after the step under way, with a checkpoint. Callable from a hook or any thread."""
        if self._hooks is None:
            raise RuntimeError("request_stop: nothing is being trained")
        self._hooks.request_stop()

    # --- checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer, RNGs, counters and the position in the data to the folder.

        During training (in a hook) it's written at the next step's boundary. Raises RuntimeError
        before anything was trained, FileExistsError when the folder holds something else.
        """
        target = Path(path).expanduser()
        if target.is_file() or (
            target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).exists()
        ):
            raise FileExistsError(f"{target} exists and is no checkpoint: choose another folder")
        if self._hooks is not None:
            self._hooks.saves.append(target)
        elif self._start is None:
            raise RuntimeError("save_checkpoint: nothing was trained or loaded yet; call fit first")
        else:
            copy(self._start, target)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> None:
        """Make the next training begin from a checkpoint; `current_step` is then the saved one.

        With `strict=False` another algorithm's checkpoint of the same model is taken too. Raises
        NotFoundError, CheckpointError for a torn one or another model, RuntimeError in training.
        """
        if self._busy:
            raise RuntimeError("load_checkpoint: this trainer is training; wait until it's done")
        source = Path(path).expanduser()
        if not source.exists():
            raise NotFoundError(f"there is no checkpoint {source}")
        saved = verified(source)
        keys = (*MODEL, "algorithm.type") if strict else MODEL
        changed = changes(saved.config, self._run_config(), keys)
        if changed:
            raise CheckpointError(
                f"{source} is of another training: {'; '.join(changed)}"
                + ("" if any(c.startswith(MODEL) for c in changed) else "; strict=False takes it")
            )
        self._start, self._step, self._metrics = source, saved.step, {}

    # --- what it is

    @property
    def current_step(self) -> int:
        """Optimizer steps done since training began, loaded ones included."""
        run = self._hooks.run if self._hooks is not None else None
        return run.step if run is not None else self._step

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """The resolved configuration, JSON-serialisable; a copy."""

    @abstractmethod
    def _run_config(self) -> RunConfig:
        """The run's configuration, before it is known what to train on. Raises ConfigError."""

    @abstractmethod
    def _plan(self, task: Task) -> Plan:
        """What a task comes to. Raises ConfigError or TypeError; loads no model."""

    def _check_run(self, run: Run) -> None:  # noqa: B027 - a default, not a forgotten body
        """A last look once the backend is open; may raise."""

    # --- the run

    def _fit(self, task: Task) -> TrainingResult:
        if _in_a_loop():
            raise RuntimeError(
                f"{type(self).__name__}.fit() can't be called inside a running event loop: "
                "write `await trainer.train(...)` with the same arguments"
            )
        return asyncio.run(self._train(task))

    async def _train(self, task: Task, gate: Gate | None = None) -> TrainingResult:
        with self._alone():
            hooks = Hooks(self, _callbacks(task.callbacks), gate)
            for name in ("max_steps", "max_epochs"):
                _check_limit(name, getattr(task, name))
            plan = self._plan(task)
            config, parts = self._finished_plan(plan)
            self._hooks, self._reward_error = hooks, None
            try:
                running = train(config, callbacks=[hooks], start_from=self._start, parts=parts)
                result = await _unwrapped(running)
            finally:
                self._hooks = None
                if hooks.newest is not None:
                    self._step, self._start = hooks.newest
                for close in plan.close:
                    close()
            if self._reward_error is not None:
                raise self._reward_error
            return self._finished(result)

    def _finished_plan(self, plan: Plan) -> tuple[RunConfig, Parts]:
        """The plan's parts, and its config with the number of steps that the limits come to."""
        parts = replace(plan.tweak(assemble(plan.config, plan.given)), review=plan.review)
        steps = self._total_steps(plan, len(parts.prompts))
        train_section = plan.config.train.model_copy(update={"total_train_steps": steps})
        update = {"train": train_section, "run_dir": _free_folder(plan.config)}
        config = plan.config.model_copy(update=update)
        return config, replace(parts, config=config)

    def _total_steps(self, plan: Plan, rows: int) -> int:
        """The step to end at: of the limits, whichever comes first."""
        limits = [] if plan.max_steps is None else [plan.max_steps]
        if plan.max_epochs is not None:
            steps = math.ceil(plan.max_epochs * rows / plan.config.train.groups_per_step)
            limits.append(self._data_since(plan.config) + steps)
        return min(limits, default=plan.config.train.total_train_steps)

    def _data_since(self, config: RunConfig) -> int:
        """The step after which training on these prompts began."""
        if self._start is None:
            return 0
        saved = verified(self._start)
        if changes(saved.config, config, DATA):
            return saved.step
        since: int = saved.counters.get("data_since", 0)
        return since

    def _reward_failed(self, error: RewardError) -> None:
        """The first failure ends training, and is raised when it has ended."""
        if self._reward_error is None:
            self._reward_error = error
            self.request_stop()

    def _shown(self, metrics: Mapping[str, float]) -> Metrics:
        """A step's metrics with the seeds' name for the mean reward beside ours."""
        if self.scored and "reward/mean" in metrics:
            return {**metrics, "mean_reward": metrics["reward/mean"]}
        return dict(metrics)

    def _finished(self, result: TrainingResult) -> TrainingResult:
        if result.metrics:
            self._metrics = self._shown(result.metrics)
        return replace(result, metrics=dict(self._metrics))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if self._busy:
            raise RuntimeError(
                f"this {type(self).__name__} is training already: wait until it's done, or make "
                "another trainer"
            )
        self._busy = True
        try:
            yield
        finally:
            self._busy = False


def check_model(config: RunConfig) -> None:
    """Raises ConfigError for a model that isn't one, NotFoundError for a missing folder."""
    find_model(config.model, config.base_dir)


def _in_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _callbacks(callbacks: Any) -> Sequence[Callback]:
    """The list that was given, checked; raises TypeError."""
    if callbacks is None:
        return ()
    if isinstance(callbacks, Callback | type) or not isinstance(callbacks, Sequence):
        raise TypeError(f"callbacks: got {shown(callbacks)}, expected a list of Callback instances")
    Callbacks(callbacks)
    return callbacks


def _check_limit(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {shown(value)}, expected a whole number")
    if value < 0:
        raise ValueError(f"{name}: got {value}, expected at least 0 (0 trains nothing)")


def _free_folder(config: RunConfig) -> Path:
    """The run directory: the given or usual one, else the first numbered one that is free."""
    wanted = config.run_dir or Path("runs") / (config.name or "run")
    folder, number = wanted, 1
    while (folder / "events.jsonl").exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


async def _unwrapped(running: Coroutine[Any, Any, T]) -> T:
    """Await it; a lone error inside groups is raised itself, as a caller's `except` expects."""
    try:
        return await running
    except BaseExceptionGroup as group:
        error: BaseException = group
        while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        raise error from error.__cause__
