"""How a run fails: after the step under way, with a checkpoint if the weights are good (P13)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

from retrain.errors import CheckpointError, NonFiniteError
from retrain.observe.failure import causes, first_line
from retrain.observe.progress import near
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.run import Run

Stage = Callable[[Run], Coroutine[Any, Any, None]]


def stops_the_learner(stage: Stage) -> Stage:
    """A stage whose error ends the run after the step under way, so that no update is lost."""

    async def guarded(run: Run) -> None:
        try:
            await stage(run)
        except Exception as error:  # noqa: BLE001 - drive() raises it
            run.fail(error)

    return guarded


@asynccontextmanager
async def with_failures(run: Run) -> AsyncIterator[None]:
    """At the end, raise the errors of all stages in one group."""
    try:
        yield
    except BaseExceptionGroup as group:
        if not run.failures:
            raise
        known = {first_line(error) for error in run.failures}
        others = [error for error in group.exceptions if first_line(error) not in known]
        raise group.derive([*run.failures, *others]) from None
    if run.failures:
        raise ExceptionGroup("the run failed", run.failures)


async def rescue(run: Run, error: BaseException) -> None:
    """Checkpoint a run that fails with `error`, if the weights are good (P13).

    What was saved is noted on the error, and so is a failure to save.
    """
    if run.run_dir.missing():
        return  # it could not be resumed
    bad = any(isinstance(cause, NonFiniteError | CheckpointError) for cause in causes(error))
    try:
        if run.backend.whole and run.step and not bad and run.checkpoints.saved != run.step:
            run.backend.adapter.stop_retrying()
            for group in run.desk.taken:
                run.desk.drop(group, "unfinished")
            run.desk.intake.drain()
            run.desk.intake.drop_held(lambda group: not group.scored, "unfinished")
            await checkpoint(run)
    except (Exception, asyncio.CancelledError) as another:  # noqa: BLE001 - `error` is raised
        missing = run.checkpoints.saved != run.step
        what = f"no checkpoint of step {run.step} was written" if missing else "also failed"
        error.add_note(f"{what}: {first_line(another)}")
    if run.checkpoints.saved is not None:
        path = near(run.checkpoints.path(run.checkpoints.saved))
        error.add_note(
            f"saved: {path}. Fix the cause, then continue with --resume (from Python: resume=True)."
        )
