"""The thread that runs `trainer.train()`, and the queue of its jobs.

One daemon thread does everything that touches the trained weights, in the order of submission. A
batch goes to TRL's loop. Any other job, a method of the trainer, runs while that loop waits for its
next batch, between two optimizer steps. TRL's loop starts at the first job that needs its
optimizer, so that a checkpoint can be loaded first. After its last step the thread still runs jobs.

Invariants:
- Every future is resolved: whatever ends the thread, `_close` fails the remaining ones.
- The thread never outlives its owner: it checks `alive()` every second, and `stop` wakes it.
- With several ranks this is rank 0's thread. It sends each job to the others as an order before it
  does it itself, so that all ranks meet in the same collectives.
- Of several trainers in a process one works at a time (`PROCESS_STATE`): the others' threads wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from retrain.adapters.trl.ranks.group import ALONE, OutOfStepError, Ranks
from retrain.adapters.trl.shares import Share
from retrain.engine.models import PROCESS_STATE
from retrain.errors import AdapterError, RetrainError
from retrain.types import Batch, Metrics

HEALTH_CHECK_SECONDS = 1.0
TRAIN, STEP, CALL = "train", "step", "call"
"""Orders: enter TRL's loop (with a checkpoint or None), train a share, call a method."""
CutBatch = Callable[[Batch], Sequence[Share]]
"""From a batch to the share of each rank."""


class Stopped(Exception):
    """Ends TRL's loop from inside, because the owner stopped the thread."""


@dataclass(slots=True, eq=False)
class TrainerJob:
    """One thing to do in the thread: a `method`, a `batch` to train or a `checkpoint` to load."""

    method: str = ""
    """Of the trainer, called on every rank with `args`; the result is rank 0's."""
    args: tuple[Any, ...] = ()  # of whatever types the method takes
    batch: Batch | None = None
    checkpoint: Path | None = None
    needs_optimizer: bool = True
    future: Future[Any] = field(default_factory=Future)


class TrainerThread:
    """Owns the trainer, which `build(self)` creates in the thread.

    `meet(self)` meets the other ranks before, and leaves them at the end.
    """

    def __init__(
        self,
        build: Callable[[TrainerThread], Any],
        *,
        alive: Callable[[], bool],
        threads: int,
        meet: Callable[[TrainerThread], AbstractContextManager[Ranks]],
    ) -> None:
        self.started: Future[None] = Future()
        self.ended: Future[None] = Future()
        self.trainer: Any = None
        self.ranks = ALONE
        self.failed = False
        """`fail` was called: the other ranks may wait in vain."""
        self._build = build
        self._meet = meet
        self._alive = alive
        self._threads = threads
        self._jobs: queue.Queue[TrainerJob | None] = queue.Queue()
        self._open: set[TrainerJob] = set()  # those under way
        self._held: TrainerJob | None = None
        self._batch: TrainerJob | None = None
        self._loading: TrainerJob | None = None
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._cause: BaseException | None = None
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="retrain-trl", daemon=True)

    # --- called by the owner

    @property
    def began(self) -> bool:
        return self._thread.ident is not None

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the present step or micro-batch; then `ended` is resolved."""
        self._stop.set()
        self._jobs.put(None)

    def join(self) -> None:
        """Wait for the end of the thread; after `ended` it has nothing left to do."""
        self._thread.join()

    def fail(self, error: RetrainError) -> None:
        """Fail all present and later jobs, also while the thread hangs in a collective."""
        self.failed = True
        self._cause = self._cause or error
        self.stop()
        self._close()

    def submit(self, job: TrainerJob) -> Future[Any]:
        """Queue a job; raises AdapterError with the cause when the thread has ended."""
        with self._lock:
            if self._closed:
                why = f"it failed with {self._cause!r}" if self._cause else "it was closed"
                raise AdapterError(
                    f"the trainer has ended: {why}; continue from the last checkpoint"
                ) from self._cause
            self._jobs.put(job)
        return job.future

    # --- called by the trainer, in the thread

    def next_share(self, cut: CutBatch) -> Share:
        """Run jobs until one is a batch; this rank's share of it, after the others got theirs.

        Raises Stopped when the owner stopped the thread, and what `cut` raises.
        """
        self._loaded()
        job = self._batch = self._until(lambda job: job.batch is not None)
        assert job.batch is not None
        shares = cut(job.batch)
        self.ranks.lead(STEP, shares=[None, *(share.alone() for share in shares[1:])])
        return shares[0]

    def finish_step(self, metrics: Metrics) -> None:
        assert self._batch is not None
        job, self._batch = self._batch, None
        self._resolve(job, metrics)

    def check_stop(self) -> None:
        """Raises Stopped when the owner stopped the thread."""
        if self._stop.is_set() or not self._alive():
            raise Stopped

    # --- the thread

    def _main(self) -> None:
        try:
            with PROCESS_STATE:
                torch.set_num_threads(self._threads)
                with self._meet(self) as self.ranks:
                    self._train()
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 - the owner gets it, whatever it is
            self._cause = self._cause or error
        finally:
            self.trainer = None
            self._close()
            self.ended.set_result(None)

    def _train(self) -> None:
        self.trainer = self.ranks.together(lambda: self._build(self))
        with self._lock:
            if not self._closed:
                self.started.set_result(None)
        checkpoint = self._before_training()
        self.ranks.lead(TRAIN, checkpoint)
        self.trainer.train(resume_from_checkpoint=checkpoint)
        self._after_training()

    def _before_training(self) -> str | None:
        """Run jobs until one needs the optimizer; returns the checkpoint to start from, if any."""
        job = self._until(lambda job: job.checkpoint is not None or job.needs_optimizer)
        if job.checkpoint is None:
            self._held = job
            return None
        self._loading = job
        return str(job.checkpoint)

    def _after_training(self) -> None:
        """TRL's loop has made its last step: save, publish and export are still possible."""
        self._loaded()
        while True:
            job = self._until(lambda job: job.batch is not None)
            error = AdapterError(
                f"got a batch after the last of {self.trainer.state.max_steps} steps; raise "
                "train.total_train_steps, which the learning-rate schedule needs too"
            )
            self._resolve(job, error=error)

    def _until(self, wanted: Callable[[TrainerJob], bool]) -> TrainerJob:
        """Run jobs until one is `wanted`, which is returned."""
        while not wanted(job := self._take()):
            try:
                result = self._call(job)
            except OutOfStepError as error:  # no job can follow: the others wait elsewhere
                cause = error.__cause__
                self.fail(cause if isinstance(cause, RetrainError) else error)
                raise
            except Exception as error:  # noqa: BLE001 - it belongs to the caller
                self._resolve(job, error=error)
            else:
                self._resolve(job, result)
        return job

    def _call(self, job: TrainerJob) -> Any:
        if not job.method:
            raise AdapterError("a checkpoint can only be loaded before the first update")
        self.ranks.lead(CALL, job.method, *job.args)
        return self.ranks.together(lambda: getattr(self.trainer, job.method)(*job.args))

    def _resolve(
        self, job: TrainerJob, result: Any = None, error: BaseException | None = None
    ) -> None:
        """Answer a job, unless `fail` has."""
        with self._lock:
            if self._closed:
                return
            self._open.discard(job)
            if error is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(error)

    def _loaded(self) -> None:
        """TRL's loop waits between two steps: it has loaded the checkpoint, if there is one."""
        if self._loading is not None:
            job, self._loading = self._loading, None
            self._resolve(job)

    def _take(self) -> TrainerJob:
        """The next job that is not cancelled."""
        while True:
            held, self._held = self._held, None
            job = held or self._wait()
            self.check_stop()
            if job is not None and (
                job.future.running() or job.future.set_running_or_notify_cancel()
            ):
                with self._lock:
                    self._open.add(job)
                return job

    def _wait(self) -> TrainerJob | None:
        PROCESS_STATE.release()
        try:
            return self._jobs.get(timeout=HEALTH_CHECK_SECONDS)
        except queue.Empty:
            return None
        finally:
            PROCESS_STATE.acquire()

    def _close(self) -> None:
        """Fail every future that is still waited for, with the reason."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            left = list(self._open)
            while not self._jobs.empty():
                job = self._jobs.get_nowait()
                left += [job] if job is not None else []
        for job in left:
            if job.future.running() or job.future.set_running_or_notify_cancel():
                job.future.set_exception(self._first_error())
        if not self.started.done():
            self.started.set_exception(self._first_error())

    def _first_error(self) -> BaseException:
        """For jobs that were under way: the error itself, if it is one of ours."""
        cause = self._cause
        if cause is None or isinstance(cause, RetrainError):
            return cause or AdapterError("the trainer was closed before it did this")
        error = AdapterError(f"the trainer failed: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
