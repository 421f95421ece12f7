"""A run under way: what its stages share, and how it is written down and taken up again.

- `record` and `drop` are the only ways a finished group is counted; `checkpoint` and `restore` are
  each other's inverse: what one writes, the other brings back.
- Every await on the adapter goes through `within`, which gives it its deadline (P4).
"""

from __future__ import annotations

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from retrain.adapters.base import Adapter, AdapterState
from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.checkpoint import (
    DATA,
    SCORING,
    Checkpoint,
    Checkpoints,
    changes,
    check_same_run,
    group_from_json,
    group_to_json,
    read,
    verified,
)
from retrain.config import RunConfig
from retrain.deadlines import adapter_call
from retrain.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    NoSignalError,
    RunError,
    StallError,
)
from retrain.intake import Intake
from retrain.ledger import Ledger
from retrain.metering import Meter
from retrain.observe.callbacks import Callbacks, Status, TrainingResult
from retrain.observe.report import write_report
from retrain.observe.run_dir import RunDirectory, read_metrics
from retrain.playback import Playback
from retrain.prompts import epoch_order
from retrain.rollout import Rollouts
from retrain.sampler import SamplingParams
from retrain.slots import Slot
from retrain.types import Group, Metrics, Prompt, Ticket
from retrain.watchdog import Watchdog

T = TypeVar("T")


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
        self._saved: int | None = None
        """The step whose checkpoint was written, or loaded."""
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
        self.chat = chat = Chat(
            adapter.tokenizer, template=self.parts.chat_template, arguments=config.chat.arguments
        )
        sampling = config.sampling
        self.rollouts = Rollouts(
            adapter.sampler,
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
            versions=sorted({v for t in trajectories for v in t.versions if v >= 0}),
            tokens=sum(len(u.completion.token_ids) for t in trajectories for u in t.turns),
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

    async def checkpoint(self) -> None:
        """Write the checkpoint of this step, if there is none yet; then drop the oldest ones."""
        if self._saved == self.step:
            return
        path = await self.within(
            "save", self.checkpoints.write(self.step, self._fill), limit="checkpoint"
        )
        self._saved = self.step
        self.run_dir.event("checkpoint", step=self.step, path=str(path))
        self.run_dir.flush()
        spare = {self.step, *self.spared, *self.evaluating}
        for old in self.checkpoints.prune(self.config.checkpoint.keep, spare):
            await self._forget(old)
        await self.callbacks.on_checkpoint(self, self.step, path)

    async def _forget(self, old: Path) -> None:
        """Delete a checkpoint, here and at the backend, which a torn one doesn't name."""
        try:
            state = AdapterState(old / "adapter", read(old).adapter)
            await self.within("forget", self.adapter.forget(state), limit="checkpoint")
        except (AdapterError, CheckpointError, DeadlineError) as error:
            self.fault(f"{old.name}: {error}")
        self.checkpoints.remove(old)

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
        )

    async def _fill(self, folder: Path) -> Checkpoint:
        self.intake.drain()
        finished = (*self.intake.held.values(), *self.kept.values())
        groups = [group_to_json(group) for group in finished]
        checkpoint_of = self._snapshot(groups)
        (folder / "adapter").mkdir()
        state = await self.adapter.save(folder / "adapter")
        self.run_dir.flush()
        return checkpoint_of(dict(state.data))

    def _snapshot(self, groups: list[dict[str, Any]]) -> Callable[[dict[str, Any]], Checkpoint]:
        """The run as it is now; what happens while the adapter saves belongs to the next one."""
        self.run_dir.event("snapshot", step=self.step)
        step, version, ledger = self.step, self.version, self.ledger.state()
        counters = {
            **self.signal.state(),
            "best_reward": _finite(self.best_reward),
            "failed_in_a_row": self.intake.failed_in_a_row,
            "data_since": self.data_since,
            "rows": len(self.parts.prompts),
            "callbacks": self.callbacks.state(),
        }
        config = self.config.model_dump(mode="json")
        return lambda data: Checkpoint(step, version, ledger, groups, data, counters, config)

    async def restore(self) -> None:
        """Go back to the newest whole checkpoint; to the beginning when there is none."""
        found = await asyncio.to_thread(self.checkpoints.newest)
        for torn in self.checkpoints.torn:
            self.run_dir.event("torn", checkpoint=torn)
        if found is None:
            self.run_dir.event("resumed", from_step=0)
            return
        path, saved = found
        check_same_run(saved.config, self.config)
        before, rows = saved.counters.get("rows"), len(self.parts.prompts)
        if before not in (None, rows):
            raise CheckpointError(
                f"this run can't be resumed: its prompts had {before} rows, now they have {rows}. "
                "Bring the data back, or start a new run with --run-dir"
            )
        await self._load(path, saved)
        self._saved = saved.step
        metrics = read_metrics(self.run_dir.path)
        self.history = [row for row in metrics if row["step"] <= saved.step]
        self._take_up(saved, saved.groups)

    async def begin_from(self, path: Path) -> None:
        """Begin where the checkpoint at `path` left another run of the same model.

        Weights, optimizer and step count go on. So do the position in the data when the prompts are
        the same, and the finished groups when their rewards would be. Raises CheckpointError.
        """
        saved = await asyncio.to_thread(verified, path)
        await self._load(path, saved)
        if changes(saved.config, self.config, DATA):
            self.data_since = self.step
            self.run_dir.event("resumed", from_step=self.step, checkpoint=str(path))
            return
        self._take_up(saved, [] if changes(saved.config, self.config, SCORING) else saved.groups)

    async def _load(self, path: Path, saved: Checkpoint) -> None:
        await self.within(
            "load",
            self.adapter.load(AdapterState(path / "adapter", saved.adapter)),
            limit="checkpoint",
        )
        self.step, self.version = saved.step, saved.version
        self.callbacks.restore(saved.counters.get("callbacks", []))

    def _take_up(self, saved: Checkpoint, groups: Sequence[Mapping[str, Any]]) -> None:
        """Go on in the data where `saved` was, with its finished `groups`."""
        finished = [group_from_json(g, self.parts.prompts.prompt) for g in groups]
        self.kept = {group.ticket: group for group in finished}
        self.ledger.restore(saved.ledger)
        self.data_since = saved.counters.get("data_since", 0)
        self.signal.restore(saved.counters)
        self.intake.failed_in_a_row = saved.counters["failed_in_a_row"]
        best = saved.counters["best_reward"]
        self.best_reward = -math.inf if best is None else best
        self.run_dir.event("resumed", from_step=self.step)


class Signal:
    """Counts the steps in a row in which no rollout got any credit.

    A whole run of them ends training: solved when every reward is the highest that was ever seen,
    an error otherwise.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._flat_steps = 0
        self._top = -math.inf
        self.solved = False

    def see(self, group: Group) -> None:
        """Remember the highest reward."""
        self._top = max([self._top, *(t.reward for t in group.scored)])

    def step(self, groups: list[Group], has_credit: bool) -> None:
        """A step was trained. Raises NoSignalError at the limit, unless the task is solved."""
        self._flat_steps = 0 if has_credit else self._flat_steps + 1
        if self._flat_steps < self._limit:
            return
        rewards = [t.reward for group in groups for t in group.scored]
        if min(rewards) < self._top or self._top <= 0:
            raise NoSignalError(
                f"{self._flat_steps} steps in a row had no signal: within each group all rewards "
                f"were equal (mean {sum(rewards) / len(rewards):.3g}), so every advantage was 0. "
                "Make the task easier, the reward finer, or algorithm.group_size larger "
                "(train.stop_after_flat_steps sets the patience)"
            )
        self.solved = True

    def state(self) -> dict[str, Any]:
        return {"flat_steps": self._flat_steps, "top": _finite(self._top)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._flat_steps = state["flat_steps"]
        self._top = -math.inf if state["top"] is None else state["top"]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
