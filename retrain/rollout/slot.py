"""A slot plays one group at a time, in its own environment instances.

Instances are made with the first group of the slot. Only a few are set up at a time, so that ten
thousand slots don't connect at once. An instance whose rollout failed is closed and replaced, so
that a fault never affects the next group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from retrain.concurrency.deadlines import is_theirs, user_call
from retrain.config import DeadlinesConfig
from retrain.environment import Environment
from retrain.errors import UserCodeError, blame
from retrain.rewarding import Scorer, fail
from retrain.rollout.group import Rollouts
from retrain.types import Group, Prompt, Trajectory


class Slot:
    """Plays and scores groups of `size` rollouts, one group after the other."""

    def __init__(
        self,
        size: int,
        make: Callable[[], Environment],
        rollouts: Rollouts,
        scorer: Scorer,
        setups: asyncio.Semaphore,
        fault: Callable[[str], None],
    ) -> None:
        """`fault` is called with the error of a `close`, which affects no rollout."""
        self._make = make
        self._rollouts = rollouts
        self._scorer = scorer
        self._setups = setups
        self._fault = fault
        self._environments: list[Environment | None] = [None] * size

    async def play(self, prompt: Prompt) -> Group:
        """Play and score one group. Raises only what the sampler raises."""
        if error := await self._fill():
            group = Group(prompt, [Trajectory(prompt) for _ in self._environments])
            for trajectory in group.trajectories:
                fail(trajectory, error)
            return group
        group = await self._rollouts.play(prompt, [e for e in self._environments if e is not None])
        outcomes = enumerate(t.outcome for t in group.trajectories)
        await self._drop([i for i, o in outcomes if o in ("infra_error", "timeout")])
        await self._scorer.score(group)
        return group

    async def close(self) -> None:
        """Close all instances at the same time, each within its deadline."""
        await self._drop(range(len(self._environments)))

    async def _fill(self) -> UserCodeError | None:
        """Make the missing instances; return why one can't be made."""
        missing = [i for i, kept in enumerate(self._environments) if kept is None]
        if not missing:
            return None
        async with asyncio.TaskGroup() as setups:
            made = [setups.create_task(self._set_up(index)) for index in missing]
        return next((error for task in made if (error := task.result())), None)

    async def _set_up(self, index: int) -> UserCodeError | None:
        """Make and set up one instance; return why that fails."""
        name = "the environment"
        try:
            environment = self._make()
        except BaseException as error:
            if not is_theirs(error):
                raise
            return blame(name, error)
        name = type(environment).__name__
        if type(environment).setup is Environment.setup:
            self._environments[index] = environment
            return None
        async with self._setups:
            self._environments[index] = environment  # so that it is closed, whatever happens
            try:
                await user_call(f"{name}.setup", environment.setup, self._deadlines.setup, "setup")
            except UserCodeError as error:
                await self._drop([index])
                return error
        return None

    async def _drop(self, places: Iterable[int]) -> None:
        """Remove and close the instances at these indices."""
        async with asyncio.TaskGroup() as closing:
            for index in places:
                environment, self._environments[index] = self._environments[index], None
                if environment is not None and type(environment).close is not Environment.close:
                    closing.create_task(self._close(environment))

    async def _close(self, environment: Environment) -> None:
        name = f"{type(environment).__name__}.close"
        try:
            await user_call(name, environment.close, self._deadlines.close, "close")
        except UserCodeError as error:
            self._fault(str(error))

    @property
    def _deadlines(self) -> DeadlinesConfig:
        return self._rollouts.deadlines
