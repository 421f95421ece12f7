"""The boundary of user code: whoever waits for it keeps the deadline, and names the culprit.

- `boundary` is for plain code: what it raises is a UserCodeError that names the culprit.
- An `Actor` makes all calls of one object in one task (P11), each within a deadline.
- `outcomes` makes several calls at once, each in a task of its own.
- `apart` makes one call of code of ours that calls user code, so that this can't cancel our task.
- `adapter_call` awaits an adapter within a deadline, in the task of the caller.

User code runs in tasks of its own, and only whoever waits for it cancels these. So if such a task
was cancelled while somebody waits, user code did it. Code that swallows its cancellation finds that
nobody waits any more. KeyboardInterrupt is Ctrl-C, whoever raises it.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, TypeVar, overload

from retrain.errors import AdapterError, DeadlineError, LateError, UserCodeError, blame

T = TypeVar("T")
V = TypeVar("V")
STUCK_SECONDS = 5.0
"""How long code may take to end after it was cancelled."""
ITSELF = "user code cancelled its own task"
_abandoned: set[asyncio.Task[Any]] = set()
"""Tasks that were cancelled and still run."""


class boundary:
    """A context manager: what plain user code raises is a UserCodeError that names `what`.

    A UserCodeError passes: it says itself what failed.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        """Nothing to do."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if error is not None and not isinstance(error, UserCodeError | KeyboardInterrupt):
            raise blame(self._what, error) from error


class Actor:
    """A task that makes all calls of one object of the user's, one at a time.

    What one call opens, a later one may close: an anyio cancel scope or an MCP client belongs to
    the task that opened it.
    """

    def __init__(self, name: str, lost: Callable[[], object] = lambda: None) -> None:
        """`lost` is called if user code cancels the task between two calls."""
        self._loop = asyncio.get_running_loop()
        self._lost, self._what = lost, name
        self._call: Callable[[], Awaitable[Any]] = _nothing
        self._answer: asyncio.Future[Any] | None = None
        """Of the call that is being made; None between two calls."""
        self._given_up: asyncio.Future[None] | None = None
        """Done when a call that nobody waits for has ended; None if there is none."""
        self._wake = asyncio.Event()
        self._over = False
        self._stuck: set[asyncio.Future[None]] = set()
        """`_given_up`, if it was waited for in vain."""
        self._task = asyncio.create_task(self._live(), name=name)
        self._task.add_done_callback(self._ended)

    async def call(
        self, what: str, call: Callable[[], Awaitable[T]], seconds: float, key: str
    ) -> T:
        """What `call` returns. Raises UserCodeError, or LateError, that names `what`.

        A call is cancelled and given up when it is late, when its caller is cancelled, or by the
        next call.
        """
        self._give_up(self._answer)
        if self._given_up is not None:
            _, self._stuck = await asyncio.wait([self._given_up], timeout=STUCK_SECONDS)
            if self._stuck:
                raise UserCodeError(
                    f"{what} was not called: {self._what} was cancelled, and goes on"
                )
        if self._over:
            raise UserCodeError(f"{what} was not called: the task of {self._what} has ended")
        answer: asyncio.Future[T] = self._loop.create_future()
        self._what, self._call, self._answer = what, call, answer
        self._wake.set()
        timer = self._loop.call_later(seconds, self._expire, answer, seconds, key)
        try:
            return await answer
        except asyncio.CancelledError:
            self._give_up(answer)
            raise
        finally:
            timer.cancel()

    async def end(self) -> bool:
        """End the task; False if its code doesn't end, so that it is abandoned."""
        self._over, self._call = True, _nothing
        self._give_up(self._answer)
        self._wake.set()
        if not self._task.done():
            _keep(self._task)
            await asyncio.wait([self._task], timeout=0 if self._stuck else STUCK_SECONDS)
        return self._task.done()

    def _expire(self, answer: asyncio.Future[Any], seconds: float, key: str) -> None:
        if not answer.done():
            answer.set_exception(late_error(self._what, seconds, key))
            self._give_up(answer)

    def _give_up(self, answer: asyncio.Future[Any] | None) -> None:
        """Cancel the call with this answer, if it is still being made."""
        if answer is not None and self._answer is answer:
            self._given_up = self._given_up or self._loop.create_future()
            self._task.cancel()

    async def _live(self) -> None:
        while not self._over:
            await self._woken()
            result: Any = UserCodeError(f"{self._what}: {ITSELF}")
            if self._given_up is None:
                with suppress(asyncio.CancelledError):
                    result = await _outcome(self._what, self._call)
            if self._task.cancelling() and await self._withdrawn():
                result = UserCodeError(f"{self._what}: {ITSELF}")
            self._settle(result)

    async def _woken(self) -> None:
        """Wait for a call."""
        while not self._wake.is_set():
            try:
                await self._wake.wait()
            except asyncio.CancelledError:
                await self._withdrawn()
                if self._given_up is None:
                    self._lost()
        self._wake.clear()

    async def _withdrawn(self) -> bool:
        """Withdraw all requests to cancel the task; whether one was yet to be delivered."""
        while self._task.uncancel():
            pass
        try:
            await asyncio.sleep(0)  # Python 3.11 still delivers a withdrawn request
        except asyncio.CancelledError:
            return True
        return False

    def _settle(self, result: Any) -> None:
        """Answer whoever waits for the call, or for the end of one that was given up."""
        answer, self._answer = self._answer, None
        given_up, self._given_up = self._given_up, None
        if given_up is not None:
            given_up.set_result(None)
        if answer is not None and not answer.done():
            if isinstance(result, UserCodeError):
                answer.set_exception(result)
            else:
                answer.set_result(result)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Answer, also if the task was cancelled before it began, or ended by Ctrl-C."""
        self._over = True
        error = None if task.cancelled() else task.exception()
        self._settle(
            UserCodeError(f"{self._what}: {ITSELF}") if error is None else blame(self._what, error)
        )


async def outcomes(
    what: str, call: Callable[[V], Awaitable[T]], given: Sequence[V], seconds: float, key: str
) -> list[T | UserCodeError]:
    """What the call returns for each of `given`, all at once, or an error that names `what`.

    Each call has its own task, so that one that fails or is late affects only itself. A late one is
    cancelled, but not awaited.
    """
    tasks = [asyncio.create_task(_outcome(what, call, one), name=what) for one in given]
    late: set[asyncio.Task[T | UserCodeError]] = set()
    try:
        await asyncio.sleep(0)  # calls that never wait are done after this
        if waiting := [task for task in tasks if not task.done()]:
            _, late = await asyncio.wait(waiting, timeout=seconds)
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
            _keep(task)
        await asyncio.wait(tasks, timeout=STUCK_SECONDS)
        raise
    for task in late:
        task.cancel()
        _keep(task)
    return [late_error(what, seconds, key) if t in late else _result(what, t) for t in tasks]


@overload
async def apart(
    name: str, call: Callable[..., Awaitable[T]], *given: Any, abandon: bool = False
) -> T: ...
@overload
async def apart(name: str, call: Callable[..., T], *given: Any, abandon: bool = False) -> T: ...


async def apart(name: str, call: Callable[..., Any], *given: Any, abandon: bool = False) -> Any:
    """What a plain or async function returns that runs in a task of its own, called `name`.

    Raises what it raises; UserCodeError if user code in it cancelled the task, or ended it by
    SystemExit or the like. With `abandon`, a cancellation waits at most STUCK_SECONDS for code that
    swallows it.
    """
    task = asyncio.create_task(_called(call, given), name=name)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        _keep(task)
        while not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError):
                await asyncio.wait([task], timeout=STUCK_SECONDS if abandon else None)
            if abandon:
                break
        raise
    if task.cancelled():
        raise UserCodeError(f"user code cancelled the task {name!r}, in which it was called")
    error = task.exception()
    if error is None or isinstance(error, Exception):
        return task.result()
    raise blame("user code", error) from error


async def adapter_call(what: str, call: Awaitable[T], seconds: float, key: str) -> T:
    """Await an adapter. Raises DeadlineError that names `what`, and what the adapter raises.

    Raises AdapterError if it cancelled itself: its task would look like one that we cancelled.
    """
    task = asyncio.current_task()
    assert task is not None
    before, limit = task.cancelling(), asyncio.timeout(seconds)
    try:
        async with limit:
            return await call
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise DeadlineError(f"{what} took longer than deadlines.{key} = {seconds} s") from error
    except asyncio.CancelledError as error:
        if task.cancelling() > before:
            raise
        raise AdapterError(f"{what} was cancelled by the backend itself") from error


async def _outcome(what: str, call: Callable[..., Awaitable[T]], *given: Any) -> T | UserCodeError:
    """What the call returns, or its error. Cancellations and Ctrl-C are raised."""
    try:
        returned = call(*given)
        if not hasattr(returned, "__await__"):
            return UserCodeError(f"{what} is a plain function. Write `async def`.")
        return await returned
    except BaseException as error:  # SystemExit would end the event loop
        task = asyncio.current_task()
        cancelled = isinstance(error, asyncio.CancelledError) and task and task.cancelling()
        if cancelled or isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise
        return blame(what, error)


def _result(what: str, task: asyncio.Task[T | UserCodeError]) -> T | UserCodeError:
    """The result of a task of `_outcome`, which we did not cancel."""
    if task.cancelled():
        return UserCodeError(f"{what}: {ITSELF}")
    error = task.exception()
    return task.result() if error is None else blame(what, error)


async def _nothing() -> None:
    pass


async def _called(call: Callable[..., Any], given: Sequence[Any]) -> Any:
    try:
        returned = call(*given)
        return await returned if inspect.isawaitable(returned) else returned
    except SystemExit as error:  # it would end the event loop
        raise blame("user code", error) from error


def late_error(what: str, seconds: float, key: str) -> LateError:
    """The error of code that exceeds `deadlines.KEY`."""
    return LateError(f"{what} took longer than deadlines.{key} = {seconds} s")


def _keep(task: asyncio.Task[Any]) -> None:
    """Hold a task that was cancelled until it has ended; nobody asks for its error."""
    _abandoned.add(task)
    task.add_done_callback(_forget)


def _forget(task: asyncio.Task[Any]) -> None:
    _abandoned.discard(task)
    if not task.cancelled():
        task.exception()  # or asyncio would log it
