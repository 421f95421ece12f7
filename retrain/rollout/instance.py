"""An environment instance: made, set up, called and closed in one task (P11).

As anyio's cancel scopes and MCP's clients require, what `setup` opens `close` may close. A class
that overrides no method needs no task of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from retrain.config import DeadlinesConfig
from retrain.environment import Environment
from retrain.errors import UserCodeError, shown
from retrain.supervision.boundary import ITSELF, Actor

T = TypeVar("T")
HOOKS = ("setup", "reset", "step", "run", "close")


class Instance:
    """An environment. Whoever calls it keeps the deadline."""

    environment: Environment
    """Set once the instance is open without an `error`."""

    def __init__(
        self,
        make: Callable[[], Environment],
        deadlines: DeadlinesConfig,
        setups: asyncio.Semaphore,
        fault: Callable[[str], None],
    ) -> None:
        """`fault` is called with an error that affects no rollout, such as one of `close`."""
        self._make, self._deadlines, self._setups, self._fault = make, deadlines, setups, fault
        self.name = "the environment"
        self.overridden: frozenset[str] = frozenset()
        """The methods of which its class has its own version."""
        self.error: UserCodeError | None = None
        """Why it plays no further rollout."""
        self._failed = False
        self._actor: Actor | None = None
        self._closing: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Make the environment and set it up; `error` says why that failed."""
        self._actor = Actor("environment", self._lost)
        try:
            made = await self._called(self.name, self._made, "setup")
            self.name, self.environment = type(made).__name__, made
            self.overridden = frozenset(
                hook
                for hook in HOOKS
                if getattr(type(made), hook) is not getattr(Environment, hook)
            )
            if "setup" in self.overridden:
                async with self._setups:
                    await self.call("setup", made.setup)
        except UserCodeError as error:
            self.error = error
        if not self.overridden:
            await self._actor.end()

    async def call(self, stage: str, call: Callable[[], Awaitable[T]], key: str = "") -> T:
        """Call it in its task, within `deadlines.KEY`; raises UserCodeError."""
        if stage not in self.overridden:
            return await call()
        return await self._called(f"{self.name}.{stage}", call, key or stage)

    def retire(self) -> asyncio.Task[None]:
        """Close it, in a task that this returns; what it does now is cancelled."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name="close")
        return self._closing

    async def _made(self) -> Environment:
        made = self._make()
        if not isinstance(made, Environment):
            raise UserCodeError(f"got {shown(made)}, expected an instance of Environment")
        return made

    async def _called(self, what: str, call: Callable[[], Awaitable[T]], key: str) -> T:
        assert self._actor is not None
        try:
            return await self._actor.call(what, call, getattr(self._deadlines, key), key)
        except UserCodeError:
            self._failed = True
            raise

    def _lost(self) -> None:
        """User code cancelled the task between two calls, as when a server ends."""
        if self._closing is None:
            self.error = self.error or UserCodeError(f"{self.name}: {ITSELF}")
            if not self._failed:  # else its rollout has said so
                self._fault(str(self.error))
            self.retire()

    async def _close(self) -> None:
        if self._actor is None:
            return
        problem = ""
        try:
            if "close" in self.overridden:
                await self.call("close", self.environment.close)
        except UserCodeError as error:
            problem = str(error)
        finally:
            if not await self._actor.end():
                problem = f"{problem or self.name}; it is abandoned, since it does not end"
            if problem:
                self._fault(problem)


async def closed(instances: Sequence[Instance]) -> None:
    """Close instances at the same time; those that don't end are abandoned.

    A cancellation cuts the calls of `close` short, and is raised when all have ended.
    """
    closing = [instance.retire() for instance in instances]
    interrupted = False
    while waiting := [task for task in closing if not task.done()]:
        try:
            await asyncio.wait(waiting)
        except asyncio.CancelledError:
            interrupted = True
            for task in waiting:
                task.cancel()
    if interrupted:
        raise asyncio.CancelledError
