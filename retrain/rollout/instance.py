"""An environment instance and its task.

The constructor, `setup`, `reset`, `step` and `close` all run in this one task, as anyio's cancel
scopes and MCP's clients require: what `setup` opens, `close` may close. A class that overrides none
of these methods needs no task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from retrain.concurrency.deadlines import STUCK_SECONDS, absorb, cancelled, own_task, user_call
from retrain.config import DeadlinesConfig
from retrain.environment import Environment
from retrain.errors import UserCodeError, shown

HOOKS = ("setup", "reset", "step", "run", "close")
_abandoned: set[asyncio.Task[None]] = set()


@dataclass(frozen=True, slots=True)
class Job:
    """Work for the task of an instance."""

    call: Callable[[], Awaitable[None]]
    fail: Callable[[UserCodeError], None]
    """Called instead, or when the task ends before the call does."""
    done: Callable[[BaseException | None], None]
    """Called at the end, with what `call` raised."""


class Instance:
    """Makes and sets up an environment, runs jobs in its task, and closes it there."""

    def __init__(
        self,
        make: Callable[[], Environment],
        deadlines: DeadlinesConfig,
        setups: asyncio.Semaphore,
        fault: Callable[[str], None],
    ) -> None:
        """`fault` is called with an error that affects no rollout, such as one of `close`."""
        self._make, self._deadlines, self._setups, self._fault = make, deadlines, setups, fault
        loop = asyncio.get_running_loop()
        self.name = "the environment"
        self._environment: Environment | None = None
        self.overridden: frozenset[str] = frozenset()
        """The methods of which its class has its own version."""
        self.error: UserCodeError | None = None
        """Why it plays no further rollout."""
        self.failed = False
        """Whether a rollout failed in it, so that it is about to be replaced."""
        self.ready: asyncio.Future[None] = loop.create_future()
        """Done when it is set up, or has failed."""
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when it is closed, or was abandoned."""
        self._job: Job | None = None
        self._inbox: asyncio.Future[None] = loop.create_future()
        self._leaving = self._sets_up = False
        self._task = own_task(self._live(), name="environment")
        self._task.add_done_callback(self._end)

    @property
    def environment(self) -> Environment:
        """The environment, once the instance is `ready` without an `error`."""
        assert self._environment is not None
        return self._environment

    def do(self, job: Job) -> None:
        """Run a job in the task, one at a time."""
        if self.error is not None or self._task.done():
            job.fail(self.error or UserCodeError(f"{self.name}: its task has ended"))
            job.done(None)
            return
        self._job = job
        if not self._inbox.done():  # else user code has just cancelled the task
            self._inbox.set_result(None)

    def retire(self) -> None:
        """Cancel what it does, and close it."""
        if not self._leaving:
            self._leaving = True
            self._task.end()

    def cancel_close(self) -> None:
        """Cancel the instance's `close` too."""
        self._task.end()

    def abandon(self, error: UserCodeError) -> None:
        """Don't wait for code that swallows its cancellation. If it ends later, it is closed."""
        _abandoned.add(self._task)
        self._task.add_done_callback(_abandoned.discard)
        self.error = self.error or error
        self._fault(f"{error}, and still runs {STUCK_SECONDS} s after it was cancelled")
        self.retire()
        self._release()
        self._settle(None)
        if not self.ended.done():
            self.ended.set_result(None)

    async def _live(self) -> None:
        failure: BaseException | None = None
        try:
            await self._open()
            self.ready.set_result(None)
            if self.overridden:
                await self._serve()
        except UserCodeError as error:
            self.error = error
        except asyncio.CancelledError:
            if not cancelled():
                self.error = UserCodeError(f"{self.name}: user code cancelled its own task")
                if self._job is None and not self.failed:
                    self._fault(str(self.error))
        except (GeneratorExit, KeyboardInterrupt):  # the event loop is closed, or Ctrl-C
            raise
        except BaseException as error:  # noqa: BLE001 - of the sampler: raised where the job was given
            failure = error
        self._leaving = True
        self._settle(failure)
        await self._close()

    async def _open(self) -> None:
        async def made() -> Environment:
            return self._make()

        limit = self._deadlines.setup
        environment = await user_call(self.name, made, limit, "setup")
        if not isinstance(environment, Environment):
            raise UserCodeError(
                f"{self.name}: got {shown(environment)}, expected an instance of Environment"
            )
        kind = type(environment)
        self.name = kind.__name__
        self.overridden = frozenset(
            hook for hook in HOOKS if getattr(kind, hook) is not getattr(Environment, hook)
        )
        if "setup" not in self.overridden:
            self._environment = environment
            return
        await self._setups.acquire()
        self._sets_up = True
        try:
            self._environment = environment  # so that it is closed, whatever happens
            name = f"{self.name}.setup"
            await user_call(name, environment.setup, limit, "setup", self.abandon)
        finally:
            self._release()

    def _release(self) -> None:
        """Let another instance set up, also if the `setup` of this one never ends."""
        if self._sets_up:
            self._sets_up = False
            self._setups.release()

    async def _serve(self) -> None:
        while not self._leaving:  # a job may have swallowed the cancellation
            await self._inbox
            self._inbox = asyncio.get_running_loop().create_future()
            job = self._job
            assert job is not None
            await job.call()
            self._job = None
            job.done(None)

    async def _close(self) -> None:
        environment = self._environment
        if environment is None or "close" not in self.overridden:
            return
        await absorb()
        name, limit = f"{self.name}.close", self._deadlines.close
        try:
            await user_call(name, environment.close, limit, "close", self.abandon)
        except UserCodeError as error:
            if not self.ended.done():
                self._fault(str(error))

    def _settle(self, failure: BaseException | None) -> None:
        """Answer whoever waits for the task."""
        job, self._job = self._job, None
        if job is not None:
            if self.error is not None:
                job.fail(self.error)
            job.done(failure)
        if not self.ready.done():
            self.ready.set_result(None)

    def _end(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault(f"{self.name}: {type(error).__name__}")
        self._settle(None)
        if not self.ended.done():
            self.ended.set_result(None)


async def closed(instances: Sequence[Instance], seconds: float) -> None:
    """Close instances at the same time; those that don't end are abandoned.

    A cancellation cuts the calls of `close` short, and is raised when all have ended.
    """
    for instance in instances:
        instance.retire()
    waiting = {instance.ended: instance for instance in instances if not instance.ended.done()}
    loop = asyncio.get_running_loop()
    until = loop.time() + seconds + STUCK_SECONDS
    interrupted = False
    while waiting:
        try:
            await asyncio.wait(waiting, timeout=max(0.0, until - loop.time()))
        except asyncio.CancelledError:
            interrupted = True
            for instance in waiting.values():
                instance.cancel_close()
        waiting = {ended: i for ended, i in waiting.items() if not ended.done()}
        if loop.time() >= until:
            for instance in waiting.values():
                instance.abandon(UserCodeError(f"{instance.name}: it did not close in time"))
            break
    if interrupted:
        raise asyncio.CancelledError
