"""An environment that fails in every way, and what its run failed with."""

import asyncio

import pytest

from retrain.environment import Environment, StepResult


def flattened(error):
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in flattened(inner)]
    return [error]


async def failure_of(run):
    """The errors that a run ends with."""
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - the caller looks at them
        async with asyncio.timeout(30):
            await run
    return flattened(caught.value)


# --- user code that raises what nobody expects --------------------------------------------------


class Panic(BaseException):
    """What a library of compiled code may raise: no Exception."""


class Odd(Environment):
    """Raises in each call, or one of so many, of the method that is named."""

    calls = 0

    def __init__(self, where: str, error: str = "panic", every: int = 1):
        self.where, self.error, self.every = where, error, every

    def _maybe(self, where):
        if where != self.where:
            return
        Odd.calls += 1
        if Odd.calls % self.every == self.every // 2:
            raise {
                "cancelled": asyncio.CancelledError(),
                "exit": SystemExit(0),
                "panic": Panic("broken"),
                "stop": StopAsyncIteration(),
                "timeout": TimeoutError("the tool is slow"),
                "group": BaseExceptionGroup("many", [Panic("broken")]),
            }[self.error]

    async def setup(self):
        self._maybe("setup")

    async def reset(self, prompt):
        self._maybe("reset")
        return prompt.messages

    async def step(self, action):
        self._maybe("step")
        return StepResult([], 0.0, True, False, {})

    async def close(self):
        self._maybe("close")


# --- evaluation ---------------------------------------------------------------------------------

HELD_OUT = {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in "abc"]}
