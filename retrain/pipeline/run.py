"""A run under way: what its stages share, and what callbacks see as `trainer`.

- `record` and `drop` are the only ways a finished group is counted.
- Every await on the adapter goes through `within`, which gives it its deadline (P4).
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from retrain.adapters.base import Adapter
from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.concurrency.deadlines import adapter_call
from retrain.concurrency.watchdog import Watchdog
from retrain.config import RunConfig
from retrain.errors import (
    ConfigError,
    RunError,
    StallError,
)
from retrain.observe.callbacks import Callbacks, Status, TrainingResult
from retrain.observe.report import write_report
from retrain.observe.run_dir import RunDirectory
from retrain.pipeline.checkpoint import (
    Checkpoints,
)
from retrain.pipeline.intake import Intake
from retrain.pipeline.ledger import Ledger
from retrain.pipeline.meter import Meter
from retrain.pipeline.signal import Signal
from retrain.prompts import epoch_order
from retrain.rollout import Rollouts
from retrain.rollout.playback import Playback
from retrain.rollout.slot import Slot
from retrain.sampler import CountedSampler, SamplingParams
from retrain.types import Group, Metrics, Prompt, Ticket

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Run:
    """A run under way: what its stages share, and what callbacks see as `trainer`."""

    def __init__(
        self, config: RunConfig, parts: Parts, run_dir: RunDirectory, callbacks: Callbacks
    ) -> None:
        self.config, self.parts, self.run_dir, self.callbacks = config, parts, run_dir, callbacks
        self.step = 0
        self.version = 0
        self.total_steps = config.train.total_train_steps
        self.history: list[Metrics] = []
        self.stopping = False
        """The learner is to end at the next step boundary."""
        self.stalled: StallError | None = None
        self.evaluation: asyncio.Task[None] | None = None
        """The newest one, beside training or done."""
        self.data_since = 0
        """The step after which training on these prompts began; not 0 after a change of data."""
        self.evaluating: set[int] = set()
        """Steps whose checkpoints may turn out to be the best: pruning waits for the result."""
        self.spared: set[int] = set()
        """Checkpoints that pruning leaves alone."""
        self.kept: dict[Ticket, Group] = {}
        """Groups that were finished before a resume, until their tickets are issued again."""
        self.saved_step: int | None = None
        """The step whose checkpoint was written, or loaded."""
        self.model: Path | str | None = None
        """Where the final model is, once it's exported."""
        self.adapter: Adapter
        self.chat: Chat
        self.rollouts: Rollouts
        self.watchdog: Watchdog
        self.sampled = parts.algorithm.source == "rollouts"
        """The model plays episodes; otherwise the data set's rows are trained as they stand."""
        self.meter = Meter(sampled=self.sampled, by_group=parts.algorithm.compares == "group")
        if not self.sampled:
            run_dir.tally.unit = parts.algorithm.source
        self.checkpoints = Checkpoints(run_dir.checkpoints)
        train, rows = config.train, len(parts.prompts)
        self.ledger = Ledger(lambda e: epoch_order(e, rows, train.seed, train.shuffle))
        self.slots = config.rollout.slots or (config.staleness.target + 1) * train.groups_per_step
        self.todo: asyncio.Queue[Prompt] = asyncio.Queue(self.slots)
        self.done: asyncio.Queue[Group | None] = asyncio.Queue(self.slots + 1)
        self.admit = asyncio.Event()
        self.intake = Intake(config, self.ledger, self.done, self.drop)
        self.signal = Signal(train.stop_after_flat_steps)
        self.best_reward = -math.inf
        self._setups = asyncio.Semaphore(config.rollout.setup_concurrency)

    def serve(self, adapter: Adapter) -> None:
        """Tie the adapter to what is played."""
        config, self.adapter = self.config, adapter
        if self.sampled and config.sampling.max_tokens > adapter.context_length:
            logger.warning(
                "sampling.max_tokens is %d, but prompt and completion share a context of %d "
                "tokens: completions end there",
                config.sampling.max_tokens,
                adapter.context_length,
            )
        self.chat = chat = Chat(
            adapter.tokenizer, template=self.parts.chat_template, arguments=config.chat.arguments
        )
        sampling = config.sampling
        self.rollouts = Rollouts(
            CountedSampler(
                adapter.sampler,
                f"the sampler {type(adapter.sampler).__name__} of backend {config.backend.type}",
            ),
            chat,
            SamplingParams(
                sampling.max_tokens,
                sampling.temperature,
                sampling.top_p,
                sampling.top_k,
                sampling.stop,
            ),
            min(adapter.context_length, config.rollout.max_sequence_length or sys.maxsize),
            config.rollout.max_turns,
            config.deadlines,
            config.train.seed,
            self.watchdog.progress,
        )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Nothing hangs in here: a stall cancels the task that called, and `stalled` says why."""
        deadlines = self.config.deadlines
        task = asyncio.current_task()
        assert task is not None

        def stall(error: StallError) -> None:
            self.stalled = error
            task.cancel()

        with Watchdog(
            stall=deadlines.stall,
            blocked=deadlines.blocked,
            grace=deadlines.close + deadlines.checkpoint,
            fail=stall,
            last_words=self.last_words,
        ) as self.watchdog:
            yield

    def request_stop(self) -> None:
        """End after the step under way, with a checkpoint; an evaluation is cut short."""
        self.stopping = True
        self.adapter.hurry()
        self.intake.stop()
        if self.evaluation is not None and self.evaluation is not asyncio.current_task():
            self.evaluation.cancel()

    @property
    def admitted(self) -> int:
        """Groups that may be open: what staleness admits and the remaining steps can use."""
        ahead = min(self.config.staleness.target + 1, self.total_steps - self.step)
        return max(0, ahead) * self.config.train.groups_per_step

    @property
    def finished(self) -> bool:
        """Whether no further step is to be taken."""
        return self.stopping or self.signal.solved or self.step >= self.total_steps

    @property
    def epochs(self) -> int:
        """Completed ones: as many prompts as there are rows were trained, in whole steps."""
        trained = (self.step - self.data_since) * self.config.train.groups_per_step
        return trained // max(1, len(self.parts.prompts))

    @property
    def at_epoch_start(self) -> bool:
        """Whether the next step is the first of an epoch."""
        per_step, rows = self.config.train.groups_per_step, max(1, len(self.parts.prompts))
        return ((self.step - self.data_since) * per_step) % rows < per_step

    def due(self, every: int) -> bool:
        """Whether something that happens every so many steps happens at this one."""
        return every > 0 and self.step % every == 0

    def slot(self, size: int) -> Slot | Playback:
        """A slot for groups of `size` rollouts; rows need none, they play themselves."""
        if not self.sampled:
            longest = self.parts.algorithm.max_length or self.adapter.context_length
            return Playback(self.chat, min(longest, self.adapter.context_length))
        return Slot(
            size,
            self.parts.environment,
            self.rollouts,
            self.parts.scorer,
            self._setups,
            self.fault,
        )

    def record(self, group: Group, started: float) -> None:
        """Write down a group that was played and scored.

        An example is told by its outcome alone: the data set itself holds the rest.
        """
        trajectories, ticket = group.trajectories, group.prompt.id
        self.run_dir.event(
            "rollout" if self.sampled else "example",
            ticket=ticket,
            started=started,
            ended=time.time(),
            outcomes=[t.outcome for t in trajectories],
            versions=sorted(group.versions),
            tokens=sum([t.sampled_tokens for t in trajectories]),
        )
        self.watchdog.progress()
        if not self.sampled:
            self.run_dir.count(group)
            return
        self.run_dir.event("scored", ticket=ticket, rewards=[t.reward for t in trajectories])
        self.run_dir.rollouts(group)
        self.signal.see(group)

    def drop(self, group: Group, cause: str) -> None:
        """A finished group is not trained: count it; a stale one's prompt is issued again."""
        self.meter.group(group)
        self.meter.dropped(cause)
        fields: dict[str, Any] = {"ticket": group.prompt.id, "cause": cause}
        if cause == "stale":
            fields["again"] = str(self.ledger.reissue(group.ticket))
        else:
            self.ledger.retire([group.ticket])
        self.run_dir.event("dropped", **fields)
        self.admit.set()

    def report(self) -> None:
        """Write report.html from what the files hold."""
        try:
            write_report(self.run_dir.path)
        except (ConfigError, RunError, OSError) as error:
            self.fault(f"report.html: {error}")

    def fault(self, error: str) -> None:
        """Something failed that touches no rollout, such as an environment's `close`."""
        self.run_dir.event("fault", error=error)
        self.run_dir.tally.errors[error] += 1

    def mark_best(self, step: int) -> None:
        """This step's checkpoint is the best so far; a disk that refuses the mark ends nothing."""
        try:
            self.checkpoints.mark_best(step)
        except OSError as error:
            self.fault(f"step {step} could not be marked as the best checkpoint: {error}")

    def retire(self, groups: Sequence[Group]) -> None:
        """These groups were trained and their weights are served: new work may start."""
        self.ledger.retire(group.ticket for group in groups)
        self.admit.set()
        self.watchdog.progress()

    def record_evaluation(self, group: Group, step: int) -> None:
        """Write down a held-out group; it counts for no step's reward."""
        if self.sampled:
            self.run_dir.rollouts(group, step=step)
        self.watchdog.progress()

    def write_evaluation(self) -> None:
        """A row of its own for an evaluation that no step's row has taken up."""
        found, self.meter.evaluation = self.meter.evaluation, {}
        if found and self.history:
            row = {"step": self.history[-1]["step"], **found}
            self.history[-1] = {**self.history[-1], **row}
            self.run_dir.metrics(row)

    def last_words(self, message: str) -> None:
        """The process is about to end: write down and say why. Called by the watchdog's thread."""
        self.run_dir.event("stalled", message=message)
        self.run_dir.flush()
        sys.stderr.write(f"retrain: {message}. {self.run_dir.path} is intact: --resume goes on.\n")
        sys.stderr.flush()

    async def within(self, stage: str, call: Awaitable[T], *, limit: str = "") -> T:
        """An adapter's await under its deadline. Raises DeadlineError naming the stage."""
        key = limit or stage
        self.watchdog.progress()
        try:
            return await adapter_call(
                f"the adapter's {stage}", call, getattr(self.config.deadlines, key), key
            )
        finally:
            self.watchdog.progress()

    def result(self, status: Status) -> TrainingResult:
        """What the run came to so far."""
        return TrainingResult(
            status=status,
            total_steps=self.step,
            total_epochs=self.epochs,
            run_dir=self.run_dir.path,
            metrics=self.history[-1] if self.history else {},
            history=self.history,
            best_checkpoint_path=self.checkpoints.best(),
            model=self.model,
        )
