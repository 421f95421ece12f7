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
    """Raises in every sixth call of the method that is named."""

    calls = 0
    closed = 0

    def __init__(self, where: str, error: str):
        self.where, self.error = where, error

    def _maybe(self, where):
        if where != self.where:
            return
        Odd.calls += 1
        if Odd.calls % 6 == 3:
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
        Odd.closed += 1


# --- evaluation ---------------------------------------------------------------------------------

HELD_OUT = {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in "abc"]}
