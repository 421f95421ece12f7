"""A worker process of a reward: it calculates what it is sent, one request at a time.

- The pipes to the run are private: standard input is empty, and what user code prints goes to
  standard error.
- A plain function is called in the main thread, outside an event loop, so that signals and
  `asyncio.run` work in it. Everything else runs on one event loop, `setup` and `close` in one task.
- The process ends when the pipe closes.
"""

from __future__ import annotations

import asyncio
import faulthandler
import io
import math
import os
import pickle
import resource
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from retrain.config.plugins import restore_package
from retrain.errors import ConfigError, UserCodeError
from retrain.scoring.base import FunctionReward, Reward, RewardCalculator
from retrain.scoring.building import calculator_of
from retrain.scoring.calls import attempted, compares, group_verdicts
from retrain.scoring.columns import ColumnReward
from retrain.scoring.verdicts import checked
from retrain.scoring.wire import HEADER, Judged, encoded, framed
from retrain.supervision.boundary import Actor, outcomes

DONE: list[Judged] = [Reward(0.0)]
"""The answer to the first and the last request."""


def main() -> None:
    """Serve the reward that the first request describes, until an empty request."""
    requests, answers = _private_pipes()
    faulthandler.enable(answers, all_threads=False)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a late worker is ended by SIGABRT
    spec = pickle.loads(_read(requests))
    owner = f"reward '{spec['name']}'"
    try:
        calculator = calculator_of(spec["section"], spec["where"], spec["base_dir"])
    except ConfigError as error:
        _answer(answers, [UserCodeError(f"{owner}: {error}")])
        return
    serving = _Serving(owner, spec["name"], calculator, requests, answers, spec["packages"])
    with suppress(BrokenPipeError):  # the run has ended
        if isinstance(calculator, FunctionReward) and not calculator.is_async:
            serving.plainly()
        else:
            asyncio.run(serving.on_a_loop())


@dataclass
class _Serving:
    """The requests of the run, answered."""

    owner: str
    name: str
    calculator: RewardCalculator
    requests: BinaryIO
    answers: int
    packages: dict[str, str]

    def plainly(self) -> None:
        """Call a plain function in this thread."""
        function = self.calculator
        assert isinstance(function, FunctionReward)
        _answer(self.answers, DONE)
        while request := _read(self.requests):
            verdict = attempted(self.owner, lambda: function.call_with(self._asked(request)))
            _answer(self.answers, [self._checked(verdict)])
        _answer(self.answers, DONE)

    async def on_a_loop(self) -> None:
        """Set up, calculate and close, on an event loop that also runs between the requests."""
        self.actor = Actor(self.owner)
        if await self._hook(self.calculator.setup, "setup"):
            while request := await asyncio.to_thread(_read, self.requests):
                _answer(self.answers, await self._verdicts(request))
        await self._hook(self.calculator.close, "close")
        await self.actor.end()

    async def _hook(self, call: Callable[[], Awaitable[None]], name: str) -> bool:
        """Await a hook in the task of all hooks, and answer; returns whether it succeeded."""
        try:
            await self.actor.call(f"{self.owner}: {name}", call, math.inf, name)
        except UserCodeError as error:
            _answer(self.answers, [error])
            return False
        _answer(self.answers, DONE)
        return True

    async def _verdicts(self, request: bytes) -> list[Judged]:
        """One verdict per rollout of the request, or one error for all of them."""
        asked = attempted(self.owner, lambda: self._asked(request))
        result = asked if isinstance(asked, UserCodeError) else await self._call(asked)
        if isinstance(result, UserCodeError) or not compares(self.calculator):
            return [self._checked(result)]
        return [self._checked(verdict) for verdict in result]

    async def _call(self, asked: Any) -> Any:
        """What the calculator returns for a function's arguments, or a list of trajectories."""
        calculator = self.calculator
        if isinstance(calculator, ColumnReward) and not calculator.is_async:
            return attempted(self.owner, lambda: calculator.call(asked))  # in the main thread
        if isinstance(calculator, FunctionReward):
            call: Callable[[Any], Awaitable[Any]] = calculator.call_with
        elif compares(calculator):
            call = partial(group_verdicts, calculator)
        else:
            call, asked = calculator.calculate, asked[0]
        [result] = await outcomes(self.owner, call, [asked], math.inf, "reward")
        return result

    def _asked(self, request: bytes) -> Any:
        return _Unpickler(request, self.packages).load()

    def _checked(self, verdict: Any) -> Judged:
        try:
            return checked(self.name, verdict)
        except UserCodeError as error:
            return error


class _Unpickler(pickle.Unpickler):
    """Finds classes of files that the run has loaded, and this process has not yet."""

    def __init__(self, content: bytes, packages: dict[str, str]) -> None:
        super().__init__(io.BytesIO(content))
        self._packages = packages

    def find_class(self, module: str, name: str) -> Any:
        restore_package(module.partition(".")[0], self._packages)
        return super().find_class(module, name)


def _private_pipes() -> tuple[BinaryIO, int]:
    """The pipes from and to the run, out of the reach of `input` and `print`."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.dup2(2, 1)
    os.close(empty)
    for pipe in requests.fileno(), answers:  # a fork that outlives the worker must not hold them
        os.register_at_fork(after_in_child=partial(os.close, pipe))
    return requests, answers


def _read(requests: BinaryIO) -> bytes:
    """The next request; empty at the end of the pipe."""
    head = requests.read(HEADER.size)
    return requests.read(HEADER.unpack(head)[0]) if len(head) == HEADER.size else b""


def _answer(answers: int, verdicts: list[Judged]) -> None:
    rest = memoryview(framed(encoded(verdicts)))
    while rest:
        rest = rest[os.write(answers, rest) :]
