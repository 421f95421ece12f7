"""A slot: one group at a time, in environment instances of its own.

Instances are made at the slot's first group and set up few at a time, so that ten thousand slots
don't connect at once. An instance whose rollout failed is closed and replaced: a fault never
reaches the next group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from retrain.config import DeadlinesConfig
from retrain.environment import Environment
from retrain.errors import blame
from retrain.rewarding import Scorer
from retrain.rollout import Rollouts
from retrain.types import Group, Outcome, Prompt, Trajectory


class Slot:
    """Plays and scores groups of `size` rollouts, one group after the other."""

    def __init__(
        self,
        size: int,
        make: Callable[[], Environment],
        rollouts: Rollouts,
        scorer: Scorer,
        setups: asyncio.Semaphore,
    ) -> None:
        self._make = make
        self._rollouts = rollouts
        self._scorer = scorer
        self._setups = setups
        self._environments: list[Environment | None] = [None] * size
        self.close_errors: list[str] = []
        """What went wrong in `close`, which touches no rollout."""

    async def play(self, prompt: Prompt) -> Group:
        """One scored group; raises only what the sampler raises."""
        failed = await self._fill(prompt)
        if failed is not None:
            return Group(prompt, [failed, *self._unplayed(prompt, failed)])
        group = await self._rollouts.play(prompt, [e for e in self._environments if e])
        await self._replace_failed(group)
        await self._scorer.score(group)
        return group

    async def close(self) -> None:
        """Close every instance, each within its deadline."""
        for index, environment in enumerate(self._environments):
            if environment is not None:
                self._environments[index] = None
                await self._close(environment)

    async def _fill(self, prompt: Prompt) -> Trajectory | None:
        """Make the missing instances; the failed rollout when one of them can't be had."""
        missing = [i for i, kept in enumerate(self._environments) if kept is None]
        if not missing:
            return None
        made = await asyncio.gather(*(self._set_up(prompt) for _ in missing))
        for index, environment in zip(missing, made, strict=True):
            if isinstance(environment, Environment):
                self._environments[index] = environment
        return next((failed for failed in made if isinstance(failed, Trajectory)), None)

    async def _set_up(self, prompt: Prompt) -> Environment | Trajectory:
        """A new instance, or the failed rollout that says why there is none."""
        name = "the environment"
        try:
            environment = self._make()
            name = f"{type(environment).__name__}.setup"
            if type(environment).setup is Environment.setup:
                return environment
            async with self._setups, asyncio.timeout(self._deadlines.setup):
                await environment.setup()
        except TimeoutError:
            return _failed(
                prompt,
                "timeout",
                f"{name} took longer than deadlines.setup = {self._deadlines.setup} s",
            )
        except Exception as error:  # noqa: BLE001 - the boundary that attributes user errors
            return _failed(prompt, "infra_error", str(blame(name, error)))
        return environment

    def _unplayed(self, prompt: Prompt, failed: Trajectory) -> list[Trajectory]:
        return [
            _failed(prompt, failed.outcome, failed.info["error"]) for _ in self._environments[1:]
        ]

    async def _replace_failed(self, group: Group) -> None:
        for index, trajectory in enumerate(group.trajectories):
            environment = self._environments[index]
            if trajectory.outcome in ("infra_error", "timeout") and environment is not None:
                self._environments[index] = None
                await self._close(environment)

    async def _close(self, environment: Environment) -> None:
        if type(environment).close is Environment.close:
            return
        try:
            async with asyncio.timeout(self._deadlines.close):
                await environment.close()
        except Exception as error:  # noqa: BLE001 - the rollouts are done: nothing depends on it
            self.close_errors.append(str(blame(f"{type(environment).__name__}.close", error)))

    @property
    def _deadlines(self) -> DeadlinesConfig:
        return self._rollouts.deadlines


def _failed(prompt: Prompt, outcome: Outcome, error: str) -> Trajectory:
    return Trajectory(prompt, outcome=outcome, info={"error": error})
