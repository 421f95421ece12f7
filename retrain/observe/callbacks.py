"""Callbacks: hooks into a run, and the result of a run.

    class Printer(Callback):
        def on_step_end(self, trainer, step, metrics):
            print(step, metrics["reward/mean"])

- Callbacks are called in the given order, one at a time; a hook may be `def` or `async def`.
- They observe the run and may ask it to stop; they get a copy of the metrics.
- Each call has its own task, so an `async with` can't be entered in one hook and left in another.
- An exception in a callback ends the run, with a note that names the callback. `on_train_end` is
  still called on all callbacks, and each may take `deadlines.stall`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from retrain.config import RunConfig
from retrain.errors import shown
from retrain.observe.journal import known
from retrain.observe.run_dir import RunDirectory
from retrain.supervision.boundary import adapter_call, apart
from retrain.supervision.jsonable import default
from retrain.types import Metrics

Status = Literal["completed", "solved", "interrupted", "failed"]
"""`solved`: all groups had the maximum reward before the last step."""
Hook = Literal[
    "on_train_begin", "on_step_begin", "on_step_end", "on_epoch_begin", "on_epoch_end",
    "on_eval_end", "on_checkpoint", "on_train_end",
]  # fmt: skip


class RunFace(Protocol):
    """The running training, as callbacks see it: the `trainer` of every hook."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def step(self) -> int:
        """Finished optimizer steps."""
        ...

    @property
    def total_steps(self) -> int: ...
    @property
    def version(self) -> int:
        """The version of the weights that the sampler serves."""
        ...

    @property
    def run_dir(self) -> RunDirectory: ...
    def request_stop(self) -> None:
        """End the run with a checkpoint after the current step."""
        ...


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The result of a run."""

    status: Status
    total_steps: int
    """Finished optimizer steps, including those before a resume."""
    total_epochs: int
    run_dir: Path
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Of the last step, and of the last evaluation if it followed that step."""
    history: Sequence[Mapping[str, float]] = ()
    """The metrics of every step, in order."""
    best_checkpoint_path: Path | None = None
    model: Path | str | None = None
    """The final model: a folder or the path at a service; None if it was not exported."""
    evaluations: Sequence[Mapping[str, float]] = ()
    """The results of all evaluations, in order. The first one is of the weights before training."""

    @property
    def first_tenth_reward(self) -> float:
        """Mean of `reward/mean` over the first tenth of the steps; NaN without steps."""
        return tenths(self.history)[0]

    @property
    def last_tenth_reward(self) -> float:
        """Mean of `reward/mean` over the last tenth of the steps; NaN without steps."""
        return tenths(self.history)[1]


CLEAR_STEPS, CLEAR_ROLLOUTS = 3, 100
"""In a tenth of a run: below them, the difference of two tenths is mostly noise."""


def has_trend(history: Sequence[Mapping[str, Any]]) -> bool:  # any: also JSON's null
    """Whether the first and the last tenth of the steps are long enough to be compared."""
    rows = [row for row in history if known(row.get("reward/mean"))]
    length = len(rows) // 10
    fewest = min(_rollouts(rows[:length]), _rollouts(rows[-length:])) if length else 0
    return length >= CLEAR_STEPS and fewest >= CLEAR_ROLLOUTS


def _rollouts(rows: Sequence[Mapping[str, Any]]) -> float:
    """Scored rollouts; unlimited if a row does not have their number."""
    return sum(float(row.get("rollouts/ok", math.inf)) for row in rows)


def tenths(history: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean of `reward/mean` over the first and the last tenth of the steps (at least one)."""
    rewards = [row["reward/mean"] for row in history if known(row.get("reward/mean"))]
    if not rewards:
        return math.nan, math.nan
    length = max(1, len(rewards) // 10)
    return fmean(rewards[:length]), fmean(rewards[-length:])


class Callback:
    """Override the hooks that you need; each may be sync or async.

    A sync hook blocks the event loop: one that waits for a disk or a network should be async. One
    that blocks it for `deadlines.blocked` ends the process, without a checkpoint.
    """

    def on_train_begin(self, trainer: RunFace) -> Any:  # any: None, or an awaitable of it
        """Once, before the first rollout."""

    def on_step_begin(self, trainer: RunFace, step: int) -> Any:
        """Before optimizer step `step` (from 1) waits for its batch."""

    def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> Any:
        """After the new weights are served; `metrics` is the line of metrics.jsonl."""

    def on_epoch_begin(self, trainer: RunFace, epoch: int) -> Any:
        """Before the first step of an epoch (from 1), unless one step takes the whole epoch."""

    def on_epoch_end(self, trainer: RunFace, epoch: int, metrics: Metrics) -> Any:
        """After the step that completes an epoch's number of prompts."""

    def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> Any:
        """After the evaluation of held-out prompts with the weights of `step`."""

    def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> Any:
        """After the checkpoint at `path` is complete."""

    def on_train_end(self, trainer: RunFace, result: TrainingResult) -> Any:
        """Once, however the run ends, before the run directory is closed."""

    def state_dict(self) -> Any:
        """The state of this callback to save in checkpoints: a dict of JSON values."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> Any:
        """Restore the result of `state_dict` on a resume, before `on_train_begin`."""


class Nested(Callback):
    """A callback that calls those of a user: they have the deadlines, and errors name them."""


class Callbacks:
    """Calls callbacks in order; raises TypeError if one is a class or not a Callback."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        for one in callbacks if isinstance(callbacks, Sequence) else [None]:
            if not isinstance(one, Callback):
                raise TypeError(
                    f"callbacks: got {shown(callbacks)}, expected a list of instances of classes "
                    "that are derived from retrain.Callback"
                )
        self._callbacks = tuple(callbacks)

    async def call(self, hook: Hook, *arguments: object) -> None:
        """Call this hook of every callback."""
        for callback in self._callbacks:
            await self._called(callback, hook, *map(_own, arguments))

    async def end(self, run: Any, result: TrainingResult, seconds: float) -> None:
        """Call `on_train_end` of every callback, each within `seconds`; then raise the first error.

        `run` is the `trainer` of the hook.
        """
        first: Exception | None = None
        for callback in self._callbacks:
            try:
                await self._within(seconds, "stall", callback, "on_train_end", run, result)
            except Exception as error:  # noqa: BLE001 - raised below
                first = first or error
        if first is not None:
            raise first

    async def state(
        self, fail: Callable[[Exception], None], seconds: float
    ) -> list[dict[str, Any]]:
        """The state of each callback, with the name of its class.

        A callback that fails, or takes longer than `seconds`, doesn't cost the checkpoint: its
        state is empty, and `fail` is called.
        """
        states: list[dict[str, Any]] = []
        for callback in self._callbacks:
            try:
                state = await self._within(seconds, "checkpoint", callback, "state_dict")
            except Exception as error:  # noqa: BLE001 - the run fails with it, after the checkpoint
                state = {}
                fail(error)
            states.append({"of": type(callback).__name__, "state": state})
        return states

    async def restore(self, saved: Sequence[Mapping[str, Any]]) -> None:
        """Restore each callback from the entry at its place, if it is of its class."""
        for callback, entry in zip(self._callbacks, saved, strict=False):
            if entry["of"] == type(callback).__name__ and entry["state"]:
                await self._called(callback, "load_state_dict", dict(entry["state"]))

    async def _within(
        self, seconds: float, key: str, callback: Callback, hook: str, *arguments: object
    ) -> Any:
        """Call a method within `deadlines.KEY`; raises DeadlineError that names the callback."""
        call = self._called(callback, hook, *arguments)
        if isinstance(callback, Nested):
            return await call
        return await adapter_call(f"{type(callback).__name__}.{hook}", call, seconds, key)

    async def _called(self, callback: Callback, hook: str, *arguments: object) -> Any:
        """Call a method in its own task. An error gets a note that names it."""
        name = f"{type(callback).__name__}.{hook}"
        try:
            returned = await apart(name, getattr(callback, hook), *arguments, abandon=True)
            return _copied(returned) if hook == "state_dict" else returned
        except Exception as error:
            if not isinstance(callback, Nested):
                error.add_note(f"raised by the callback {name}")
            raise


def _copied(state: Any) -> dict[str, Any]:  # any: of user code
    """A copy, since the callback may change its own while the checkpoint is written."""
    if not isinstance(state, dict):
        raise TypeError(f"got {shown(state)}, expected a dict of JSON values")
    copy: dict[str, Any] = json.loads(json.dumps(state, default=default))
    return copy


def _own(argument: object) -> object:
    """A copy of metrics, as floats."""
    if isinstance(argument, Mapping):
        return {key: float(value) for key, value in argument.items()}
    return argument
