"""Find the run directory of a run, checkpoint the run, and restore it.

A checkpoint holds the run as it is at its `snapshot` event. What happens while the adapter saves
the weights belongs to the next checkpoint.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from retrain.adapters.base import AdapterState
from retrain.config import RunConfig
from retrain.errors import AdapterError, CheckpointError, ConfigError, DeadlineError, first_of
from retrain.observe.naming import last_folder, unclaim, unused_folder, wanted_folder
from retrain.observe.run_dir import check_usable, read_events, surviving
from retrain.pipeline.checkpoint import (
    DATA,
    SCORING,
    Checkpoint,
    Checkpoints,
    changed_keys,
    changed_run,
    changes,
    group_from_json,
    group_to_json,
    read,
    verified,
)
from retrain.pipeline.run import Run
from retrain.supervision.jsonable import plain

logger = logging.getLogger(__name__)


@contextmanager
def in_run_dir(config: RunConfig, *, resume: bool) -> Iterator[RunConfig]:
    """`config` with its run directory: the given one, or else runs/NAME, runs/NAME-2, ...

    A new run creates the next one, and removes it if it fails before it writes; `resume` takes the
    last one. Raises ConfigError if a given one has a run or is in use, or if there is no run to
    resume, or it had another model, algorithm or data.
    """
    claims = config.run_dir is None and not resume
    config = with_run_dir(config, resume=resume)
    with ExitStack() as failed:
        if claims and config.run_dir is not None:
            failed.callback(unclaim, config.run_dir)
        yield config
        failed.pop_all()


def with_run_dir(config: RunConfig, *, resume: bool) -> RunConfig:
    """Like `in_run_dir`, without removing what was claimed."""
    if config.run_dir is None:
        folder = last_folder(config) if resume else unused_folder(config)
        if folder is None:
            raise ConfigError(
                f"no run to resume in {wanted_folder(config)}: drop --resume, or pass --run-dir"
            )
        config = config.model_copy(update={"run_dir": folder})
    assert config.run_dir is not None
    check_usable(config.run_dir, resume=resume)
    if resume:
        saved = Checkpoints(config.run_dir / "checkpoints").last_config()
        if saved is not None and (problem := changed_run(saved, config)):
            raise ConfigError(problem)
    return config


async def checkpoint(run: Run) -> None:
    """Write the checkpoint of this step, if there is none yet; then delete the oldest ones.

    It waits for an evaluation under way, which a resume from here couldn't do again. If that one
    was cut off, there is no checkpoint of a later step: a resume continues from the evaluated one.
    """
    if run.checkpoints.saved == run.step:
        return
    owed = None
    if run.evaluation is not None:
        await run.evaluation.previous()
        owed = run.evaluation.owed
    if owed is not None and owed == run.checkpoints.saved:
        logger.warning(
            "the evaluation of step %d did not end: a resume repeats it and continues from there, "
            "so no checkpoint of step %d is written",
            owed,
            run.step,
        )
        return
    callbacks = await run.callbacks.state(
        run.failed_callback, run.config.deadlines.checkpoint
    )  # before: user code is not to run
    fill = partial(_fill, run, callbacks)
    path = await run.backend.within(
        "save",
        run.checkpoints.write(run.step, fill, before=run.run_dir.sync),
        limit="checkpoint",
    )
    run.record.checkpoint(run.step, path)
    for old in run.checkpoints.prune(run.config.checkpoint.keep):
        try:
            state = AdapterState(old / "adapter", read(old).adapter)
            forgetting = run.backend.adapter.forget(state)
            await run.backend.within("forget", forgetting, limit="checkpoint")
        except (AdapterError, CheckpointError, DeadlineError) as error:
            run.record.fault(f"{old.name}: {error}")
        run.checkpoints.remove(old)
    await run.callbacks.call("on_checkpoint", run, run.step, path)


async def _fill(run: Run, callbacks: Sequence[Mapping[str, Any]], folder: Path) -> Checkpoint:
    """Take the state of the run, then let the adapter save into `folder`."""
    evaluation, learner = run.evaluation, run.parts.learner
    run.desk.intake.drain()
    finished = (*run.desk.intake.held.values(), *run.desk.kept.values())
    run.record.event("snapshot", step=run.step)
    sizes = run.run_dir.sizes()
    taken = Checkpoint(
        step=run.step,
        version=run.backend.version,
        ledger=run.desk.ledger.state(),
        groups=[group_to_json(group) for group in finished],
        adapter={},
        counters={
            **run.signal.state(),
            "evaluation": (
                evaluation.state(run.step, last=run.complete) if evaluation else run.evaluated
            ),
            "sizes": sizes,
            "failed_in_a_row": run.desk.intake.failed_in_a_row,
            "data_since": run.data_since,
            "published": run.backend.published,
            "rows": run.desk.rows,
            "rows_hash": run.desk.rows_hash,
            "callbacks": callbacks,
            "learner": {} if learner is None else learner.state(),
        },
        config=plain(run.config.model_dump()),
    )
    (folder / "adapter").mkdir()
    state = await run.backend.adapter.save(folder / "adapter")
    return replace(taken, adapter=dict(state.data))


async def restore(run: Run) -> None:
    """Continue from the newest complete checkpoint; from the beginning if none was ever written.

    Raises CheckpointError when all are incomplete or gone, or the run can't go on from it.
    """
    found = await asyncio.to_thread(run.checkpoints.newest)
    for skipped in run.checkpoints.incomplete:
        run.record.event("incomplete", checkpoint=skipped)
        run.record.fault(f"skipped the incomplete checkpoint {skipped}")
    if found is None:
        _require_no_checkpoint(run)
        run.record.resumed(0, {}, [], anew=True)
        return
    path, saved = found
    if problem := changed_run(saved.config, run.config):
        raise CheckpointError(problem)
    before, rows = saved.counters.get("rows"), run.desk.rows
    if before not in (None, rows):
        raise CheckpointError(
            f"this run can't be resumed: its prompts had {before} rows, now they have {rows}. "
            "Restore the data, or start a new run with --run-dir."
        )
    hashed = saved.counters.get("rows_hash")
    if hashed and run.desk.rows_hash not in ("", hashed):
        run.record.fault(
            "the rows of the prompts differ from those of the checkpoint, so the rest of the run "
            "trains on other prompts. Restore the data, or make its source return the same rows "
            "each time"
        )
    run.checkpoints.saved = saved.step
    await _load(run, path, saved)
    changed = changed_keys(saved.config, run.config)
    run.record.resumed(saved.step, saved.counters["sizes"], changed)
    _take_up(run, saved, saved.groups)
    evaluated = saved.counters["evaluation"]
    if run.evaluation is not None:
        run.evaluation.restore(evaluated)
    elif evaluated:
        run.evaluated = {**evaluated, "owed": None}
    await _ready(run, saved)


def _require_no_checkpoint(run: Run) -> None:
    """Raise CheckpointError if the run has written a checkpoint, of which nothing usable is left.

    To begin again would move all that was logged to `voided/`.
    """
    events = surviving(read_events(run.run_dir.path))
    steps = [event["step"] for event in events if event["event"] == "checkpoint"]
    if not steps and not run.checkpoints.incomplete:
        return
    why = first_of(run.checkpoints.incomplete, "; ") or f"step_{max(steps)} is missing"
    raise CheckpointError(
        f"no complete checkpoint in {run.checkpoints.folder}: {why}. Restore one from a backup. "
        f"To start over, delete {run.run_dir.path}, or start a new run with another --run-dir."
    )


async def begin_from(run: Run, path: Path) -> None:
    """Begin a new run from the checkpoint at `path` of another run of the same model.

    Weights, optimizer and step count continue. So does the position in the data if the prompts are
    the same, and so do the finished groups if they would be scored the same. Raises
    CheckpointError.
    """
    saved = await asyncio.to_thread(verified, path)
    await _load(run, path, saved)
    if run.evaluation is not None:
        run.evaluation.owed = saved.step
    if changes(saved.config, run.config, DATA):
        run.data_since = run.step
        run.record.event("resumed", from_step=run.step, checkpoint=str(path))
    else:
        _take_up(run, saved, [] if changes(saved.config, run.config, SCORING) else saved.groups)
        run.record.event("resumed", from_step=run.step, changed=run.run_dir.changed)
    await _ready(run, saved)


async def _load(run: Run, path: Path, saved: Checkpoint) -> None:
    await run.backend.within(
        "load",
        run.backend.adapter.load(AdapterState(path / "adapter", saved.adapter)),
        limit="checkpoint",
    )
    run.step, run.backend.version = saved.step, saved.version
    # until all is restored: a rescue would save the position of a new run
    run.backend.whole = False
    if run.parts.learner is not None:
        run.parts.learner.restore(saved.step, saved.counters.get("learner", {}))
    await run.callbacks.restore(saved.counters.get("callbacks", []))


async def _ready(run: Run, saved: Checkpoint) -> None:
    """All is restored; publish the weights under their own version if the run failed to."""
    if not saved.counters.get("published", True):
        await run.publish()
    run.backend.whole = True


def _take_up(run: Run, saved: Checkpoint, groups: Sequence[Mapping[str, Any]]) -> None:
    """Continue at the position of `saved` in the data, with its finished `groups`."""
    finished = [group_from_json(g, run.desk.prompt) for g in groups]
    run.desk.kept = {group.ticket: group for group in finished}
    for group in finished:
        run.record.keep(group)
    run.desk.ledger.restore(saved.ledger)
    run.data_since = saved.counters.get("data_since", 0)
    run.signal.restore(saved.counters)
    run.desk.intake.restore(saved.counters["failed_in_a_row"])
