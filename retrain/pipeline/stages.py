"""The pipe: train() and its stages, connected by bounded queues in one task group.

    feed --todo--> collect (one task per slot) --done--> learn

- Data flows one way; only the version of the weights flows back.
- `feed` starts work only while (issued and untrained groups) < (staleness.target + 1) x
  groups_per_step, so target 0 is synchronous training.
- Only `learn` decides when to stop; the other stages end by cancellation.
- A stage that fails stops the learner at the next step boundary, and so does a publish. If the
  weights are good, the run writes a checkpoint before it fails (P13).
- The first cancellation of train() stops the learner at the next step boundary: it writes a
  checkpoint, and train() raises CancelledError. A second one ends the run at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.adapters.base import Adapter
from retrain.algorithms.batching import batch_of, fitting, kl_penalised, make_samples
from retrain.assembly import Parts, assemble
from retrain.config import RunConfig, load_config, parse_config
from retrain.errors import (
    DeadlineError,
    NonFiniteError,
    NoSignalError,
    RunError,
    StallError,
    UserCodeError,
)
from retrain.losses import row_of
from retrain.observe.callbacks import Callback, Callbacks, Status, TrainingResult
from retrain.observe.console import Console
from retrain.observe.failure import ERROR, single
from retrain.observe.naming import wanted_folder
from retrain.observe.run_dir import RunDirectory
from retrain.pipeline.failing import rescue, stops_the_learner, with_failures
from retrain.pipeline.resume import begin_from, checkpoint, in_run_dir, restore
from retrain.pipeline.run import Run
from retrain.pipeline.serving import serving
from retrain.rollout import Playback, Slot
from retrain.scoring import fail
from retrain.supervision.boundary import apart
from retrain.supervision.watch import ADVICE, Watch
from retrain.types import Batch, Group, Metrics, Prompt, Trajectory

if TYPE_CHECKING:
    from retrain.pipeline.evaluation import Evaluation

logger = logging.getLogger(__name__)
BLOCKED = 1.0
"""Seconds. Code that blocks the event loop for longer is reported."""
SKIPPED = {"loss": 0.0, "grad_norm": 0.0, "learning_rate": 0.0, "tokens/trained": 0.0}
"""The metrics of an update that was skipped, since no rollout had an advantage."""


async def train(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    start_from: Path | None = None,
    parts: Parts | None = None,
    console: bool = True,
) -> TrainingResult:
    """Train from a config, a mapping or a YAML file; `resume` continues from the newest checkpoint.

    The run directory is `run_dir`, or else runs/NAME, runs/NAME-2, ...; `resume` takes the last.
    `start_from` begins a new run with the weights, optimizer and step count of a checkpoint of the
    same model. `parts` replaces what the config's plug-ins would make. `console` prints the
    progress. Raises ConfigError before any model loads, RunError when the run can't continue,
    CancelledError after a checkpoint. Of several errors the first is raised, with the others as
    its notes.
    """
    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, RunConfig):
        config = parse_config(config)
    try:
        with in_run_dir(config, resume=resume) as config:
            parts = parts or assemble(config)
            hooks = [*callbacks, *parts.loggers]
            if console:
                shown = Console()
                shown.opening([*parts.notices(), parts.loading()])
                hooks.append(shown)
            return await _train(config, parts, Callbacks(hooks), resume, start_from)
    except BaseExceptionGroup as group:
        error = single(group)
        raise error from error.__cause__


async def _train(
    config: RunConfig, parts: Parts, hooks: Callbacks, resume: bool, start_from: Path | None
) -> TrainingResult:
    opening = parts.open_adapter()  # reports a missing library before there is a run directory
    folder, resolved = wanted_folder(config), parts.resolved()
    with RunDirectory.open(folder, resolved, resume=resume) as run_dir:
        run = Run(config, parts, run_dir, hooks)
        status: Status = "failed"
        failure: BaseException | None = None
        try:
            with _watched(run, config.deadlines.stall):
                status = await _open_and_drive(run, opening, resume, start_from)
        except BaseException as error:
            failure = error
            if isinstance(error, asyncio.CancelledError):
                status = "interrupted"
            raise
        finally:
            run.checkpoints.close()
            await _end(run, status, failure)
        if status == "interrupted":
            raise asyncio.CancelledError
        return run.result(status)


@contextmanager
def _watched(run: Run, stall: float) -> Iterator[None]:
    """Watch the run. `stall` seconds without progress cancel the caller and raise StallError."""
    deadlines = run.config.deadlines
    task = asyncio.current_task()
    assert task is not None

    blocking: set[str] = set()

    def blocked(place: str, seconds: float, calls: int) -> None:
        if place not in blocking:
            blocking.add(place)
            several = " in several calls" if calls > 1 else ""
            error = f"{place} blocked the event loop for {seconds:.1f} s{several}"
            logger.warning("%s. %s", error, ADVICE)
            run.record.event("fault", error=error)

    def cancel(error: StallError) -> None:
        run.stalled = error
        task.cancel()

    try:
        with Watch(
            slow=BLOCKED,
            found=blocked,
            stall=stall,
            blocked=deadlines.blocked,
            grace=deadlines.close + deadlines.checkpoint,
            fail=cancel,
            last_words=run.record.last_words,
            errors=run.run_dir.path / ERROR,
        ) as run.watch:
            run.record.progress = run.watch.progress
            yield
    except asyncio.CancelledError:
        if run.stalled is None:
            raise
        task.uncancel()
        raise run.stalled from None


async def _open_and_drive(
    run: Run, opening: Adapter, resume: bool, start_from: Path | None
) -> Status:
    """Set up rewards and adapter, restore a checkpoint where one is wanted, drive the stages."""
    async with AsyncExitStack() as open_parts:
        await open_parts.enter_async_context(run.parts.scorer.serving(run.record.fault))
        adapter = await open_parts.enter_async_context(opening)
        try:
            await open_parts.enter_async_context(serving(run, adapter))
            if resume:
                await apart("restore", restore, run)
            elif start_from is not None:
                await apart("begin", begin_from, run, start_from)
            with rare_collections(run.desk.in_flight):
                return await drive(run)
        except (Exception, asyncio.CancelledError) as error:
            failure = run.stalled if isinstance(error, asyncio.CancelledError) else error
            if failure is not None:
                run.record.failed(failure)
                await rescue(run, failure)
            raise
        finally:
            run.watch.ending()
            if run.parts.learner is not None:
                run.parts.learner.close()


async def _end(run: Run, status: Status, failure: BaseException | None) -> None:
    """Report the end in the files and to the callbacks; errors of these don't hide `failure`."""
    first: Exception | None = None
    try:
        if run.evaluation is not None:
            run.evaluation.write_row()
        if status == "failed" and failure is not None:
            run.record.failed(failure)
        run.record.end(status, run.step)
    except RunError as error:
        first = error
    try:
        run.record.report()
        with _watched(run, math.inf):  # each callback has a deadline, but one may block the loop
            await run.callbacks.end(run, run.result(status), run.config.deadlines.stall)
    except Exception as error:  # noqa: BLE001 - raised or noted below
        first = first or error
    if first is None:
        return
    if failure is None:
        raise first
    notes = (f"{type(first).__name__}: {first}", *getattr(first, "__notes__", ()))
    failure.add_note(f"also failed, at the end of the run: {', '.join(notes)}")


async def drive(run: Run) -> Status:
    """Run the stages until the learner stops."""
    await run.callbacks.call("on_train_begin", run)
    run.run_dir.begun = True
    run.record.meter.begin()
    async with with_failures(run), asyncio.TaskGroup() as stages:
        try:
            learner = stages.create_task(apart("learn", learn, run), name="learn")
            producers = [stages.create_task(feed(run), name="feed")]
            producers += [
                stages.create_task(collect(run), name=f"collect#{index}")
                for index in range(run.desk.slots)
            ]
            interrupted = await _until_learned(run, learner)
            for producer in producers:
                producer.cancel()
        finally:
            run.watch.ending()
    if learner.cancelled():  # by a callback, for example; it would look like a normal end
        raise RunError(f"user code cancelled the learner after step {run.step}")
    if interrupted and run.step < run.total_steps:
        return "interrupted"
    return "solved" if run.signal.solved else "completed"


@stops_the_learner
async def feed(run: Run) -> None:
    """Issue prompts, as many as staleness admits; pass on groups that a resume kept."""
    await apart("feed", _feed, run)


async def _feed(run: Run) -> None:
    desk = run.desk
    while True:
        while len(desk.ledger.open) >= run.admitted:
            desk.admit.clear()
            await desk.admit.wait()
        await desk.ledger.ready()
        outage = desk.intake.outage
        ticket = desk.ledger.issue(fresh=outage is not None and outage.suspected)
        if ticket in desk.kept:
            desk.done.put_nowait(desk.kept.pop(ticket))
            continue
        run.record.event("issued", ticket=str(ticket))  # in the order of the ledger
        if outage is not None:
            await outage.turn(ticket, run.watch.waiting)
        await desk.todo.put(desk.prompt(ticket))


@stops_the_learner
async def collect(run: Run) -> None:
    """Keep one slot at work. If user code ends its task, its group fails and a new slot follows."""
    size = run.config.algorithm.group_size
    while True:
        current: list[Prompt] = []
        try:
            await apart("slot", _play, run, run.slot(size), current)
        except UserCodeError as error:
            run.record.fault(str(error))
            for prompt in current:
                _hand_on(run, _failed(prompt, size, error), time.time())


async def _play(run: Run, slot: Slot | Playback, current: list[Prompt]) -> None:
    """Play one group after the other; `current` has the prompt under way."""
    try:
        while True:
            prompt = await run.desk.todo.get()
            current[:] = [prompt]
            started = time.time()
            group = await slot.play(prompt)
            _hand_on(run, group, started)
            current.clear()
    finally:
        await slot.close()


def _hand_on(run: Run, group: Group, started: float) -> None:
    """Record a group that was played, and pass it to the learner."""
    run.record.played(group, started)
    if run.sampled:
        run.signal.see(group)
        run.desk.intake.see(group)
    run.desk.done.put_nowait(group)


def _failed(prompt: Prompt, size: int, error: UserCodeError) -> Group:
    """A group of `size` rollouts that failed alike."""
    group = Group(prompt, [Trajectory(prompt, index=index) for index in range(size)])
    for trajectory in group.trajectories:
        fail(trajectory, error)
    return group


async def learn(run: Run) -> None:
    """Step after step, with checkpoints and evaluations where they are due; then export."""
    async with asyncio.TaskGroup() as beside:
        if run.evaluation is not None and run.evaluation.owed is not None:
            await checkpoint(run)
            await _evaluate(run, run.evaluation, beside)
        while not run.finished and await step(run):
            await _after_step(run, beside)
    if run.failures:
        return
    await checkpoint(run)
    export = run.backend.adapter.export(run.run_dir.path / "final")
    run.model = await run.backend.within("export", export, limit="checkpoint")
    if isinstance(run.model, Path):
        run.record.card(run.config, run.model)
    run.record.event("export", path=None if run.model is None else str(run.model))


async def _after_step(run: Run, beside: asyncio.TaskGroup) -> None:
    """The checkpoint and the evaluation that are due."""
    every, evaluation, last = run.config.checkpoint.every, run.evaluation, run.finished
    if evaluation is not None and not run.stopping and evaluation.due(run.step, last=last):
        await checkpoint(run)
        await _evaluate(run, evaluation, beside)
    elif every and run.step % every == 0 and not last:
        await checkpoint(run)


async def _evaluate(run: Run, evaluation: Evaluation, beside: asyncio.TaskGroup) -> None:
    """Start the evaluation of this step, when the previous one has ended."""
    await evaluation.previous()
    if not run.sampled:
        await run.publish()
    if not run.stopping:
        evaluation.start(run.step, beside)


async def step(run: Run) -> bool:
    """Take one optimizer step and publish the weights; False when the run stops instead."""
    number, trained, backend = run.step + 1, run.version, run.backend
    run.record.meter.start()
    groups = await take(run)
    if groups is None:
        return False
    run.desk.taken = groups
    batch, has_credit, noted = await credit(run, groups)
    skipped = run.skips_flat and not has_credit
    if run.sampled and not skipped:
        await backend.first_check(groups)
    metrics = await update(run, groups, batch, skipped=skipped)
    if run.sampled and not skipped:
        metrics = {**metrics, **await publish(run, groups)}
    row = run.record.step(
        number,
        groups,
        {**noted, **metrics, **run.endpoint_metrics()},
        trained=trained,
        version=run.version,
        evaluation={} if run.evaluation is None else run.evaluation.take_row(),
    )
    run.trained(groups)
    run.mismatch.see(row)
    run.signal.begin(number, groups, has_credit)
    run.signal.step(groups, has_credit)
    await run.callbacks.call("on_step_end", run, number, row)
    for epoch in range(run.epochs(number - 1), run.epochs(number)):
        await run.callbacks.call("on_epoch_end", run, epoch + 1, row)
    return True


async def take(run: Run) -> list[Group] | None:
    """The groups of the next step, in the order of issue; None when the run stops."""
    if run.at_epoch_start:
        await run.callbacks.call("on_epoch_begin", run, run.epochs(run.step) + 1)
    await run.callbacks.call("on_step_begin", run, run.step + 1)
    return None if run.stopping else await run.desk.intake.take(run.version)


async def review(parts: Parts, groups: Sequence[Group], fault: Callable[[str], None]) -> Metrics:
    """What a trainer notes of the groups, whose rewards it may change, and what rewards report."""
    noted: Metrics = {}
    if parts.learner is not None:
        noted |= await apart("review", parts.learner.review, groups)
    try:
        noted |= await apart("metrics", parts.scorer.metrics, fault)
    except UserCodeError as error:
        fault(f"rewards: {error}")
    return noted


async def credit(run: Run, groups: Sequence[Group]) -> tuple[Batch, bool, Metrics]:
    """The batch of the groups, whether any rollout got credit, and what `review` noted.

    Raises NoSignalError when no token was sampled, RunError for a wrong number of advantages.
    """
    parts = run.parts
    noted = await review(parts, groups, run.record.fault)
    paired = row_of(parts.loss).reads == "pairs"
    alike = [part for group in scored(groups) for part in group.by_seat]
    returned = await apart("advantages", parts.algorithm.advantages, alike)
    credits = fitting(alike, returned, f"the algorithm {type(parts.algorithm).__name__}")
    samples = make_samples(alike, credits, paired=paired)
    if not samples:
        raise NoSignalError("the rollouts of this step have no sampled token to train on")
    has_credit = any(any(sample.advantages) for sample in samples)
    if penalty := parts.config.algorithm.kl_penalty:
        reference = await run.backend.logprobs([s.token_ids for s in samples], reference=True)
        samples = kl_penalised(samples, reference, penalty)
    batch = batch_of(
        samples,
        loss=parts.loss,
        loss_config=parts.loss_config,
        normalisation=parts.normalisation,
    )
    return batch, has_credit, noted


def scored(groups: Sequence[Group]) -> list[Group]:
    """The groups, without the rollouts that failed."""
    return [Group(group.prompt, group.scored) for group in groups]


async def update(
    run: Run, groups: Sequence[Group], batch: Batch, *, skipped: bool = False
) -> Metrics:
    """Train on the batch; raises NonFiniteError for a loss that is not a finite number.

    If it is `skipped`, the step counts, and the optimizer doesn't move.
    """
    number, tickets = run.step + 1, [group.prompt.id for group in groups]
    run.record.batch(number, tickets, batch)
    started = time.time()
    metrics: Metrics = dict(SKIPPED)
    backend, learner = run.backend, run.parts.learner
    backend.whole = False
    if not skipped:
        call = learner.update(scored(groups), batch) if learner else backend.adapter.update(batch)
        metrics = await backend.within("update", call)
    if not math.isfinite(metrics.get("loss", 0.0)):
        raise NonFiniteError(f"the loss of step {number} is {metrics['loss']}")
    run.step, run.desk.taken = number, []
    run.record.update(number, tickets, metrics.get("loss"), started, skipped=skipped)
    return metrics


async def publish(run: Run, groups: Sequence[Group]) -> Metrics:
    """Publish, and check what is served; an error ends the run when the step is recorded."""
    try:
        await run.publish()
        return {} if run.stopping else await run.backend.check_publish(groups)
    except DeadlineError:  # the adapter doesn't answer, so it can't save either
        raise
    except Exception as error:  # noqa: BLE001 - drive() raises it
        run.fail(error)
        return {}


async def _until_learned(run: Run, learner: asyncio.Task[None]) -> bool:
    """Wait for the learner; return whether a cancellation stopped it. A second one is raised."""
    try:
        await asyncio.wait([learner])
    except asyncio.CancelledError as error:
        if run.stalled:
            raise
        if learner.cancelling():  # by user code that cancels all tasks
            raise RunError(f"user code cancelled the run after step {run.step}") from None
        if learner.done():
            raise  # a stage failed: the task group is ending
        run.request_stop()
        if run.evaluation is not None:
            run.evaluation.cancel()
        ended = bool(error.args) and isinstance(error.args[0], UserCodeError)
        if ended:  # by user code in a task of its own
            run.fail(error.args[0])
        await asyncio.wait([learner])
        return not ended
    return False


@contextmanager
def rare_collections(rollouts: int) -> Iterator[None]:
    """Run the garbage collector rarely, for this many rollouts in flight.

    A stage allocates for all of them before any is done. A pass in between is slow, since it visits
    what all of them use, and finds no garbage.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(50_000, 100 * rollouts), 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
