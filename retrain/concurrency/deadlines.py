"""Await user code and adapters within a deadline, and turn what goes wrong into our errors.

- User code that raises anything is a UserCodeError; past its deadline it is a LateError.
- An adapter past its deadline is a DeadlineError. One that cancelled itself is an AdapterError:
  otherwise its task would look like one that we cancelled.
- Our own cancellation and Ctrl-C propagate. A TimeoutError of the code itself stays what it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from retrain.errors import AdapterError, DeadlineError, LateError, UserCodeError, blame

T = TypeVar("T")


async def user_call(owner: str, call: Callable[[], Awaitable[T]], seconds: float, key: str) -> T:
    """Await user code; raises UserCodeError or LateError, which name `owner`."""
    plain = False
    try:
        async with asyncio.timeout(seconds) as deadline:
            awaitable = call()
            plain = not hasattr(awaitable, "__await__")
            return await awaitable
    except BaseException as error:
        if not is_theirs(error):
            raise
        if deadline.expired():
            raise LateError(f"{owner} took longer than deadlines.{key} = {seconds} s") from error
        if plain:
            raise UserCodeError(f"{owner} is a plain function. Write `async def`.") from error
        raise blame(owner, error) from error


async def adapter_call(what: str, call: Awaitable[T], seconds: float, key: str) -> T:
    """Await an adapter; raises DeadlineError naming `what`, and what the adapter raises."""
    try:
        async with asyncio.timeout(seconds) as deadline:
            return await call
    except TimeoutError as error:
        if not deadline.expired():
            raise
        raise DeadlineError(f"{what} took longer than deadlines.{key} = {seconds} s") from error
    except asyncio.CancelledError as error:
        if cancelled():
            raise
        raise AdapterError(f"{what} was cancelled by the backend itself") from error


def is_theirs(error: BaseException) -> bool:
    """Whether user code raised the error itself: no cancellation of ours, and no Ctrl-C."""
    if isinstance(error, asyncio.CancelledError):
        return not cancelled()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def cancelled() -> bool:
    """Whether we cancelled the current task, even if user code swallowed the CancelledError."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
