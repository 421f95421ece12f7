"""Bugs to plant into the pipe: the simulation must find each of them.

Each is a patch that makes one small mistake of the kind that a refactoring makes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from retrain.errors import UserCodeError
from retrain.pipeline.intake import Intake
from retrain.pipeline.ledger import Ledger
from retrain.pipeline.run import Run
from retrain.rollout import Slot
from retrain.rollout.group import Rollouts
from retrain.supervision.outages import is_outage
from retrain.types import Group, Ticket, Trajectory

Patch = AbstractContextManager[Any]


def _reissue_loses_the_prompt(self: Ledger, ticket: Ticket) -> Ticket:
    self.retire([ticket])
    return ticket._replace(attempt=ticket.attempt + 1)


def _restore_forgets_open_prompts() -> Patch:
    restore = Ledger.restore

    def planted(self: Ledger, state: Any) -> None:
        restore(self, {**state, "open": []})

    return mock.patch.object(Ledger, "restore", planted)


def _state_skips_a_row() -> Patch:
    state = Ledger.state

    def planted(self: Ledger) -> Any:
        found = state(self)
        return {**found, "position": found["position"] + 1}

    return mock.patch.object(Ledger, "state", planted)


def _take_keeps_what_it_returned() -> Patch:
    take = Intake.take

    async def planted(self: Intake, version: int) -> list[Group] | None:
        groups = await take(self, version)
        if groups and version % 3 == 2:
            self.held[groups[0].ticket] = groups[0]
        return groups

    return mock.patch.object(Intake, "take", planted)


def _a_fault_fails_its_group() -> Patch:
    play = Rollouts.play

    async def planted(self: Rollouts, prompt: Any, instances: Sequence[Any]) -> Group:
        group = await play(self, prompt, instances)
        bad = next((t.outcome for t in group.trajectories if t.outcome != "ok"), "ok")
        for trajectory in group.trajectories:
            trajectory.outcome = bad
        return group

    return mock.patch.object(Rollouts, "play", planted)


def _failure_is_a_reward_of_zero(trajectory: Trajectory, error: UserCodeError) -> None:
    trajectory.info["error"] = str(error)
    trajectory.reward = 0.0
    trajectory.outage = is_outage(error)


def _requests_outlive_their_caller() -> Patch:
    async def planted(what: str, call: Any, seconds: float, key: str) -> Any:
        return await asyncio.shield(asyncio.ensure_future(call))

    return mock.patch("retrain.rollout.episode.adapter_call", planted)


def _issue_ahead() -> Patch:
    admitted = Run.admitted.fget
    assert admitted is not None
    return mock.patch.object(
        Run, "admitted", property(lambda self: admitted(self) + (self.step > 0))
    )


def _stale_groups_are_trained() -> Patch:
    unfit = Intake._unfit

    def planted(self: Intake, group: Group, version: int, refills: int) -> str | None:
        cause = unfit(self, group, version, refills)
        return None if cause == "stale" else cause

    return mock.patch.object(Intake, "_unfit", planted)


BUGS: dict[str, Callable[[], Patch]] = {
    "a reissued prompt is lost": lambda: mock.patch.object(
        Ledger, "reissue", _reissue_loses_the_prompt
    ),
    "a resume forgets open prompts": _restore_forgets_open_prompts,
    "a checkpoint skips a row": _state_skips_a_row,
    "a group is trained twice": _take_keeps_what_it_returned,
    "a checkpoint misses finished groups": lambda: mock.patch.object(Intake, "drain"),
    "failed rollouts get credit": lambda: mock.patch.object(
        Group, "scored", property(lambda self: list(self.trajectories))
    ),
    "a fault fails its whole group": _a_fault_fails_its_group,
    "a failure is a reward of 0": lambda: mock.patch(
        "retrain.rollout.episode.fail", _failure_is_a_reward_of_zero
    ),
    "environments stay open": lambda: mock.patch.object(Slot, "close", mock.AsyncMock()),
    "requests outlive the run": _requests_outlive_their_caller,
    "work starts too early": _issue_ahead,
    "in_order trains any order": lambda: mock.patch.object(
        Intake, "_wanted", lambda self, chosen: next(iter(self.held), None)
    ),
    "stale groups are trained": _stale_groups_are_trained,
}
