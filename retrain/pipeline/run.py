"""The state of a run: what its stages share, and what callbacks see as `trainer`.

`Run` counts the steps and decides when the run ends. `Backend` is the adapter with its deadlines;
the groups are at the `Desk` (`intake.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from retrain.adapters.base import Adapter
from retrain.assembly import Parts
from retrain.config import RunConfig
from retrain.errors import DeadlineError, StallError
from retrain.observe.callbacks import Callbacks, Status, TrainingResult
from retrain.observe.failure import first_line, notes_of
from retrain.observe.run_dir import RunDirectory
from retrain.pipeline.checkpoint import Checkpoints
from retrain.pipeline.intake import Desk
from retrain.pipeline.recorder import Recorder
from retrain.pipeline.signal import MismatchWatch, Signal
from retrain.rollout import Playback, Slot
from retrain.supervision.boundary import adapter_call
from retrain.supervision.watch import Watch
from retrain.types import Group, Metrics

if TYPE_CHECKING:
    from retrain.agents.server import EndpointServer
    from retrain.pipeline.evaluation import Evaluation
    from retrain.pipeline.verify import PublishCheck

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Backend:
    """The adapter of a run. Every await on it goes through `within`, which has a deadline (P4)."""

    adapter: Adapter
    check: PublishCheck | None = None
    """Of each publish, if publishes are checked."""

    def __init__(self, config: RunConfig, record: Recorder) -> None:
        self._deadlines, self._record = config.deadlines, record
        self.version = 0
        """Of the weights that the sampler serves."""
        self.published = True
        """Whether the latest publish succeeded; otherwise a resume publishes."""
        self.whole = True
        """Whether the weights are those of the run's step: not from an update until it is done."""

    async def within(self, stage: str, call: Awaitable[T], *, limit: str = "") -> T:
        """Await the adapter within `deadlines.LIMIT`; raises DeadlineError naming the stage."""
        key = limit or stage
        self._record.progress()
        try:
            return await adapter_call(
                f"the adapter's {stage}", call, getattr(self._deadlines, key), key
            )
        except DeadlineError:
            self.whole = False  # it doesn't answer, so it can't save either
            raise
        finally:
            self._record.progress()

    async def publish(self) -> None:
        started = time.time()
        self.published = False
        self.version = await self.within("publish", self.adapter.publish())
        self.published = True
        self._record.event("publish", version=self.version, started=started, ended=time.time())

    async def first_check(self, groups: Sequence[Group]) -> None:
        """Before the first update: measure the bound of the checks, if it is not known."""
        if self.check is not None and self.check.needs_bound:
            begin = self.check.begin(self.version, groups)
            await self.within("first check of the sampler", begin, limit="publish")

    async def check_publish(self, groups: Sequence[Group]) -> Metrics:
        """Check the version that is served with a prompt of `groups`, within publish's deadline."""
        if self.check is None:
            return {}
        call = self.check.published(self.version, groups)
        return await self.within("check of a publish", call, limit="publish")

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """`Adapter.logprobs`, within the deadline of an update."""
        stage = "reference log-probs" if reference else "log-probs"
        call = self.adapter.logprobs(sequences, reference=reference)
        return await self.within(stage, call, limit="update")


class Run:
    """A run under way."""

    watch: Watch
    slot: Callable[[int], Slot | Playback]
    """Makes a slot for groups of so many rollouts, or a playback for rows of the dataset."""
    skips_flat: bool
    """Whether a step without any advantage has no update."""
    door: EndpointServer | None = None
    """Where agents call the model."""

    def __init__(
        self, config: RunConfig, parts: Parts, run_dir: RunDirectory, callbacks: Callbacks
    ) -> None:
        self.config, self.parts, self.callbacks = config, parts, callbacks
        self.sampled = parts.algorithm.source == "rollouts"
        """Whether the model plays rollouts; otherwise the rows of the dataset are trained."""
        self.step = 0
        self.data_since = 0
        """The step after which training on these prompts began: 0 unless the data changed."""
        self.stopping = False
        """The learner stops at the next step boundary."""
        self.stalled: StallError | None = None
        self.failures: list[Exception] = []
        """Errors of stages beside the learner, which ends its step before the run fails."""
        self.model: Path | str | None = None
        """Where the exported model is."""
        self.record = Recorder(
            run_dir, parts.algorithm, parts.prompts.mixed, tokens=config.records.tokens
        )
        self.checkpoints = Checkpoints(run_dir.checkpoints)
        self.backend = Backend(config, self.record)
        self.desk = Desk(config, parts.prompts, self.record)
        self.signal = Signal(config.train.stop_after_flat_steps)
        self.mismatch = MismatchWatch(config)
        self.evaluation = self._evaluation()
        self.evaluated: Mapping[str, Any] = {}
        """The state of the evaluations that the run had before a resume without them."""

    def _evaluation(self) -> Evaluation | None:
        if self.config.eval is None:
            return None
        from retrain.pipeline.evaluation import Evaluation

        announce = partial(self.callbacks.call, "on_eval_end", self)
        given = self.config, self.parts, self.record, self.checkpoints, self.backend
        return Evaluation(*given, announce, self.fail)

    # --- what callbacks use

    @property
    def run_dir(self) -> RunDirectory:
        return self.record.run_dir

    @property
    def total_steps(self) -> int:
        return self.config.train.total_train_steps

    @property
    def version(self) -> int:
        return self.backend.version

    def request_stop(self) -> None:
        """Stop after the current step, with a checkpoint, when the current evaluation has ended."""
        self.stopping = True
        self.backend.adapter.stop_retrying()
        self.desk.intake.stop()

    def fail(self, error: Exception) -> None:
        """A stage failed: the run fails with its error after the step under way.

        What ends several stages, such as the loss of the sampler, is kept once.
        """
        if not self.failures and not self.backend.whole:
            ending = self.step + bool(self.desk.taken)
            logger.warning("the run will end after step %d: %s", ending, first_line(error))
        if first_line(error) not in map(first_line, self.failures):
            self.failures.append(error)
        self.request_stop()
        if self.evaluation is not None:
            self.evaluation.cancel()

    def failed_callback(self, error: Exception) -> None:
        """A callback has no state to save: the run fails after the checkpoint."""
        self.record.fault(f"{first_line(error)} ({', '.join(notes_of(error))})")
        self.fail(error)

    # --- progress

    @property
    def admitted(self) -> int:
        """How many groups may be open: what staleness admits, but no more than can be trained."""
        ahead = min(self.config.staleness.target + 1, self.total_steps - self.step)
        return max(0, ahead) * self.config.train.groups_per_step

    @property
    def finished(self) -> bool:
        """Whether there is no further step to take."""
        return self.stopping or self.complete

    @property
    def complete(self) -> bool:
        """Whether there is nothing left to train."""
        return self.signal.solved or self.step >= self.total_steps

    @property
    def at_epoch_start(self) -> bool:
        """Whether the next step is the first of an epoch."""
        per_step = self.config.train.groups_per_step
        return ((self.step - self.data_since) * per_step) % self.desk.epoch_length < per_step

    def epochs(self, step: int) -> int:
        """Epochs completed by `step`. In an epoch as many prompts are trained as there are rows."""
        trained = (step - self.data_since) * self.config.train.groups_per_step
        return trained // self.desk.epoch_length

    def result(self, status: Status) -> TrainingResult:
        history = self.record.history
        return TrainingResult(
            status=status,
            total_steps=self.step,
            total_epochs=self.epochs(self.step),
            run_dir=self.run_dir.path,
            metrics=history[-1] if history else {},
            history=history,
            evaluations=self.record.evaluations,
            best_checkpoint_path=self.checkpoints.best(),
            model=self.model,
        )

    # --- steps

    def trained(self, groups: Sequence[Group]) -> None:
        """The step that trained these groups is done: more work may start."""
        self.backend.whole = True
        self.desk.trained(groups)
        self.watch.progress()

    async def publish(self) -> None:
        """Publish the weights of `step`, once no evaluation needs the older ones."""
        if self.evaluation is not None and await self.evaluation.let_go():
            self.record.meter.lap("wait_for_evaluation")
        await self.backend.publish()

    def endpoint_metrics(self) -> Metrics:
        """Of agents' calls since the last step."""
        if self.door is None:
            return {}
        rejected, self.door.rejected = self.door.rejected, 0
        return {"endpoint/rejected": rejected}
