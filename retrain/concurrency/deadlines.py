"""Await user code and adapters within a deadline, and turn what goes wrong into our errors.

- User code that raises anything is a UserCodeError; past its deadline it is a LateError, even if it
  swallows the cancellation and answers late.
- User code that cancels its own task, as anyio and MCP clients do, is a UserCodeError. User code
  runs in an OwnTask, which we cancel by `end` only, so every other request is the user's.
- An adapter past its deadline is a DeadlineError. One that cancelled itself is an AdapterError:
  otherwise its task would look like one that we cancelled.
- Our own cancellation and Ctrl-C propagate. A TimeoutError of the code itself stays what it is.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from asyncio import runners
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from retrain.errors import AdapterError, DeadlineError, LateError, UserCodeError, blame

T = TypeVar("T")
STUCK_SECONDS = 5.0
"""How long user code may take to end after it was cancelled."""


class OwnTask(asyncio.Task[T]):
    """A task that runs user code. We cancel it by `end` only, so `cancel` is a call of the user."""

    asked = False
    """Whether we cancelled it."""
    parent: asyncio.Task[Any] | None = None
    """The task that started it."""

    def end(self) -> None:
        """Cancel it."""
        self.asked = True
        self.cancel()


def own_task(
    coroutine: Coroutine[Any, Any, T], name: str | None = None, context: Context | None = None
) -> OwnTask[T]:
    """Start a coroutine in an OwnTask, with a copy of the current context or with this one."""
    task = OwnTask(coroutine, loop=asyncio.get_running_loop(), name=name, context=context)
    task.parent = asyncio.current_task()
    return task


def runs_in(task: asyncio.Task[Any]) -> bool:
    """Whether the caller runs in this task, or in an OwnTask that was started in it."""
    current = asyncio.current_task()
    while isinstance(current, OwnTask) and current is not task:
        current = current.parent
    return current is task


async def absorb() -> None:
    """Withdraw all requests to cancel the current OwnTask, so that it can clean up."""
    task = asyncio.current_task()
    assert isinstance(task, OwnTask)
    await _withdraw(task)
    task.asked = False


async def apart(
    coroutine: Coroutine[Any, Any, T],
    name: str,
    *,
    abandon: bool = False,
    context: Context | None = None,
) -> T:
    """Await a coroutine in its own task, so that user code can't cancel the caller's.

    Raises UserCodeError if user code cancelled the task, and what the coroutine raises. With
    `abandon`, a cancellation waits at most STUCK_SECONDS for code that swallows it.
    """
    task = own_task(coroutine, name, context)
    interrupted = False
    while not task.done():
        try:
            _, going_on = await asyncio.wait(
                [task], timeout=STUCK_SECONDS if interrupted and abandon else None
            )
            if going_on:
                raise asyncio.CancelledError
        except asyncio.CancelledError:
            if interrupted and abandon:
                raise
            interrupted = True
            task.end()
    if interrupted:
        if not task.cancelled():
            task.exception()  # or asyncio would log it
        raise asyncio.CancelledError
    if task.cancelled():
        raise UserCodeError(f"user code cancelled the task {name!r}, in which it was called")
    return task.result()


async def contained(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await a coroutine. What user code raises beside an Exception is a UserCodeError: in a task,
    SystemExit and KeyboardInterrupt would end the event loop."""
    try:
        return await coroutine
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:
        if not is_theirs(error):
            raise
        raise blame("user code", error) from error


async def called(
    name: str,
    call: Callable[..., T | Awaitable[T]],
    *arguments: Any,
    context: Context | None = None,
) -> T:
    """`apart` for one call of a plain or async function of the user."""

    async def calling() -> T:
        returned = call(*arguments)
        result: T = await returned if inspect.isawaitable(returned) else returned
        return result

    return await apart(contained(calling()), name, abandon=True, context=context)


async def user_call(
    owner: str,
    call: Callable[[], Awaitable[T]],
    seconds: float,
    key: str,
    stuck: Callable[[LateError], None] | None = None,
) -> T:
    """Await user code; raises UserCodeError or LateError, which name `owner`.

    `stuck` is called if the code doesn't end within STUCK_SECONDS after its deadline cancelled it.
    """
    task = asyncio.current_task()
    assert task is not None

    def late() -> LateError:
        return LateError(f"{owner} took longer than deadlines.{key} = {seconds} s")

    limit = _Limit(task, seconds, stuck and (lambda: stuck(late())))
    raised: BaseException | None = None
    plain = False
    try:
        awaitable = call()
        plain = not hasattr(awaitable, "__await__")
        result = await awaitable
    except BaseException as error:
        if isinstance(error, GeneratorExit) and _current() is not task:
            raise  # the coroutine is being closed
        raised = error
    finally:
        limit.close()
    itself = task.cancelling() > 0 and await _cancelled_itself(task, raised)
    if cancelled():
        raise asyncio.CancelledError from raised
    if limit.late:
        raise late() from raised
    if itself:
        raise UserCodeError(f"{owner}: user code cancelled its own task") from raised
    if raised is None:
        return result
    if not is_theirs(raised):
        raise raised
    if plain:
        raise UserCodeError(f"{owner} is a plain function. Write `async def`.") from raised
    raise blame(owner, raised) from raised


async def adapter_call(what: str, call: Awaitable[T], seconds: float, key: str) -> T:
    """Await an adapter; raises DeadlineError naming `what`, and what the adapter raises.

    In an OwnTask, raises UserCodeError if user code cancelled that task.
    """
    task = asyncio.current_task()
    assert task is not None
    before, limit = task.cancelling(), _Limit(task, seconds, None)
    try:
        try:
            return await call
        finally:
            limit.close()
    except (TimeoutError, asyncio.CancelledError) as error:
        timed_out = isinstance(error, TimeoutError)
        if limit.late and (timed_out or task.cancelling() <= before):
            raise DeadlineError(f"{what} took longer than deadlines.{key} = {seconds} s") from error
        if timed_out or cancelled():
            raise
        if task.cancelling():
            raise UserCodeError(f"user code cancelled its own task while {what} ran") from error
        raise AdapterError(f"{what} was cancelled by the backend itself") from error


def is_theirs(error: BaseException) -> bool:
    """Whether user code raised the error itself: no cancellation of ours, and no Ctrl-C."""
    if isinstance(error, asyncio.CancelledError):
        return not cancelled()
    if isinstance(error, GeneratorExit):  # without a running task a coroutine is being closed
        return _current() is not None
    return not (isinstance(error, KeyboardInterrupt) and _is_ctrl_c(error))


def cancelled() -> bool:
    """Whether we cancelled the current task, even if user code swallowed the CancelledError."""
    task = _current()
    if task is None:
        return False
    return task.asked if isinstance(task, OwnTask) else task.cancelling() > 0


class _Limit:
    """Cancels a task after `seconds`, and calls `stuck` if it still goes on STUCK_SECONDS later."""

    __slots__ = ("_stuck", "_task", "_timer", "_waiting", "late")

    def __init__(
        self, task: asyncio.Task[Any], seconds: float, stuck: Callable[[], object] | None
    ) -> None:
        self._task, self._stuck = task, stuck
        self.late = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiting = _timers.add(self, seconds, task.get_loop())

    def close(self) -> None:
        """The code has ended."""
        self._waiting.pop(self, None)
        if self.late:
            if self._timer is not None:
                self._timer.cancel()
            self._task.uncancel()

    def expire(self) -> None:
        self.late = True
        self._task.cancel()
        if self._stuck is not None:
            self._timer = self._task.get_loop().call_later(STUCK_SECONDS, self._stuck)


class _Timers(threading.local):
    """One timer for all limits of equal length, since they end in the order in which they began.

    A timer of asyncio for each would take several times as long, to make, to sort and to cancel.
    Each length keeps a timer until its end, so lengths are to be few: those of the config.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[float, dict[_Limit, float]] = {}
        """For each length the limits with the time of their ends, in order; those with a timer."""

    def add(
        self, limit: _Limit, seconds: float, loop: asyncio.AbstractEventLoop
    ) -> dict[_Limit, float]:
        """Let a limit expire after `seconds`, unless it is taken out of the result before."""
        if loop is not self._loop:  # a thread runs one loop at a time
            self._loop, self._waiting = loop, {}
        end = loop.time() + seconds
        waiting = self._waiting.get(seconds)
        if waiting is None:
            waiting = self._waiting[seconds] = {}
            loop.call_at(end, self._ring, loop, seconds, waiting, end)
        waiting[limit] = end
        return waiting

    def _ring(
        self,
        loop: asyncio.AbstractEventLoop,
        seconds: float,
        waiting: dict[_Limit, float],
        now: float,
    ) -> None:
        """The first limit ends `now`, unless it was taken out."""
        now = max(now, loop.time())
        while waiting:
            limit, end = next(iter(waiting.items()))
            if end > now:
                loop.call_at(end, self._ring, loop, seconds, waiting, end)
                return
            del waiting[limit]
            limit.expire()
        self._waiting.pop(seconds, None)


_timers = _Timers()


async def _cancelled_itself(task: asyncio.Task[Any], raised: BaseException | None) -> bool:
    """Whether user code cancelled the current task, and did not handle that; withdraws it."""
    if cancelled():
        return False
    return await _withdraw(task) or isinstance(raised, asyncio.CancelledError)


async def _withdraw(task: asyncio.Task[Any]) -> bool:
    """Withdraw all requests to cancel the current task; whether one was yet to be delivered."""
    if not task.cancelling():
        return False
    while task.uncancel():
        pass
    try:
        await asyncio.sleep(0)  # Python 3.11 still delivers a withdrawn request
    except asyncio.CancelledError:
        return True
    return False


def _is_ctrl_c(error: KeyboardInterrupt) -> bool:
    """Whether a signal handler raised it, Python's own or that of `asyncio.run`."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename == runners.__file__


def _current() -> asyncio.Task[Any] | None:
    """The current task; None where no loop is running."""
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None
