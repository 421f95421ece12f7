"""Play a group: G rollouts of one prompt, each in its own Environment.

After reset, rollouts with equal prompts share one `sample(n=...)`, so that the prompt is prefilled
once. An environment that fails sets the outcome of its rollout only; a sampler that fails ends the
run. How a rollout goes on after its opening is up to its kind of episode.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from copy import copy
from typing import Any

from retrain.environment import Environment
from retrain.errors import UserCodeError, shown
from retrain.rollout.episode import Episode, Shared
from retrain.rollout.instance import Instance
from retrain.rollout.opponents import Opponent
from retrain.sampler import Sampler
from retrain.scoring.calls import together
from retrain.supervision.boundary import boundary
from retrain.types import Group, Prompt


class Rollouts(Shared):
    """Plays groups, with the sampler, the chat format and the limits of a run."""

    def held_out(self, sampler: Sampler, opponents: Mapping[str, Opponent]) -> Rollouts:
        """The same with the sampler and the opponents of an evaluation."""
        other = copy(self)
        other.sampler, other.opponents = sampler, opponents
        return other

    async def play(self, prompt: Prompt, instances: Sequence[Instance]) -> Group:
        """Play one rollout of `prompt` in each instance; one that isn't set up fails.

        Raises AdapterError or DeadlineError when the sampler fails.
        """
        episodes = [self._episode(prompt, *place) for place in enumerate(instances)]
        await _reset([episode for episode in episodes if episode.alive])
        await self._first_turns(episodes, self._begin(episodes))
        await _play([episode for episode in episodes if episode.alive])
        return Group(prompt, [t for episode in episodes for t in episode.trajectories()])

    def _episode(self, prompt: Prompt, index: int, instance: Instance) -> Episode:
        """The rollout of `prompt` in an instance, which knows the prompt from now on."""
        if index:  # dataclasses.replace takes three times as long
            own = prompt.id, prompt.messages, prompt.answer, prompt.metadata, prompt.seed
            prompt = Prompt(*own, index, prompt.plain)
        kind, error = Episode, instance.error
        seats: tuple[str, ...] = ()
        if error is None:
            try:
                with boundary(f"{instance.name}.reset"):
                    instance.environment.prompt = prompt
                seats = seats_of(instance.name, instance.environment)
                kind = kind_of(instance, seats)
            except UserCodeError as raised:
                error = raised
        episode = kind(self, prompt, instance, index, seats)
        if error is not None:
            episode.fail(error)
        return episode

    def _begin(self, episodes: Sequence[Episode]) -> list[list[Episode]]:
        """Tokenise the opening messages, equal ones once; return the rollouts with equal ones."""
        begun: list[Episode] = []
        together: dict[int, list[Episode]] = {}
        for episode in [e for e in episodes if e.alive and e.opens]:
            opening = episode.opening, episode.tools
            same = next((other for other in begun if (other.opening, other.tools) == opening), None)
            episode.begin(None if same is None else same.conversation)
            if episode.alive:
                begun.append(episode)
                episode.trajectory.tools = episode.conversation.tools
                if episode.has_room():  # equal openings share one list
                    together.setdefault(id(episode.conversation.prompt_ids), []).append(episode)
        return list(together.values())

    async def _first_turns(
        self, episodes: Sequence[Episode], together: Sequence[Sequence[Episode]]
    ) -> None:
        """Sample all first turns, those of equal prompts `together`."""
        if len(together) == 1:  # a failed one keeps its place: the others sample what they would
            await self._first_turn(together[0][0], episodes)
        elif together:
            async with asyncio.TaskGroup() as tasks:
                for members in together:
                    tasks.create_task(self._first_turn(members[0], members))

    async def _first_turn(self, sampling: Episode, members: Sequence[Episode]) -> None:
        completions = await sampling.sample(n=len(members), index=members[0].index)
        seconds = sampling.trajectory.seconds["sample"]
        for member, completion in zip(members, completions, strict=True):
            member.first = completion
            member.trajectory.seconds["sample"] = seconds


def kind_of(instance: Instance, seats: Sequence[str]) -> type[Episode]:
    """The kind of episode that an environment plays, by the methods that its class overrides.

    A kind is imported when it is needed. Raises UserCodeError if there are seats, but no method
    that plays them.
    """
    if "run" in instance.overridden:
        from retrain.rollout.agent import AgentRun

        return AgentRun
    if seats and "step" in instance.overridden:
        from retrain.rollout.seats import SeatedSteps

        return SeatedSteps
    if "step" in instance.overridden:
        from retrain.rollout.steps import Steps

        return Steps
    if seats:
        raise UserCodeError(f"{instance.name} has seats, so it must override step or run")
    return Episode


def seats_of(owner: str, environment: Environment) -> tuple[str, ...]:
    """The names of an environment's seats; raises UserCodeError that names `owner`."""
    with boundary(owner):
        seats = environment.seats
        if seats is Environment.seats:
            return ()
        listed = isinstance(seats, list | tuple) and all(isinstance(s, str) and s for s in seats)
        if not listed or len(set(seats)) < len(seats):
            raise UserCodeError(f"{owner}: got the seats {shown(seats)}, expected different names")
        return tuple(seats)


async def _reset(episodes: Sequence[Episode]) -> None:
    own = [episode for episode in episodes if "reset" in episode.instance.overridden]
    for episode in episodes:
        if "reset" not in episode.instance.overridden:
            await episode.reset()
    await _at_once([episode.reset() for episode in own])


async def _play(episodes: Sequence[Episode]) -> None:
    for episode in episodes:
        if not episode.own_play:
            await episode.play()
    own = [episode for episode in episodes if episode.own_play]
    await _at_once([episode.play() for episode in own])


async def _at_once(calls: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Play episodes at once; raises the first error of the sampler: those of others are alike."""
    try:
        await together(calls)
    except ExceptionGroup as group:
        raise group.exceptions[0] from None
