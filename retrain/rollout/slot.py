"""A slot plays one group at a time, in its own environment instances.

Instances are made with the first group of the slot. Only a few are set up at a time, so that ten
thousand slots don't connect at once. An instance whose rollout failed is closed and replaced, so
that a fault never affects the next group.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from retrain.environment import Environment
from retrain.errors import ConfigError
from retrain.rollout.group import Rollouts
from retrain.rollout.instance import Instance, closed
from retrain.scoring import Scorer
from retrain.scoring.calls import together
from retrain.supervision.jsonable import plain
from retrain.types import Group, Prompt

RETIRING = ("infra_error", "timeout")
"""Outcomes after which an instance is replaced."""
_LOG = logging.getLogger(__name__)


class Slot:
    """Plays and scores groups of `size` rollouts, one group after the other."""

    def __init__(
        self,
        size: int,
        make: Callable[[], Environment],
        rollouts: Rollouts,
        scorer: Scorer,
        setups: asyncio.Semaphore | None = None,
        fault: Callable[[str], None] = _LOG.warning,
    ) -> None:
        """`setups` bounds how many instances are set up at once, over all slots that share it.

        `fault` is called with an error that affects no rollout, such as one of `close`.
        """
        setups = setups or asyncio.Semaphore(size)
        self._rollouts = rollouts
        self._scorer = scorer
        self._make = partial(Instance, make, rollouts.deadlines, setups, fault)
        self._instances: list[Instance | None] = [None] * size
        self._leaving: list[Instance] = []

    async def play(self, prompt: Prompt) -> Group:
        """Play and score one group. Raises what the sampler raises, or `setup` as ConfigError."""
        group = await self._rollouts.play(prompt, await self._filled())
        for index in {t.index for t in group.trajectories if t.outcome in RETIRING}:
            self._retire(index)
        for alike in group.by_seat:
            await self._scorer.score(alike)
        for trajectory in group.trajectories:
            if trajectory.info:  # user code may still change its dict
                trajectory.info = plain(trajectory.info)
        return group

    async def close(self) -> None:
        """Close all instances at the same time, within their deadline."""
        present = [instance for instance in self._instances if instance is not None]
        leaving = [*present, *self._leaving]
        self._instances, self._leaving = [None] * len(self._instances), []
        await closed(leaving)

    async def _filled(self) -> list[Instance]:
        """The instances: the missing ones are made once those that they replace are closed."""
        for index, instance in enumerate(self._instances):
            if instance is not None and instance.error is not None:  # it failed between two groups
                self._retire(index)
        present = [instance for instance in self._instances if instance is not None]
        if len(present) == len(self._instances):  # each is ready
            return present
        if self._leaving:
            await asyncio.wait([instance.retire() for instance in self._leaving])
            self._leaving.clear()
        missing = [index for index, kept in enumerate(self._instances) if kept is None]
        filled = [self._make() if kept is None else kept for kept in self._instances]
        self._instances[:] = filled
        await together([filled[index].open() for index in missing])
        for instance in filled:
            if instance.error is not None and isinstance(instance.error.__cause__, ConfigError):
                raise instance.error.__cause__
        return filled

    def _retire(self, index: int) -> None:
        """Close the instance at this index, beside what follows."""
        instance, self._instances[index] = self._instances[index], None
        if instance is not None:
            instance.retire()
            self._leaving.append(instance)
