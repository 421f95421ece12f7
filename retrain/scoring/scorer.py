"""How several rewards make one reward.

`Scorer` runs the calculators of a group at the same time, within bounds and deadlines: plain
functions in threads, async ones in tasks, and those with `processes` in worker processes. A
calculator that fails sets the outcome of its rollout; a failure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from statistics import fmean
from typing import TYPE_CHECKING, Any

from retrain.algorithms.functional import LARGEST
from retrain.config import DeadlinesConfig
from retrain.errors import BudgetError, RunError, UserCodeError, first_of, shown
from retrain.scoring.base import FunctionReward, Reward
from retrain.scoring.calls import attempted_in_thread, compares, group_verdicts, overrides, together
from retrain.scoring.composition import ENVIRONMENT, Composition, Term, WeightedReward, added
from retrain.scoring.processes import ProcessReward
from retrain.scoring.verdicts import check_parts, checked, fail
from retrain.supervision.boundary import boundary, late_error, outcomes
from retrain.supervision.threads import DaemonPool
from retrain.types import Group, Metrics, Trajectory

if TYPE_CHECKING:
    from retrain.scoring.tenure import Tenure

_log = logging.getLogger(__name__)
SLOW = 0.02
"""Seconds. A plain function that is slower gets one thread per rollout instead of per group."""
LOUD = 8
"""After so many consecutive groups in which each call of a reward failed, a warning says so."""
NOT_CALLED: Any = object()
"""In place of the verdict on a rollout for which a gate was closed."""


class Scorer:
    """The rewards of a run. The reward of a rollout is what `Composition` makes of them.

    Each reward scores at most `concurrency` groups at once. Raises PluginError when two rewards
    have the same name, wait for each other in a way that makes no sense, or require arguments that
    nobody gives.
    """

    def __init__(
        self,
        rewards: Sequence[Term],
        *,
        deadlines: DeadlinesConfig = DeadlinesConfig(),  # noqa: B008 - it is frozen
        concurrency: int = 64,
    ) -> None:
        self.composition = Composition(rewards)
        self.rewards = self.composition.rewards
        """Those that call a calculator."""
        self.deadlines = deadlines
        self._bounds = {part.name: asyncio.Semaphore(concurrency) for part in self.rewards}
        self._pool = DaemonPool(4 * concurrency)
        for part in self.rewards:
            if type(part.calculator) is FunctionReward:
                _ = part.calculator.wants  # it raises, if no YAML has checked the function
        self._slow: set[str] = set()
        self._fault: Callable[[str], None] = _log.warning
        self._failed = Counter[str]()
        """For each reward, in how many consecutive groups each of its calls failed."""
        self._gates: dict[str, list[bool]] = {}
        """For each gated reward, whether it was called for the training rollouts since the last
        step: the tickets of evaluations have the epoch -1."""

    @asynccontextmanager
    async def serving(self, fault: Callable[[str], None] = _log.warning) -> AsyncIterator[None]:
        """Set up the rewards, and close them in the end.

        `fault` is called with the error of a `close`, which affects no rollout. Raises RunError
        with every `setup` that fails.
        """
        self._fault = fault
        own = [p for p in self.rewards if overrides(p.calculator, "setup", "close")]
        tenures: list[Tenure] = []
        if own:
            from retrain.scoring.tenure import Tenure

            tenures = [Tenure(p.name, p.calculator, self.deadlines, fault) for p in own]
        try:
            begun = await together([tenure.begin() for tenure in tenures])
            if errors := [error for error in begun if error is not None]:
                raise RunError(first_of([*map(str, errors)], "; ")) from errors[0]
            yield
        finally:
            await together([tenure.end() for tenure in tenures])
            self._pool.close()

    async def score(self, group: Group) -> None:
        """Set `rewards` and `reward` of the rollouts that are `ok`, or their new outcome.

        Raises BudgetError when a reward has used up its budget.
        """
        trajectories = group.scored
        if not trajectories:
            return
        started = time.perf_counter()
        step = group.oldest_version or 0 if self.composition.scheduled else 0
        if self.composition.ordered:
            columns = await self._ordered_columns(trajectories, step)
        else:
            columns = await together([self.verdicts(p, trajectories) for p in self.rewards])
        seconds = round(time.perf_counter() - started, 6)
        rows: Iterable[Sequence[Any]] = zip(*columns, strict=True) if columns else repeat(())
        for trajectory, row in zip(trajectories, rows, strict=False):
            trajectory.seconds["reward"] = seconds
            try:
                self._add_up(trajectory, row, step)
            except UserCodeError as error:
                fail(trajectory, error)

    def metrics(self, fault: Callable[[str], None] = _log.warning) -> Metrics:
        """What the rewards report of a step; `fault` is called with the error of one that fails."""
        gates, self._gates = self._gates, {}
        found = {f"reward/{name}/called": fmean(passed) for name, passed in gates.items()}
        for part in self.rewards:
            if not overrides(part.calculator, "metrics"):
                continue
            owner = f"reward '{part.name}': metrics"
            try:
                with boundary(owner):
                    for key, value in part.calculator.metrics().items():
                        found[f"reward/{part.name}/{key}"] = float(value)
            except UserCodeError as error:
                fault(str(error))
        return found

    async def _ordered_columns(
        self, trajectories: Sequence[Trajectory], step: int
    ) -> list[Sequence[Any]]:
        """The verdicts of each reward, called once those that it needs are known."""
        known: list[dict[str, float]] = [dict(t.rewards) for t in trajectories]
        done = {part.name: asyncio.Event() for part in self.rewards}

        async def column(part: WeightedReward) -> Sequence[Any]:
            for name in self.composition.needs(part.name):
                await done[name].wait()
            admits = [self.composition.admits(part.name, values, step) for values in known]
            training = trajectories[0].prompt.ticket.epoch >= 0
            if training and self.composition.gates[part.name]:
                self._gates.setdefault(part.name, []).extend(admits)
            for trajectory, values in zip(trajectories, known, strict=True):
                trajectory.rewards |= {n: values[n] for n in part.calculator.after if n in values}
            called = [t for t, admitted in zip(trajectories, admits, strict=True) if admitted]
            verdicts = iter(await self.verdicts(part, called) if called else ())
            whole = [next(verdicts) if admitted else NOT_CALLED for admitted in admits]
            for values, verdict in zip(known, whole, strict=True):
                values |= _value(part.name, verdict)
            done[part.name].set()
            return whole

        return await together([column(part) for part in self.rewards])

    def _add_up(self, trajectory: Trajectory, row: Sequence[Any], step: int) -> None:
        """Set `rewards` and `reward`, or another outcome; raises UserCodeError."""
        rewards = trajectory.rewards
        divided: dict[str, Reward] = {}
        largest = abs(rewards.get(ENVIRONMENT, 0.0))
        applies = ENVIRONMENT in rewards or not row
        for part, verdict in zip(self.rewards, row, strict=True):
            if type(verdict) is float and -LARGEST <= verdict <= LARGEST:  # the common case, fast
                rewards[part.name] = verdict
                applies = True
            elif verdict is NOT_CALLED:
                applies = True
            else:
                judged = _recorded(part.name, verdict, trajectory)
                if judged.outcome != "ok":
                    return
                applies = applies or judged.applies
                largest = max(largest, *map(abs, (judged.value, *judged.components.values())))
                if judged.turns or judged.tokens:
                    divided[part.name] = judged
        if not applies:
            trajectory.outcome = "invalid"
            trajectory.info.setdefault("error", "no reward applies to this rollout")
            return
        composition = self.composition
        total = self.total(rewards, step)
        combined = composition.values_of_combined(rewards, step) if composition.combined else {}
        fits = largest <= LARGEST and abs(total) <= LARGEST
        if not fits or (combined and not all(abs(v) <= LARGEST for v in combined.values())):
            raise UserCodeError(
                f"the rewards {shown(rewards, 200)} sum to {total}, expected numbers "
                f"of at most {LARGEST:g}, for a loss in float32. Scale the reward down."
            )
        trajectory.reward = total
        if divided or len(trajectory.turns) > 1:
            self._divide(trajectory, divided, step)
        if combined:
            rewards |= combined

    def _divide(self, trajectory: Trajectory, divided: Mapping[str, Reward], step: int) -> None:
        """Set what each turn and each token earned, as far as the total is a sum of it."""
        own = [turn.reward for turn in trajectory.turns]
        parts = dict(divided) | ({ENVIRONMENT: Reward(0.0, turns=own)} if any(own) else {})
        if not parts:
            return
        factors = self.composition.factors(trajectory.rewards, step)
        scaled = [(factors.get(name, 0.0), reward) for name, reward in parts.items()]
        trajectory.turn_rewards = added([(f, r.turns) for f, r in scaled if r.turns])
        trajectory.token_rewards = added([(f, r.tokens) for f, r in scaled if r.tokens])
        if any(
            not abs(part) <= LARGEST  # nan, too
            for part in (*trajectory.turn_rewards, *trajectory.token_rewards)
        ):
            raise UserCodeError(
                f"a turn or token has a reward above {LARGEST:g}. Scale the reward down."
            )

    def total(self, rewards: Mapping[str, float], step: int) -> float:
        """The reward of a rollout, from those that were calculated."""
        weights = self.composition.weights
        if weights is None:
            return self.composition.total(rewards, step)
        total = rewards.get(ENVIRONMENT, 0.0)  # the common case, fast
        for name, weight in weights:
            total += weight * rewards.get(name, 0.0)  # missing: it does not apply
        return total

    async def verdicts(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:
        """One verdict per trajectory, and a warning if a reward keeps failing: behind a gate it
        would otherwise only drop the rollouts that it should reward."""
        verdicts = await self._called(part, trajectories)
        if verdicts and all(isinstance(verdict, UserCodeError) for verdict in verdicts):
            self._failed[part.name] += 1
            if self._failed[part.name] == LOUD:
                self._fault(
                    f"reward '{part.name}': every call failed in {LOUD} consecutive groups, so "
                    f"none of these rollouts is trained: {verdicts[0]}"
                )
        else:
            self._failed[part.name] = 0
        return verdicts

    async def _called(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:  # any: what user code returned, or an exception; `checked` judges
        """One verdict per trajectory. The deadline starts once the bound admits the group."""
        calculator, owner = part.calculator, f"reward '{part.name}'"
        at_once = partial(outcomes, owner, seconds=self.deadlines.reward, key="reward")
        async with self._bounds[part.name]:
            if isinstance(calculator, ProcessReward):
                return await calculator.verdicts(trajectories)
            if isinstance(calculator, FunctionReward) and not calculator.is_async:
                return await self._in_threads(part, calculator, trajectories)
            if compares(calculator):
                compare = partial(group_verdicts, calculator)
                [verdicts] = await at_once(compare, [trajectories])
                if isinstance(verdicts, UserCodeError):
                    return [verdicts] * len(trajectories)
                return verdicts
            # an async function needs no `calculate` around it
            call = calculator.call if type(calculator) is FunctionReward else calculator.calculate
            return await at_once(call, trajectories)

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
        """One verdict per trajectory. After a slow call the others have a thread, and a deadline,
        each of their own."""
        owner, verdicts = f"reward '{part.name}'", list[Any]()

        def work() -> None:
            for trajectory in trajectories:
                began = time.perf_counter()
                verdicts.append(attempted_in_thread(owner, partial(calculator.call, trajectory)))
                if time.perf_counter() - began > SLOW:
                    self._slow.add(part.name)
                if part.name in self._slow:
                    return

        done = verdicts
        try:
            await self._pool.run(work, self.deadlines.reward)
        except TimeoutError:
            self._slow.add(part.name)
            # a copy: the abandoned thread may still append
            done = [*verdicts, late_error(owner, self.deadlines.reward, "reward")]
        rest = trajectories[len(done) :]
        return [*done, *await self._in_threads(part, calculator, rest)] if rest else done


def _recorded(name: str, verdict: Any, trajectory: Trajectory) -> Reward:
    """The verdict, with its components or its outcome set; raises UserCodeError."""
    judged = checked(name, verdict)
    if judged.outcome != "ok":
        trajectory.outcome = judged.outcome
        error = f"reward '{name}' returned the outcome {judged.outcome}"
        trajectory.info.setdefault("error", error)
        return judged
    if not judged.applies:
        return judged
    check_parts(name, judged, trajectory)
    trajectory.rewards[name] = judged.value
    for component, value in judged.components.items():
        trajectory.rewards[f"{name}.{component}"] = value
    return judged


def _value(name: str, verdict: Any) -> dict[str, float]:
    """What gates know of a verdict: nothing if there is no value."""
    if verdict is NOT_CALLED:
        return {}
    try:
        judged = checked(name, verdict)
    except (UserCodeError, BudgetError):  # `_add_up` raises it again
        return {}
    return {name: judged.value} if judged.outcome == "ok" and judged.applies else {}
