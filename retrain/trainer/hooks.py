"""What stands between the pipe and a trainer's callbacks: they see the trainer as `trainer`.

It also keeps the trainer's own account of the run: the newest checkpoint, the best one where
nothing is evaluated, checkpoints asked for in a hook (written at the next step's boundary), and the
gate that `step()` opens once a step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from retrain.observe.callbacks import Callback, Callbacks, TrainingResult
from retrain.observe.callbacks import Run as RunFace
from retrain.pipeline.checkpoint import copy
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.run import Run
from retrain.types import Metrics


@dataclass(frozen=True, slots=True)
class Progress:
    """Where training stands: what the next run goes on from."""

    step: int = 0
    checkpoint: Path | None = None
    metrics: Metrics = field(default_factory=dict)
    """The last step's."""


class Gate:
    """Lets the learner take one step at a time."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.done: asyncio.Queue[Metrics] = asyncio.Queue()


class Hooks(Callback):
    """The pipe's one callback of a trainer's run."""

    def __init__(
        self,
        trainer: RunFace,
        callbacks: Sequence[Callback],
        *,
        progress: Progress,
        scored: bool,
        check: Callable[[Run], None],
        gate: Gate | None = None,
    ) -> None:
        self._trainer = trainer
        self._callbacks = Callbacks(callbacks)
        self._scored = scored
        self._check = check
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        self.progress = progress
        """Until the first checkpoint, where this run began."""
        self._began_from = progress.checkpoint
        self.run: Run | None = None
        self.saves: list[Path] = []
        """Where checkpoints are to be copied to at the next boundary."""

    def request_stop(self) -> None:
        """From any thread: end after the step under way, with a checkpoint."""
        if self.run is None or self._loop is None:
            raise RuntimeError("request_stop: nothing is being trained")
        try:
            on_loop = asyncio.get_running_loop() is self._loop
        except RuntimeError:
            on_loop = False
        if on_loop:
            self.run.request_stop()
        else:
            self._loop.call_soon_threadsafe(self.run.request_stop)

    async def on_train_begin(self, trainer: RunFace) -> None:
        self.run, self._loop = cast("Run", trainer), asyncio.get_running_loop()
        self._check(self.run)
        await self._callbacks.on_train_begin(self._trainer)

    async def on_epoch_begin(self, trainer: RunFace, epoch: int) -> None:
        await self._callbacks.on_epoch_begin(self._trainer, epoch)

    async def on_step_begin(self, trainer: RunFace, step: int) -> None:
        if self._gate is not None and self.run is not None:
            with self.run.watchdog.waiting():
                await self._gate.permits.acquire()
        await self._callbacks.on_step_begin(self._trainer, step)

    async def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        shown = self._shown(metrics)
        await self._callbacks.on_step_end(self._trainer, step, shown)
        if self.saves:
            await self._save()
        if self._gate is not None:
            self._gate.done.put_nowait(shown)

    async def on_epoch_end(self, trainer: RunFace, epoch: int, metrics: Metrics) -> None:
        await self._callbacks.on_epoch_end(self._trainer, epoch, self._shown(metrics))

    async def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        await self._callbacks.on_eval_end(self._trainer, step, metrics)

    async def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> None:
        self.progress = replace(self.progress, step=step, checkpoint=path)
        assert self.run is not None
        if self.run.config.eval is None:
            self._mark_best(self.run, step)
        await self._callbacks.on_checkpoint(self._trainer, step, path)

    async def on_train_end(self, trainer: RunFace, result: TrainingResult) -> None:
        if self.progress.checkpoint != self._began_from:
            await self._copy()
        await self._callbacks.on_train_end(self._trainer, self.finished(result))

    def finished(self, result: TrainingResult) -> TrainingResult:
        """The result with a trainer's metrics: those of the last step of all training."""
        if result.metrics:
            self.progress = replace(self.progress, metrics=self._shown(result.metrics))
        return replace(result, metrics=dict(self.progress.metrics))

    def _shown(self, metrics: Mapping[str, float]) -> Metrics:
        """A step's metrics with the seeds' name for the mean reward beside ours."""
        if self._scored and "reward/mean" in metrics:
            return {**metrics, "mean_reward": metrics["reward/mean"]}
        return dict(metrics)

    def state_dict(self) -> dict[str, Any]:
        return {"callbacks": self._callbacks.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._callbacks.restore(state["callbacks"])

    async def _save(self) -> None:
        """Checkpoint this step, spare it from pruning, and copy it to where it was asked for."""
        assert self.run is not None
        # a service's checkpoint must outlive the copy's origin
        self.run.checkpoints.spared.add(self.run.step)
        await checkpoint(self.run)
        await self._copy()

    async def _copy(self) -> None:
        assert self.progress.checkpoint is not None
        targets, self.saves = self.saves, []
        for target in targets:
            await asyncio.to_thread(copy, self.progress.checkpoint, target)

    def _mark_best(self, run: Run, step: int) -> None:
        """Of the checkpoints, the one whose step had the best metric; ties go to the newer."""
        best = run.checkpoints.best()
        score = self._score(run.record.history, step)
        if not math.isfinite(score):
            return
        if best is None or score >= self._score(run.record.history, int(best.name[5:])):
            run.mark_best(step)

    def _score(self, history: Sequence[Mapping[str, float]], step: int) -> float:
        row: Mapping[str, Any] = next((r for r in reversed(history) if r["step"] == step), {})
        if self._scored:
            return float(row.get("reward/mean", -math.inf))
        return -float(row.get("loss", math.inf))
