"""Calls of rewards, which return a verdict or an error, and never raise one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from retrain.errors import UserCodeError
from retrain.scoring.base import RewardCalculator, Verdict
from retrain.supervision.boundary import boundary
from retrain.types import Trajectory

T = TypeVar("T")
_THREADS = re.compile(r"main thread|threaded environment|event loop in thread")
"""How signal, math-verify and asyncio say that they need the main thread."""


def attempted(owner: str, call: Callable[[], T]) -> T | UserCodeError:
    """What the plain function returns, or its error; even SystemExit fails only this call."""
    try:
        with boundary(owner):
            return call()
    except UserCodeError as error:
        return error


def attempted_in_thread(owner: str, call: Callable[[], T]) -> T | UserCodeError:
    """`attempted`, with advice if the function needs the main thread."""
    outcome = attempted(owner, call)
    if isinstance(outcome, UserCodeError) and _THREADS.search(str(outcome)):
        advised = UserCodeError(
            f"{outcome}. A plain reward runs in a thread; set `processes: 4` on this reward to run "
            "it in the main thread of worker processes."
        )
        advised.__cause__ = outcome.__cause__
        return advised
    return outcome


def overrides(calculator: RewardCalculator, *hooks: str) -> bool:
    """Whether its class has its own version of one of these methods."""
    kind = type(calculator)
    return any(getattr(kind, hook) is not getattr(RewardCalculator, hook) for hook in hooks)


def compares(calculator: RewardCalculator) -> bool:
    """Whether it scores the rollouts of a group in one call.

    An instance may decide that itself, by setting its own `calculate_group`.
    """
    call = calculator.calculate_group
    return getattr(call, "__func__", call) is not RewardCalculator.calculate_group


async def group_verdicts(
    calculator: RewardCalculator, group: Sequence[Trajectory]
) -> list[Verdict]:
    """The verdicts of `calculate_group`; raises ValueError if it isn't one per trajectory."""
    verdicts = list(await calculator.calculate_group(group))
    if len(verdicts) != len(group):
        raise ValueError(
            f"calculate_group returned {len(verdicts)} rewards, expected one for each of "
            f"{len(group)} trajectories"
        )
    return verdicts


async def together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; a cancellation waits until each has ended."""
    if len(calls) == 1:  # the common case needs no task
        return [await calls[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]
