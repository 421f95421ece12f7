"""Awaits of other people's code: each has an owner, a deadline, and a name for what goes wrong.

- User code that fails, with whatever it raises, is a UserCodeError; past its deadline a LateError.
- An adapter's await past its deadline is a DeadlineError, one that was cancelled from inside an
  AdapterError: a task that ends as cancelled would be taken for one that we ended.
- Our own cancellation and Ctrl-C pass; a TimeoutError of the code itself is not taken for ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from retrain.errors import AdapterError, DeadlineError, LateError, UserCodeError, blame

T = TypeVar("T")


async def user_call(owner: str, call: Callable[[], Awaitable[T]], seconds: float, key: str) -> T:
    """Await a user's coroutine; raises UserCodeError or LateError, which name `owner`."""
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
            raise UserCodeError(f"{owner} is a plain function: write `async def`") from error
        raise blame(owner, error) from error


async def adapter_call(what: str, call: Awaitable[T], seconds: float, key: str) -> T:
    """Await an adapter's coroutine; raises DeadlineError naming `what`, and what it raises."""
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
        raise AdapterError(f"{what} was cancelled from inside the backend") from error


def is_theirs(error: BaseException) -> bool:
    """Whether an error is the code's own: we neither cancel its task, nor does Ctrl-C end it."""
    if isinstance(error, asyncio.CancelledError):
        return not cancelled()
    return not isinstance(error, KeyboardInterrupt | GeneratorExit)


def cancelled() -> bool:
    """Whether the task that runs has been told to end, even if user code swallowed that."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
