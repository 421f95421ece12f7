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
        self._size = size
        self._instances: dict[int, Instance] = {}
        """By the index of the rollout."""
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
        leaving = [*self._instances.values(), *self._leaving]
        self._instances, self._leaving = {}, []
        await closed(leaving)

    async def _filled(self) -> list[Instance]:
        """The instances: the missing ones are made once those that they replace are closed."""
        for index, instance in list(self._instances.items()):
            if instance.error is not None:  # it failed between two groups
                self._retire(index)
        if self._leaving:
            await asyncio.wait([instance.retire() for instance in self._leaving])
            self._leaving.clear()
        indices = range(self._size)
        made = {index: self._make() for index in indices if index not in self._instances}
        self._instances |= made
        filled = [self._instances[index] for index in indices]
        await together([instance.open() for instance in made.values()])
        for instance in made.values():
            if instance.error is not None and isinstance(instance.error.__cause__, ConfigError):
                raise instance.error.__cause__
        return filled

    def _retire(self, index: int) -> None:
        """Close the instance at this index, beside what follows."""
        if instance := self._instances.pop(index, None):
            instance.retire()
            self._leaving.append(instance)
