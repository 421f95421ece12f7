"""What stands between the pipe and a trainer's callbacks: they see the trainer as `trainer`.

It also keeps the trainer's own account of the run: the newest checkpoint, the best one where
nothing is evaluated, checkpoints asked for in a hook (written at the next step's boundary), and the
gate that `step()` opens once a step.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retrain.observe.callbacks import Callback, Callbacks, TrainingResult
from retrain.observe.callbacks import Run as RunFace
from retrain.pipeline.checkpoint import copy
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.run import Run
from retrain.types import Metrics

if TYPE_CHECKING:
    from retrain.trainer.base import BaseTrainer


class Gate:
    """Lets the learner take one step at a time."""

    def __init__(self) -> None:
        self.permits = asyncio.Semaphore(0)
        self.done: asyncio.Queue[Metrics] = asyncio.Queue()


class Hooks(Callback):
    """The pipe's one callback of a trainer's run."""

    def __init__(
        self, trainer: BaseTrainer, callbacks: Sequence[Callback], gate: Gate | None = None
    ) -> None:
        self._trainer = trainer
        self._seen = cast("RunFace", trainer)  # callbacks of a trainer's run get the trainer
        self._callbacks = Callbacks(callbacks)
        self._gate = gate
        self._loop: asyncio.AbstractEventLoop | None = None
        self.run: Run | None = None
        self.newest: tuple[int, Path] | None = None
        """The last checkpoint that was written, and its step."""
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
        self._trainer._check_run(self.run)
        await self._callbacks.on_train_begin(self._seen)

    async def on_epoch_begin(self, trainer: RunFace, epoch: int) -> None:
        await self._callbacks.on_epoch_begin(self._seen, epoch)

    async def on_step_begin(self, trainer: RunFace, step: int) -> None:
        if self._gate is not None and self.run is not None:
            with self.run.watchdog.waiting():
                await self._gate.permits.acquire()
        await self._callbacks.on_step_begin(self._seen, step)

    async def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        shown = self._trainer._shown(metrics)
        await self._callbacks.on_step_end(self._seen, step, shown)
        if self.saves:
            await self._save()
        if self._gate is not None:
            self._gate.done.put_nowait(shown)

    async def on_epoch_end(self, trainer: RunFace, epoch: int, metrics: Metrics) -> None:
        await self._callbacks.on_epoch_end(self._seen, epoch, self._trainer._shown(metrics))

    async def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        await self._callbacks.on_eval_end(self._seen, step, metrics)

    async def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> None:
        self.newest = step, path
        assert self.run is not None
        if self.run.config.eval is None:
            self._mark_best(self.run, step)
        await self._callbacks.on_checkpoint(self._seen, step, path)

    async def on_train_end(self, trainer: RunFace, result: TrainingResult) -> None:
        targets, self.saves = self.saves, []
        if self.newest is not None:
            for target in targets:
                await asyncio.to_thread(copy, self.newest[1], target)
        await self._callbacks.on_train_end(self._seen, self._trainer._finished(result))

    def state_dict(self) -> dict[str, Any]:
        return {"callbacks": self._callbacks.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._callbacks.restore(state["callbacks"])

    async def _save(self) -> None:
        """Checkpoint this step, spare it from pruning, and copy it to where it was asked for."""
        assert self.run is not None
        targets, self.saves = self.saves, []
        # a service's checkpoint must outlive the copy's origin
        self.run.checkpoints.spared.add(self.run.step)
        await checkpoint(self.run)
        assert self.newest is not None
        for target in targets:
            await asyncio.to_thread(copy, self.newest[1], target)

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
        if self._trainer.scored:
            return float(row.get("reward/mean", -math.inf))
        return -float(row.get("loss", math.inf))
