"""Calls of user code that return a verdict or an error, and never raise one."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from retrain.concurrency.deadlines import is_theirs
from retrain.errors import BudgetError, UserCodeError, blame
from retrain.rewarding.base import RewardCalculator, Verdict
from retrain.types import Trajectory

T = TypeVar("T")
_THREADS = re.compile(r"main thread|threaded environment|event loop in thread")
"""How signal, math-verify and asyncio say that they need the main thread."""


async def judged(owner: str, call: Callable[..., Awaitable[Any]], *given: Any) -> Any:
    """What the call with `given` returns, or its UserCodeError or BudgetError.

    Run it as a task: code that cancels its own task ends only that one, and `result_of` names it.
    """
    try:
        awaitable = call(*given)
        if not hasattr(awaitable, "__await__"):
            return UserCodeError(f"{owner} is a plain function. Write `async def`.")
        return await awaitable
    except asyncio.CancelledError:
        raise
    except BudgetError as error:
        return error
    except BaseException as error:
        if not is_theirs(error):
            raise
        return blame(owner, error)


def result_of(owner: str, task: asyncio.Task[Any]) -> Any:
    """The result of a finished task of `judged`, which we did not cancel."""
    if task.cancelled():
        return UserCodeError(f"{owner}: user code cancelled its own task")
    return task.result()


def judged_in_thread(owner: str, call: Callable[[], Any]) -> Any:
    """What the plain function returns, or its error, with advice if it needs the main thread."""
    error = judged_here(owner, call)
    if not isinstance(error, UserCodeError) or not _THREADS.search(str(error)):
        return error
    advised = UserCodeError(
        f"{error}. A plain reward runs in a thread; set `processes: 4` on this reward to run it in "
        "the main thread of worker processes."
    )
    advised.__cause__ = error.__cause__
    return advised


def judged_here(owner: str, call: Callable[[], Any]) -> Any:
    """What the plain function returns, or its UserCodeError; even SystemExit fails only this."""
    try:
        return call()
    except BaseException as error:  # noqa: BLE001 - the result of this rollout
        return blame(owner, error)


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
