"""How several rewards make one reward.

`Scorer` runs the calculators of a group at the same time, within bounds and deadlines: plain
functions in threads, async ones in tasks, and those with `processes` in worker processes. A
calculator that fails sets the outcome of its rollout; a failure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from retrain.algorithms.functional import LARGEST
from retrain.concurrency.deadlines import STUCK_SECONDS, OwnTask, own_task
from retrain.concurrency.threads import DaemonPool
from retrain.config import DeadlinesConfig
from retrain.errors import LateError, PluginError, RunError, UserCodeError, first_of, shown
from retrain.rewarding.base import FunctionReward, RewardCalculator
from retrain.rewarding.calls import (
    compares,
    group_verdicts,
    judged,
    judged_in_thread,
    result_of,
    together,
)
from retrain.rewarding.processes import ProcessReward
from retrain.rewarding.tenure import Tenure
from retrain.rewarding.verdicts import checked, fail
from retrain.types import Group, Trajectory

_log = logging.getLogger(__name__)
SLOW = 0.02
"""Seconds. A plain function that is slower gets one thread per rollout instead of per group."""


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One of the rewards of a run."""

    name: str
    weight: float
    calculator: RewardCalculator


class Scorer:
    """The rewards of a run. The reward of a rollout is their weighted sum.

    Each reward scores at most `concurrency` groups at once. Raises PluginError when two rewards
    have the same name.
    """

    def __init__(
        self,
        rewards: Sequence[WeightedReward],
        *,
        deadlines: DeadlinesConfig = DeadlinesConfig(),  # noqa: B008 - it is frozen
        concurrency: int = 64,
    ) -> None:
        names = [part.name for part in rewards]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PluginError(f"several rewards have the name {twice}: give each its own `name`")
        self.rewards = tuple(rewards)
        self.deadlines = deadlines
        self._bounds = {part.name: asyncio.Semaphore(concurrency) for part in rewards}
        self._pool = DaemonPool(4 * concurrency)
        self._slow: set[str] = set()

    @asynccontextmanager
    async def serving(self, fault: Callable[[str], None] = _log.warning) -> AsyncIterator[None]:
        """Set up the rewards, and close them in the end.

        `fault` is called with the error of a `close`, which affects no rollout. Raises RunError
        with every `setup` that fails.
        """
        tenures = [Tenure(p.name, p.calculator, self.deadlines, fault) for p in self.rewards]
        try:
            errors = [error for tenure in tenures if (error := await tenure.ready())]
            if errors:
                raise RunError(first_of([*map(str, errors)], "; ")) from errors[0]
            yield
        finally:
            await together([tenure.end() for tenure in tenures])
            self._pool.close()

    async def score(self, group: Group) -> None:
        """Set `rewards` and `reward` of the rollouts that are `ok`, or their new outcome."""
        trajectories = group.scored
        if not trajectories:
            return
        started = time.perf_counter()
        columns = await together([self.verdicts(p, trajectories) for p in self.rewards])
        seconds = round(time.perf_counter() - started, 6)
        for index, trajectory in enumerate(trajectories):
            trajectory.seconds["reward"] = seconds
            try:
                self._add_up(trajectory, [column[index] for column in columns])
            except UserCodeError as error:
                fail(trajectory, error)

    def _add_up(self, trajectory: Trajectory, row: Sequence[Any]) -> None:
        rewards = trajectory.rewards
        total = rewards.get("environment", 0.0)
        largest = abs(total)
        for part, verdict in zip(self.rewards, row, strict=True):
            if type(verdict) is float and abs(verdict) <= LARGEST:  # the common case, fast
                rewards[part.name] = verdict
                total += part.weight * verdict
                continue
            judged = checked(part.name, verdict)
            if judged.outcome != "ok":
                trajectory.outcome = judged.outcome
                error = f"reward '{part.name}' returned the outcome {judged.outcome}"
                trajectory.info.setdefault("error", error)
                return
            rewards[part.name] = judged.value
            for component, value in judged.components.items():
                rewards[f"{part.name}.{component}"] = value
            total += part.weight * judged.value
            largest = max(largest, *map(abs, (judged.value, *judged.components.values())))
        if largest > LARGEST or abs(total) > LARGEST:
            raise UserCodeError(
                f"the rewards {shown(rewards, 200)} sum to {total}, expected numbers "
                f"of at most {LARGEST:g}, for a loss in float32. Scale the reward down."
            )
        trajectory.reward = total

    async def verdicts(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:  # any: what user code returned, or an exception; `checked` judges
        """One verdict per trajectory. The deadline starts once the bound admits the group."""
        calculator = part.calculator
        async with self._bounds[part.name]:
            if isinstance(calculator, ProcessReward):
                return await calculator.verdicts(trajectories)
            if isinstance(calculator, FunctionReward) and not calculator.is_async:
                return await self._in_threads(part, calculator, trajectories)
            if compares(calculator):
                [verdicts] = await self._in_tasks(
                    part, [partial(group_verdicts, calculator, trajectories)]
                )
                failed = isinstance(verdicts, UserCodeError)
                return [verdicts] * len(trajectories) if failed else verdicts
            # an async function needs no `calculate` around it
            call = calculator.call if type(calculator) is FunctionReward else calculator.calculate
            return await self._in_tasks(part, [partial(call, t) for t in trajectories])

    async def _in_tasks(
        self, part: WeightedReward, calls: Sequence[Callable[[], Awaitable[Any]]]
    ) -> list[Any]:
        """All calls at once; one that fails or is late affects only its rollout.

        Each has its own task, so that code that cancels its task cancels nothing else. A late call
        is cancelled, but not awaited.
        """
        owner = f"reward '{part.name}'"
        tasks = [own_task(judged(owner, call), owner) for call in calls]
        late: set[OwnTask[Any]] = set()
        try:
            await asyncio.sleep(0)  # calls that never wait are done after this
            if waiting := [task for task in tasks if not task.done()]:
                _, late = await asyncio.wait(waiting, timeout=self.deadlines.reward)
        except asyncio.CancelledError:
            for task in tasks:
                task.end()
            await asyncio.wait(tasks, timeout=STUCK_SECONDS)
            raise
        for task in late:
            task.end()
        return [self._late(part) if task in late else result_of(owner, task) for task in tasks]

    async def _in_threads(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        """A plain function: one thread per group while it is fast, else one per rollout."""
        pieces = [[t] for t in trajectories] if part.name in self._slow else [trajectories]
        pieces = await together([self._thread(part, calculator, piece) for piece in pieces])
        return [verdict for piece in pieces for verdict in piece]

    async def _thread(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        owner, verdicts = f"reward '{part.name}'", list[Any]()

        def work() -> None:
            began = time.perf_counter()
            for trajectory in trajectories:
                call = partial(calculator.call, trajectory)
                verdicts.append(judged_in_thread(owner, call))
            if time.perf_counter() - began > SLOW * len(trajectories):
                self._slow.add(part.name)

        try:
            await self._pool.run(work, self.deadlines.reward)
        except TimeoutError:
            self._slow.add(part.name)
            done = list(verdicts)  # a copy: the abandoned thread may still append
            return done + [self._late(part)] * (len(trajectories) - len(done))
        return verdicts

    def _late(self, part: WeightedReward) -> LateError:
        return LateError(
            f"reward '{part.name}' took longer than deadlines.reward = {self.deadlines.reward} s"
        )
