"""The pipe's callback in a trainer's run. It calls the trainer's callbacks, with the trainer.

It also keeps what the trainer needs of the run: the newest checkpoint, the best one if the run has
no evaluation, the checkpoints to copy at the end of the step, and the gate that `step()` opens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from retrain.observe.callbacks import Callbacks, Nested, RunFace, TrainingResult
from retrain.pipeline.checkpoint import copy
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.run import Run
from retrain.supervision.boundary import adapter_call
from retrain.types import Metrics


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """How far training has come: where the next run starts."""

    step: int = 0
    checkpoint: Path | None = None
    metrics: Metrics = field(default_factory=dict)
    """Of the last step."""


class StepPermits:
    """Makes the pipe wait before each step until `permits` is released."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.done: asyncio.Queue[Metrics] = asyncio.Queue()


class Hooks(Nested):
    """The only callback that the pipe calls in a trainer's run."""

    def __init__(
        self,
        trainer: RunFace,
        callbacks: Callbacks,
        *,
        progress: ResumePoint,
        scored: bool,
        gate: StepPermits | None = None,
    ) -> None:
        self._trainer = trainer
        self._callbacks = callbacks
        self._scored = scored
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        self.progress = progress
        """Before the first checkpoint, where this run started."""
        self._began_from = progress.checkpoint
        self.run: Run | None = None
        self.saves: list[Path] = []
        """Folders to copy a checkpoint to at the end of the step."""

    def request_stop(self) -> None:
        """End after the current step, with a checkpoint. May be called from any thread."""
        if self.run is None or self._loop is None:
            raise RuntimeError("request_stop: no training is running")
        if asyncio._get_running_loop() is self._loop:
            self.run.request_stop()
        else:
            self._loop.call_soon_threadsafe(self.run.request_stop)

    async def on_train_begin(self, trainer: RunFace) -> None:
        self.run, self._loop = cast("Run", trainer), asyncio.get_running_loop()
        await self._callbacks.call("on_train_begin", self._trainer)

    async def on_epoch_begin(self, trainer: RunFace, epoch: int) -> None:
        await self._callbacks.call("on_epoch_begin", self._trainer, epoch)

    async def on_step_begin(self, trainer: RunFace, step: int) -> None:
        if self._gate is not None and self.run is not None:
            with self.run.watch.waiting():
                await self._gate.permits.acquire()
        await self._callbacks.call("on_step_begin", self._trainer, step)

    async def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        shown = self._shown(metrics)
        await self._callbacks.call("on_step_end", self._trainer, step, shown)
        if self.saves:
            await self._save()
        if self._gate is not None:
            self._gate.done.put_nowait(shown)

    async def on_epoch_end(self, trainer: RunFace, epoch: int, metrics: Metrics) -> None:
        await self._callbacks.call("on_epoch_end", self._trainer, epoch, self._shown(metrics))

    async def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        await self._callbacks.call("on_eval_end", self._trainer, step, metrics)

    async def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> None:
        self.progress = replace(self.progress, step=step, checkpoint=path)
        assert self.run is not None
        if self.run.config.eval is None:
            self._mark_best(self.run, step)
        await self._callbacks.call("on_checkpoint", self._trainer, step, path)

    async def on_train_end(self, trainer: RunFace, result: TrainingResult) -> None:
        seconds = trainer.config.deadlines.stall
        if self.progress.checkpoint != self._began_from:
            await adapter_call("the copy of the checkpoint", self._copy(), seconds, "stall")
        await self._callbacks.end(self._trainer, self.finished(result), seconds)

    def finished(self, result: TrainingResult) -> TrainingResult:
        """The result, with the metrics of the last step even if this run made no step."""
        if result.metrics:
            self.progress = replace(self.progress, metrics=self._shown(result.metrics))
        return replace(result, metrics=dict(self.progress.metrics))

    def _shown(self, metrics: Mapping[str, float]) -> Metrics:
        """The metrics of a step, with the mean reward also as `mean_reward`."""
        if self._scored and "reward/mean" in metrics:
            return {**metrics, "mean_reward": metrics["reward/mean"]}
        return dict(metrics)

    async def state_dict(self) -> Any:
        assert self.run is not None
        seconds = self.run.config.deadlines.checkpoint
        return {"callbacks": await self._callbacks.state(self.run.failed_callback, seconds)}

    async def load_state_dict(self, state: dict[str, Any]) -> None:
        await self._callbacks.restore(state["callbacks"])

    async def _save(self) -> None:
        """Write a checkpoint of this step, keep it from being pruned, and copy it."""
        assert self.run is not None
        # a service's checkpoint must outlive the copy's origin
        self.run.checkpoints.spared.add(self.run.step)
        await checkpoint(self.run)
        if self.run.checkpoints.saved == self.run.step:
            await self._copy()
        else:  # the evaluation of an earlier step was cut off
            self.run.record.fault(f"save_checkpoint: step {self.run.step} could not be saved")

    async def _copy(self) -> None:
        assert self.progress.checkpoint is not None
        targets, self.saves = self.saves, []
        for target in targets:
            await asyncio.to_thread(copy, self.progress.checkpoint, target)

    def _mark_best(self, run: Run, step: int) -> None:
        """Mark the checkpoint whose step had the best metric; of equal ones, the newer."""
        best = run.checkpoints.best()
        score = self._score(run.record.history, step)
        if not math.isfinite(score):
            return
        if best is None or score >= self._score(run.record.history, int(best.name[5:])):
            run.checkpoints.mark_best(step, run.record.fault)

    def _score(self, history: Sequence[Mapping[str, float]], step: int) -> float:
        row: Mapping[str, Any] = next((r for r in reversed(history) if r["step"] == step), {})
        if self._scored:
            return float(row.get("reward/mean", -math.inf))
        return -float(row.get("loss", math.inf))
