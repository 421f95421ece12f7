"""The state of a run: what its stages share, and what callbacks see as `trainer`.

- `drop` and `retire` are the only ways in which a group leaves the run.
- Every await on the adapter goes through `within`, which gives it a deadline (P4).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from retrain.adapters.base import Adapter
from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.chat.template import NOT_SHOWN
from retrain.concurrency.watch import Watch
from retrain.config import RunConfig
from retrain.errors import DeadlineError, StallError
from retrain.observe.callbacks import Callbacks, Status, TrainingResult
from retrain.observe.failure import first_line, notes_of
from retrain.observe.run_dir import RunDirectory
from retrain.pipeline.checkpoint import Checkpoints
from retrain.pipeline.evaluation import Evaluation
from retrain.pipeline.intake import Intake
from retrain.pipeline.ledger import Ledger
from retrain.pipeline.mismatch import MismatchWatch
from retrain.pipeline.outage import Outage
from retrain.pipeline.recorder import Recorder
from retrain.pipeline.signal import Signal
from retrain.pipeline.verify import PublishCheck
from retrain.prompts.lengths import long_prompts
from retrain.rollout import Playback, Rollouts, Slot
from retrain.sampler import Sampler
from retrain.supervision.boundary import adapter_call
from retrain.types import Group, Message, Metrics, Prompt, Ticket

if TYPE_CHECKING:
    from retrain.endpoint.server import EndpointServer

T = TypeVar("T")
AGAIN = ("stale", "outage", "unfinished")
"""Causes of a drop after which the prompt is issued again. `unfinished`: the run failed first."""
logger = logging.getLogger(__name__)


class Run:
    """A run under way."""

    adapter: Adapter
    chat: Chat
    rollouts: Rollouts
    watch: Watch
    publish_check: PublishCheck
    door: EndpointServer | None = None
    """Where agents call the model."""

    def __init__(
        self, config: RunConfig, parts: Parts, run_dir: RunDirectory, callbacks: Callbacks
    ) -> None:
        self.config, self.parts, self.callbacks = config, parts, callbacks
        train = config.train
        self.sampled = parts.algorithm.source == "rollouts"
        """Whether the model plays rollouts; otherwise the rows of the dataset are trained."""
        self.step = 0
        self.version = 0
        # of the prompts, now: user code is not to run in a step or a save
        self.rows, self.rows_hash = len(parts.prompts), parts.prompts.rows_hash()
        self._epoch_length = parts.prompts.epoch_length
        self.data_since = 0
        """The step after which training on these prompts began: 0 unless the data changed."""
        self.stopping = False
        """The learner stops at the next step boundary."""
        self.stalled: StallError | None = None
        self.failures: list[Exception] = []
        """Errors of stages beside the learner, which ends its step before the run fails."""
        self.taken: list[Group] = []
        """Groups of the step under way, until they are trained."""
        self.whole = True
        """Whether the weights are those of `step`: false from an update until its step is done."""
        self.published = True
        """Whether the latest publish succeeded; otherwise a resume publishes."""
        self.model: Path | str | None = None
        """Where the exported model is."""
        self.record = Recorder(
            run_dir, parts.algorithm, parts.prompts.mixed, tokens=config.records.tokens
        )
        self.checkpoints = Checkpoints(run_dir.checkpoints)
        self.ledger = Ledger(
            lambda epoch: parts.prompts.order(epoch, train.seed, train.shuffle),
            parts.prompts.epoch_length,
        )
        self.kept: dict[Ticket, Group] = {}
        """Finished groups of the checkpoint, until their tickets are issued again."""
        most_open = (config.staleness.target + 1) * train.groups_per_step
        self.in_flight = most_open * config.algorithm.group_size
        """The most rollouts that are open at once."""
        self.slots = config.rollout.slots or most_open
        self.todo: asyncio.Queue[Prompt] = asyncio.Queue(self.slots)
        # room for all groups and the None of `stop`, so that `put_nowait` never fails
        self.done: asyncio.Queue[Group | None] = asyncio.Queue(most_open + 1)
        self.admit = asyncio.Event()
        self.outage = Outage(config.deadlines.outage, self.record.outage)
        self.intake = Intake(config, self.ledger, self.done, self.drop, self.outage)
        self.signal = Signal(train.stop_after_flat_steps)
        self.mismatch = MismatchWatch(config)
        self.evaluation = Evaluation(
            config,
            parts,
            self.record,
            self.slot,
            self.logprobs,
            self.mark_best,
            partial(callbacks.call, "on_eval_end", self),
            self.fail,
        )
        self._setups = asyncio.Semaphore(config.rollout.setup_concurrency)

    @asynccontextmanager
    async def serving(self, adapter: Adapter) -> AsyncIterator[None]:
        """Use this open adapter to play and to train; serve an endpoint if agents need one."""
        config, self.adapter = self.config, adapter
        if self.sampled and config.sampling.max_tokens > adapter.context_length:
            logger.warning(
                "sampling.max_tokens is %d, but prompt and completion share a context of %d "
                "tokens: completions are cut off there",
                config.sampling.max_tokens,
                adapter.context_length,
            )
        adapter.watch(self.record.server)
        self.publish_check = PublishCheck(
            config, adapter, lambda error: self.record.event("fault", error=error)
        )
        self.chat = Chat(
            adapter.tokenizer,
            template=self.parts.chat_template,
            arguments=config.chat.arguments,
            tools=self.parts.tool_format,
        )
        if NOT_SHOWN in self.parts.warnings:
            self.chat.template.shows_tools = False  # probed, it would warn again
        door = None
        if self.sampled and self.parts.runs_agent:
            from retrain.endpoint.server import EndpointServer

            door = self.door = EndpointServer(config.endpoint, adapter.tokenizer.decode)
        self.rollouts = Rollouts(
            config,
            adapter.sampler,
            self.chat,
            adapter.context_length,
            self.watch.progress,
            door,
            self.parts.opponents,
        )
        self._warn_of_long_prompts()
        self.record.decode = adapter.tokenizer.decode
        self.parts.learner.attach(adapter)
        try:
            async with nullcontext() if door is None else door.serving():
                yield
        finally:
            for opponents in (self.parts.opponents, self.parts.eval_opponents):
                for opponent in opponents.values():
                    await opponent.close()

    def _warn_of_long_prompts(self) -> None:
        """Warn of prompts that leave less than `sampling.max_tokens` of the context."""
        most, context = self.config.sampling.max_tokens, self.rollouts.context_length

        def tokens(messages: Sequence[Message]) -> int:
            return len(self.chat.begin(messages).prompt_ids)

        with suppress(Exception):  # of the template: a rollout reports it
            if self.sampled and (text := long_prompts(self.parts.prompts, tokens, context - most)):
                logger.warning(
                    "prompts: %s. With sampling.max_tokens (%d) they exceed the context of %d "
                    "tokens: their completions are cut off, or their rollouts are invalid. "
                    "Shorten them, or remove them with `filter`.",
                    text,
                    most,
                    context,
                )

    # --- what callbacks use

    @property
    def run_dir(self) -> RunDirectory:
        return self.record.run_dir

    @property
    def total_steps(self) -> int:
        return self.config.train.total_train_steps

    def request_stop(self) -> None:
        """Stop after the current step, with a checkpoint, when the current evaluation has ended."""
        self.stopping = True
        self.adapter.stop_retrying()
        self.intake.stop()

    def fail(self, error: Exception) -> None:
        """A stage failed: the run fails with its error after the step under way.

        What ends several stages, such as the loss of the sampler, is kept once.
        """
        if not self.failures and not self.whole:
            ending = self.step + bool(self.taken)
            logger.warning("the run will end after step %d: %s", ending, first_line(error))
        if first_line(error) not in map(first_line, self.failures):
            self.failures.append(error)
        self.request_stop()
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
        return ((self.step - self.data_since) * per_step) % self._epoch_length < per_step

    def epochs(self, step: int) -> int:
        """Epochs completed by `step`. In an epoch as many prompts are trained as there are rows."""
        trained = (step - self.data_since) * self.config.train.groups_per_step
        return trained // self._epoch_length

    def result(self, status: Status) -> TrainingResult:
        """The outcome of the run so far."""
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

    # --- groups

    def prompt(self, ticket: Ticket) -> Prompt:
        """The prompt of a ticket. Raises PromptError if its row is invalid."""
        return self.parts.prompts.prompt(ticket, self.config.train.seed)

    def slot(self, size: int, evaluated: Sampler | None = None) -> Slot | Playback:
        """A new slot for groups of `size` rollouts, or a playback for rows of the dataset.

        `evaluated` is the sampler of an evaluation, which has opponents of its own.
        """
        if not self.sampled:
            longest = self.parts.algorithm.max_length or self.adapter.context_length
            return Playback(self.chat, min(longest, self.adapter.context_length))
        rollouts = self.rollouts
        if evaluated is not None:
            rollouts = rollouts.held_out(evaluated, self.parts.eval_opponents)
        return Slot(
            size,
            self.parts.environment,
            rollouts,
            self.parts.scorer,
            self._setups,
            self.record.fault,
        )

    def endpoint_metrics(self) -> Metrics:
        """Of agents' calls since the last step."""
        if self.door is None:
            return {}
        rejected, self.door.rejected = self.door.rejected, 0
        return {"endpoint/rejected": rejected}

    def drop(self, group: Group, cause: str) -> None:
        """Drop a finished group; for the causes in `AGAIN` its prompt is issued again."""
        again = None
        if cause in AGAIN:
            again = self.ledger.reissue(group.ticket)
        else:
            self.ledger.retire([group.ticket])
        self.record.dropped(group, cause, again)
        self.admit.set()

    def retire(self, groups: Sequence[Group]) -> None:
        """The step that trained these groups is done: more work may start."""
        self.ledger.retire(group.ticket for group in groups)
        self.whole = True
        self.admit.set()
        self.watch.progress()

    # --- the adapter

    async def within(self, stage: str, call: Awaitable[T], *, limit: str = "") -> T:
        """Await the adapter within `deadlines.LIMIT`; raises DeadlineError naming the stage."""
        key = limit or stage
        self.watch.progress()
        try:
            return await adapter_call(
                f"the adapter's {stage}", call, getattr(self.config.deadlines, key), key
            )
        except DeadlineError:
            self.whole = False  # it doesn't answer, so it can't save either
            raise
        finally:
            self.watch.progress()

    async def publish(self) -> None:
        """Make the sampler serve the weights of `step`, once no evaluation needs the older ones."""
        if await self.evaluation.let_go():
            self.record.meter.lap("wait_for_evaluation")
        started = time.time()
        self.published = False
        self.version = await self.within("publish", self.adapter.publish())
        self.published = True
        self.record.event("publish", version=self.version, started=started, ended=time.time())

    async def check_publish(self, groups: Sequence[Group]) -> Metrics:
        """Check the version that is served with a prompt of `groups`, within publish's deadline."""
        if self.stopping:
            return {}
        call = self.publish_check.published(self.version, groups)
        return await self.within("check of a publish", call, limit="publish")

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """`Adapter.logprobs`, within the deadline of an update."""
        stage = "reference log-probs" if reference else "log-probs"
        call = self.adapter.logprobs(sequences, reference=reference)
        return await self.within(stage, call, limit="update")

    def mark_best(self, step: int) -> None:
        """Mark this step's checkpoint as the best; a disk that fails is only reported."""
        try:
            self.checkpoints.mark_best(step)
        except OSError as error:
            self.record.fault(f"can't mark step {step} as the best checkpoint: {error}")
