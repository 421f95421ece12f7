"""BaseTrainer: an object that trains, continues training, saves and loads, on top of the pipe.

- Nothing loads before training begins, and every problem with the arguments is reported first.
- Each training is a run with a run directory of its own. It starts from the newest checkpoint of
  the one before, so weights, optimizer and step count continue; step limits are absolute.
- A trainer does one training at a time.
"""

from __future__ import annotations

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, ClassVar, Concatenate, ParamSpec, TypeVar, cast

from pydantic import AfterValidator, Field

from retrain.assembly import Given, Parts, assemble
from retrain.config import RunConfig
from retrain.errors import CheckpointError, NotFoundError, RewardError, shown
from retrain.observe.callbacks import Callback, Callbacks, RunFace, TrainingResult
from retrain.observe.naming import unused_folder
from retrain.pipeline import train
from retrain.pipeline.checkpoint import DATA, MODEL, changes, check_free, copy, verified
from retrain.scoring import RewardCalculator, Scorer, WeightedReward
from retrain.trainer.hooks import Hooks, ResumePoint, StepPermits
from retrain.types import Metrics

P = ParamSpec("P")
S = TypeVar("S")
T = TypeVar("T")


def _single(size: int) -> int:
    if size > 1:
        raise ValueError(
            "retrain does not split tensors across GPUs, and a service distributes its model "
            "itself: set it to 1; on your own GPUs, backend.processes trains in several "
            "processes, and backend.sharding: full shards a large model across them"
        )
    return size


Single = Annotated[int, Field(ge=1), AfterValidator(_single)]
"""The number of devices among which each tensor is split: 1."""


@dataclass(frozen=True, slots=True)
class Task:
    """The arguments of one training."""

    dataset: Any = None
    reward_fn: Any = None
    environment: Any = None
    max_steps: int | None = None
    max_epochs: int | None = None
    callbacks: Sequence[Callback] | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """A training that is ready to begin: everything is checked, nothing is loaded."""

    config: RunConfig
    given: Given
    max_steps: int | None = None
    max_epochs: int | None = None
    close: Callable[[], None] = lambda: None
    """Called when training has ended."""


def blocking(
    train: Callable[Concatenate[S, P], Coroutine[Any, Any, T]],
) -> Callable[Concatenate[S, P], T]:
    """`train` as a method for code without an event loop.

    In a running event loop it raises RuntimeError.
    """

    @wraps(train)
    def fit(self: S, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                f"{type(self).__name__}.fit() can't be called inside a running event loop; "
                "write `await trainer.train(...)` with the same arguments"
            )
        return asyncio.run(train(self, *args, **kwargs))

    return fit


class BaseTrainer(ABC):
    """Base class of trainers. A subclass makes a Plan of a Task."""

    scored: ClassVar[bool] = True
    """Whether it learns from rewards."""
    console: bool = True
    """Whether trainings print their progress."""

    def __init__(self) -> None:
        self._progress = ResumePoint()
        self._hooks: Hooks | None = None
        self._busy = False
        self._reward_error: RewardError | None = None
        self._stepping: tuple[StepPermits, asyncio.Task[TrainingResult]] | None = None

    # --- training

    async def train(self, *task: Any, **keys: Any) -> TrainingResult:
        """Train to the end. Subclasses define the arguments. Raises the errors of retrain.train."""
        return await self._train(Task(*task, **keys))

    async def step(self, *task: Any, **keys: Any) -> Metrics:
        """Take one optimizer step and return its metrics.

        The first call opens the run, with the arguments of `train`. The model stays loaded until
        `close`. Raises RuntimeError when the run has ended.
        """
        if self._stepping is None:
            gate = StepPermits()
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
            f"the run has ended after {result.total_steps} steps ({result.status}); increase "
            "max_steps to continue"
        )

    async def close(self) -> TrainingResult | None:
        """End the run that `step` opened, with a checkpoint. Returns None if no run is open."""
        if self._stepping is None:
            return None
        (gate, running), self._stepping = self._stepping, None
        if self._hooks is not None and self._hooks.run is not None:
            self._hooks.request_stop()
        gate.permits.release()
        return await running

    def request_stop(self) -> None:
        """End after the current step, with a checkpoint. May be called in a hook or any thread."""
        if self._hooks is None:
            raise RuntimeError("request_stop: no training is running")
        self._hooks.request_stop()

    # --- checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Write weights, optimizer, RNGs, counters and the position in the data to a folder.

        In a hook, the checkpoint is written at the end of the step. Raises RuntimeError before any
        training, FileExistsError when the folder has other contents.
        """
        target = Path(path).expanduser()
        check_free(target)
        if self._hooks is not None:
            self._hooks.saves.append(target)
        elif self._progress.checkpoint is None:
            raise RuntimeError("save_checkpoint: nothing was trained or loaded; call fit first")
        else:
            copy(self._progress.checkpoint, target)

    def load_checkpoint(self, path: str | Path, strict: bool = True) -> None:
        """Start the next training from a checkpoint. Sets `current_step` to the saved step.

        `strict=False` accepts a checkpoint of the same model by another algorithm. Raises
        NotFoundError for a missing folder, CheckpointError for an incomplete checkpoint or another
        model, RuntimeError during training.
        """
        if self._busy:
            raise RuntimeError("load_checkpoint: this trainer is training; wait until it is done")
        source = Path(path).expanduser()
        if not source.exists():
            raise NotFoundError(f"no checkpoint in {source}: the folder doesn't exist")
        saved = verified(source)
        keys = (*MODEL, "algorithm.type") if strict else MODEL
        changed = changes(saved.config, self._run_config(), keys)
        if changed:
            raise CheckpointError(
                f"{source} belongs to another training: {'; '.join(changed)}"
                + ("" if any(c.startswith(MODEL) for c in changed) else "; strict=False accepts it")
            )
        self._progress = ResumePoint(saved.step, source)

    # --- state

    @property
    def current_step(self) -> int:
        """Optimizer steps since training began, with those of a loaded checkpoint."""
        run = self._hooks.run if self._hooks is not None else None
        return run.step if run is not None else self._progress.step

    @property
    @abstractmethod
    def config(self) -> dict[str, Any]:
        """A copy of the resolved configuration, as JSON values."""

    @abstractmethod
    def _run_config(self) -> RunConfig:
        """The run's configuration, with a placeholder for the data. Raises ConfigError."""

    @abstractmethod
    def _plan(self, task: Task) -> Plan:
        """The training of a task. Loads no model. Raises ConfigError, TypeError or ValueError."""

    # --- the run

    async def _train(self, task: Task, gate: StepPermits | None = None) -> TrainingResult:
        if self._busy:
            raise RuntimeError(
                f"this {type(self).__name__} is already training; wait until it is done, or make "
                "another trainer"
            )
        self._busy = True
        try:
            return await self._run(task, gate)
        finally:
            self._busy = False

    async def _run(self, task: Task, gate: StepPermits | None) -> TrainingResult:
        callbacks = Callbacks(task.callbacks or ())
        for name in ("max_steps", "max_epochs"):
            limit = getattr(task, name)
            if limit is not None and (type(limit) is not int or limit < 0):
                raise ValueError(f"{name}: got {shown(limit)}, expected an integer >= 0")
        plan = self._plan(task)
        try:
            config, parts = self._finished_plan(plan)
            start = self._progress.checkpoint
            self._hooks = hooks = Hooks(
                cast("RunFace", self),  # callbacks of a trainer's run get the trainer
                callbacks,
                progress=self._progress,
                scored=self.scored,
                gate=gate,
            )
            self._reward_error = None
            running = train(
                config, callbacks=[hooks], start_from=start, parts=parts, console=self.console
            )
            try:
                result = await running
            finally:
                self._hooks, self._progress = None, hooks.progress
        finally:
            plan.close()
        if self._reward_error is not None:
            raise self._reward_error
        return hooks.finished(result)

    def _finished_plan(self, plan: Plan) -> tuple[RunConfig, Parts]:
        """The plan's parts, and its config with a run directory and the number of steps."""
        parts = assemble(plan.config, plan.given)
        steps = self._total_steps(plan, parts.prompts.epoch_length)
        train_section = plan.config.train.model_copy(update={"total_train_steps": steps})
        update = {"train": train_section, "run_dir": unused_folder(plan.config)}
        config = plan.config.model_copy(update=update)
        return config, replace(parts, config=config)

    def _total_steps(self, plan: Plan, rows: int) -> int:
        """The last step: the limit that is reached first."""
        limits = [] if plan.max_steps is None else [plan.max_steps]
        if plan.max_epochs is not None:
            steps = math.ceil(plan.max_epochs * rows / plan.config.train.groups_per_step)
            limits.append(self._data_since(plan.config) + steps)
        return min(limits, default=plan.config.train.total_train_steps)

    def _data_since(self, config: RunConfig) -> int:
        """The step after which training on these prompts began."""
        start = self._progress.checkpoint
        if start is None:
            return 0
        saved = verified(start)
        if changes(saved.config, config, DATA):
            return saved.step
        since: int = saved.counters.get("data_since", 0)
        return since

    def _reward_failed(self, error: RewardError) -> None:
        """Stop at the first failure, which is raised when training has ended."""
        if self._reward_error is None:
            self._reward_error = error
            self.request_stop()


def one_reward(name: str, calculator: RewardCalculator, config: RunConfig) -> Scorer:
    return Scorer(
        [WeightedReward(name, 1.0, calculator)],
        deadlines=config.deadlines,
        concurrency=config.rollout.reward_concurrency,
    )
