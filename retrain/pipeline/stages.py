"""The pipe: train() and its stages, joined by bounded queues in one task group.

    feed --todo--> collect (one a slot) --done--> learn

Data flows one way; what comes back is the weights' version. `feed` starts work only while
(issued and untrained groups) < (staleness.target + 1) x groups_per_step, so target 0 is synchronous
training. `learn` alone decides when to stop; the producers end by cancellation. Cancelling train()
asks the learner to stop: it checkpoints at the step boundary, then train() raises CancelledError; a
second cancellation ends at once.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from retrain.adapters.base import Adapter
from retrain.assembly import Parts, assemble
from retrain.batching import batch_of, fitting, make_samples, penalised
from retrain.concurrency.deadlines import cancelled
from retrain.config import RunConfig
from retrain.errors import NonFiniteError, NoSignalError, RunError
from retrain.losses import row_of
from retrain.observe.callbacks import Callback, Callbacks, Status, TrainingResult
from retrain.observe.run_dir import RunDirectory
from retrain.pipeline.evaluation import evaluate, held_out_loss
from retrain.pipeline.resume import begin_from, checkpoint, restore
from retrain.pipeline.run import Run
from retrain.rollout.playback import Playback
from retrain.rollout.slot import Slot
from retrain.types import Batch, Group, Metrics


async def train(
    config: RunConfig,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    start_from: Path | None = None,
    parts: Parts | None = None,
) -> TrainingResult:
    """Train as `config` says; with `resume`, go on from the run directory's newest checkpoint.

    `start_from` begins a new run with the weights, optimizer and step count of a checkpoint of the
    same model. `parts` replaces what the config's plug-ins would make. Raises ConfigError before
    any model loads, RunError when the run can't go on, CancelledError after a clean checkpoint.
    """
    parts = (parts or assemble(config)).in_form()
    hooks = Callbacks([*callbacks, *parts.loggers])
    opening = parts.open_adapter()  # a missing library is told before there is a run directory
    folder = config.run_dir or Path("runs") / (config.name or "run")
    with RunDirectory.open(folder, parts.resolved(), resume=resume) as run_dir:
        run = Run(config, parts, run_dir, hooks)
        status: Status = "failed"
        failure: BaseException | None = None
        try:
            status = await _open_and_drive(run, opening, resume, start_from)
        except asyncio.CancelledError as error:
            status, failure = "interrupted", error
            raise
        except BaseException as error:
            failure = error
            raise
        finally:
            parts.scorer.close()
            run.checkpoints.close()
            await _tell_the_end(run, status, failure)
        if status == "interrupted":
            raise asyncio.CancelledError
        return run.result(status)


async def _open_and_drive(
    run: Run, opening: Adapter, resume: bool, start_from: Path | None
) -> Status:
    """Enter the adapter, take up what there is, and drive the stages. Raises StallError."""
    try:
        with run.watched():
            async with opening as adapter:
                try:
                    run.serve(adapter)
                    if resume:
                        await restore(run)
                    elif start_from is not None:
                        await begin_from(run, start_from)
                    with _rare_collections():
                        return await drive(run)
                finally:
                    run.watchdog.ending()
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if run.stalled is None or task is None:
            raise
        task.uncancel()
        raise run.stalled from None


async def _tell_the_end(run: Run, status: Status, failure: BaseException | None) -> None:
    """To the files and to the callbacks; an error of theirs doesn't hide why the run failed."""
    first: Exception | None = None
    try:
        run.write_evaluation()
        run.run_dir.event("end", status=status, step=run.step)
        run.run_dir.flush()
    except RunError as error:
        first = error
    try:
        run.report()
        await run.callbacks.on_train_end(run, run.result(status))
    except Exception as error:  # noqa: BLE001 - raised or noted below
        first = first or error
    if first is None:
        return
    if failure is None:
        raise first
    notes = (f"{type(first).__name__}: {first}", *getattr(first, "__notes__", ()))
    failure.add_note(f"and at the end of the run: {', '.join(notes)}")


async def drive(run: Run) -> Status:
    """Run the stages until the learner stops."""
    await run.callbacks.on_train_begin(run)
    async with asyncio.TaskGroup() as stages:
        try:
            learner = stages.create_task(learn(run), name="learn")
            producers = [stages.create_task(feed(run), name="feed")]
            for index in range(run.slots):
                stage = collect(run, run.slot(run.config.algorithm.group_size))
                producers.append(stages.create_task(stage, name=f"collect#{index}"))
            interrupted = await _until_learned(run, learner)
            for producer in producers:
                producer.cancel()
        finally:
            run.watchdog.ending()
    if learner.cancelled():  # by a callback's own cancellation, say: it would pass for an end
        raise RunError(f"the learner was cancelled from inside after step {run.step}")
    if interrupted and run.step < run.total_steps:
        return "interrupted"
    return "solved" if run.signal.solved else "completed"


async def feed(run: Run) -> None:
    """Issue prompts, as many as staleness admits; what a resume kept is finished already."""
    while True:
        while len(run.ledger.open) >= run.admitted:
            run.admit.clear()
            await run.admit.wait()
        ticket = run.ledger.issue()
        if ticket in run.kept:
            await run.done.put(run.kept.pop(ticket))
            continue
        run.run_dir.event("issued", ticket=str(ticket))
        await run.todo.put(run.parts.prompts.prompt(ticket))


async def collect(run: Run, slot: Slot | Playback) -> None:
    """Play one group after the other in this slot."""
    try:
        while True:
            prompt = await run.todo.get()
            started = time.time()
            group = await slot.play(prompt)
            if cancelled():  # and user code took it for something else
                break
            run.record(group, started)
            await run.done.put(group)
    finally:
        await slot.close()


async def learn(run: Run) -> None:
    """Step after step: choose groups, give credit, update, publish; checkpoint and evaluate."""
    config = run.config
    async with asyncio.TaskGroup() as beside:
        while not run.finished:
            groups = await step(run)
            if groups is None:
                break
            every = config.eval.every if config.eval else 0
            to_evaluate = every and not run.stopping and (run.step % every == 0 or run.finished)
            if run.due(config.checkpoint.every) or to_evaluate:
                await checkpoint(run)
            if to_evaluate:
                if run.evaluation is not None:
                    await asyncio.wait([run.evaluation])  # it shares the sampler with training
                if not run.sampled:
                    await _publish(run)
                if not run.stopping:
                    run.evaluating.add(run.step)
                    evaluating = _evaluate(run, run.step)
                    run.evaluation = beside.create_task(evaluating, name="evaluate")
    await checkpoint(run)
    run.model = await run.within(
        "export", run.adapter.export(run.run_dir.path / "final"), limit="checkpoint"
    )
    run.run_dir.event("export", path=None if run.model is None else str(run.model))


async def step(run: Run) -> list[Group] | None:
    """One optimizer step and its publication; None when the run is to stop instead."""
    number, began = run.step + 1, time.perf_counter()
    if run.at_epoch_start:
        await run.callbacks.on_epoch_begin(run, run.epochs + 1)
    await run.callbacks.on_step_begin(run, number)
    groups = None if run.stopping else await run.intake.take(run.version)
    if groups is None:
        return None
    review = run.parts.review
    noted = {} if review is None else await review(groups)
    batch, has_credit, told = await credit(run, groups)
    tickets = [group.prompt.id for group in groups]
    run.run_dir.event(
        "batch",
        step=number,
        tickets=tickets,
        samples=len(batch.samples),
        tokens=batch.denominators.tokens,
    )
    update_began, update_time = time.perf_counter(), time.time()
    metrics = {**noted, **await run.within("update", run.adapter.update(batch))}
    if not math.isfinite(metrics.get("loss", 0.0)):
        raise NonFiniteError(f"the loss of step {number} is {metrics['loss']}")
    before, run.step = run.epochs, number
    run.run_dir.event(
        "update",
        step=number,
        started=update_time,
        ended=time.time(),
        tickets=tickets,
        loss=metrics.get("loss"),
    )
    publish_began, sampled = time.perf_counter(), run.version
    if run.sampled:
        await _publish(run)
    seconds = {
        "wait_for_batch": update_began - began,
        "update": publish_began - update_began,
        "publish": time.perf_counter() - publish_began,
    }
    row = run.meter.row(number, sampled, groups, {**metrics, **told}, seconds)
    row["version"] = run.version
    run.history.append(row)
    run.run_dir.metrics(row)
    run.retire(groups)
    run.signal.step(groups, has_credit)
    await run.callbacks.on_step_end(run, number, row)
    for epoch in range(before, run.epochs):
        await run.callbacks.on_epoch_end(run, epoch + 1, row)
    return groups


async def credit(run: Run, groups: Sequence[Group]) -> tuple[Batch, bool, Metrics]:
    """The groups' batch, whether any rollout got credit, and what there is to say of it.

    Raises NoSignalError when nothing was sampled at all, RunError for a wrong number of advantages.
    """
    parts, told = run.parts, Metrics()
    scored = [Group(group.prompt, group.scored) for group in groups]
    returned = parts.algorithm.advantages(scored)
    credits = fitting(scored, returned, f"the algorithm {type(parts.algorithm).__name__}")
    samples = make_samples(scored, credits, paired=row_of(parts.loss).reads == "pairs")
    if not samples:
        raise NoSignalError("a step's rollouts hold no sampled token: nothing can be trained")
    has_credit = any(any(sample.advantages) for sample in samples)
    if penalty := run.config.algorithm.kl_penalty:
        sequences = [sample.token_ids for sample in samples]
        reference = await run.within(
            "reference log-probs", run.adapter.logprobs(sequences, reference=True), limit="update"
        )
        samples, told["kl/reference"] = penalised(samples, reference, penalty)
    batch = batch_of(
        samples,
        loss=parts.loss,
        loss_config=parts.loss_config,
        normalisation=parts.normalisation,
    )
    return batch, has_credit, told


async def _publish(run: Run) -> None:
    started = time.time()
    run.version = await run.within("publish", run.adapter.publish())
    run.run_dir.event("publish", version=run.version, started=started, ended=time.time())


async def _evaluate(run: Run, step: int) -> None:
    """Evaluate the held-out prompts beside training; mark the checkpoint when it is the best."""
    config, prompts = run.config.eval, run.parts.eval_prompts
    assert config is not None
    assert prompts is not None
    if run.sampled:
        metrics = await evaluate(
            config,
            prompts,
            lambda: run.slot(config.samples),
            concurrency=run.config.train.groups_per_step,
            record=lambda group: run.record_evaluation(group, step),
        )
    else:
        metrics = await held_out_loss(
            prompts,
            run.slot(1),
            lambda *what, **how: run.within(
                "held-out log-probs", run.adapter.logprobs(*what, **how), limit="update"
            ),
            beta=run.parts.loss_config.get("beta"),
        )
    metrics["eval/step"] = step
    reward = metrics.get("eval/reward/mean", -metrics.get("eval/loss", math.inf))
    if reward > run.best_reward:
        run.best_reward = reward
        run.mark_best(step)
    run.evaluating.discard(step)
    run.write_evaluation()  # the one before, where no step came between
    run.meter.evaluation = metrics
    run.run_dir.event("eval", **metrics)
    await run.callbacks.on_eval_end(run, step, metrics)


async def _until_learned(run: Run, learner: asyncio.Task[None]) -> bool:
    """Wait for the learner; whether a cancellation asked it to stop. A second one is raised."""
    try:
        await asyncio.wait([learner])
    except asyncio.CancelledError:
        if learner.done() or learner.cancelling() or run.stalled:
            raise  # a stage failed or nothing moves: the task group is ending
        run.request_stop()
        await asyncio.wait([learner])
        return True
    return False


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let the garbage collector run seldom: thousands of live rollouts make each pass dear.

    At 10,000 in flight the default thresholds cost a third of all CPU time.
    """
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
