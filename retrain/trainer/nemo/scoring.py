"""The `reward_fn` of `fit`: called with (prompt, response[, row]), as a RewardCalculator.

It may return a number, a bool or a dict of numbers, be `async`, or score a group in one call
(`@batched`). A RewardCalculator, such as an `@reward` function, is called as in a YAML: by name, or
with the trajectory. A reward_fn that raises, or returns anything else, is a RewardError with the
prompt and the response. It ends training, or with `on_reward_error: drop` its rollout (or group)
is dropped and counted. It never becomes a reward of 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from retrain.errors import RewardError, blame, shown
from retrain.scoring import (
    NAMES,
    FunctionReward,
    Reward,
    RewardCalculator,
    as_number,
    compares,
    is_async,
)
from retrain.supervision.threads import DaemonPool
from retrain.trainer.data import response_of, row_of
from retrain.trainer.nemo.environments import call
from retrain.types import Trajectory

F = TypeVar("F", bound=Callable[..., Any])
NAME = "reward_fn"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def batched(function: F) -> F:
    """Mark a reward function that takes lists: (prompts, responses[, rows]) -> list of rewards.

    It is called once per group of rollouts.
    """
    function.__dict__["batched"] = True
    return function


def takes_row(function: Callable[..., Any]) -> bool:
    """Whether to pass the row as a third argument: if it is required, or its default is None.

    Raises TypeError when the function can't be called with (prompt, response) or (prompt, response,
    row), or when its third parameter is called `answer`.
    """
    parameters = _signature(function).parameters.values()
    third = [p for p in parameters if p.kind in _POSITIONAL][2:3]
    passed = any(p.default is p.empty or p.default is None for p in third)
    if passed and third[0].name in ("answer", "answers"):
        raise TypeError(
            f"{NAME}: the third argument is the row of the dataset, not its answer: call it `row` "
            "and read row[...], or decorate the function with @retrain.reward, which calls it by "
            f"name with any of {', '.join(NAMES)}"
        )
    return passed or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some built-in functions have no signature
        raise TypeError(
            f"{NAME}: got {shown(function)}, expected a function (prompt, response) -> float"
        ) from None
    if not _accepts(signature, 2) and not _accepts(signature, 3):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{NAME}: {name}{signature} can't be called with (prompt, response) or (prompt, "
            "response, row); write e.g. def reward_fn(prompt, response)"
        )
    return signature


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class RewardReader:
    """Checks what a reward function returns."""

    weights: Mapping[str, float] | None
    """Of the numbers in a dict; None for the plain sum."""
    failed: Callable[[RewardError], None]
    """Called with each failure, possibly from a thread."""

    def verdict(self, returned: Any, trajectory: Trajectory) -> Reward:
        """The reward that was returned. Raises RewardError for anything else."""
        if isinstance(returned, Reward) and (
            returned.outcome != "ok" or _finite(returned.value, *returned.components.values())
        ):
            return returned
        if isinstance(returned, Mapping):
            return self._sum(returned, trajectory)
        number = as_number(returned)
        if number is None:
            what = f"returned {shown(returned)}, expected a finite number or a dict of them"
            if inspect.iscoroutine(returned):
                returned.close()
                what += ": declare it with `async def`"
            raise self.error(trajectory, what)
        return Reward(number)

    def error(self, trajectory: Trajectory, what: str) -> RewardError:
        error = RewardError(
            f"{NAME}(prompt={shown(trajectory.prompt.text, 120)}, "
            f"response={shown(response_of(trajectory), 120)}) {what}"
        )
        self.failed(error)
        return error

    @contextmanager
    def blaming(self, trajectory: Trajectory) -> Iterator[None]:
        """Report what the user's code raises, with the rollout that it was to score."""
        try:
            yield
        except Exception as error:
            what = str(blame(NAME, error)).removeprefix(f"{NAME} ")
            raise self.error(trajectory, what) from error

    def _sum(self, parts: Mapping[Any, Any], trajectory: Trajectory) -> Reward:
        if not parts or not _finite(*parts.values()):
            what = f"returned {shown(dict(parts))}, expected finite numbers"
            raise self.error(trajectory, what)
        values = {str(name): float(value) for name, value in parts.items()}
        weights = dict.fromkeys(values, 1.0) if self.weights is None else self.weights
        if weights.keys() != values.keys():
            what = f"returned a dict of {', '.join(values)}, expected the keys of reward_weights: "
            raise self.error(trajectory, what + ", ".join(weights))
        return Reward(math.fsum(weights[name] * value for name, value in values.items()), values)


class _Wrapped(RewardCalculator):
    """Sets up and closes what it wraps, if that is a RewardCalculator."""

    of: Any = None

    async def setup(self) -> None:
        if isinstance(self.of, RewardCalculator):
            await self.of.setup()

    async def close(self) -> None:
        if isinstance(self.of, RewardCalculator):
            await self.of.close()


class PairReward(_Wrapped, FunctionReward):
    """Calls `ask` for each rollout, in a thread unless it is async."""

    def __init__(self, ask: Callable[[Trajectory], Any], reader: RewardReader, of: Any) -> None:
        """`of` is the user's function or calculator that `ask` calls."""

        def judged(trajectory: Trajectory) -> Reward:
            with reader.blaming(trajectory):
                returned = ask(trajectory)
            return reader.verdict(returned, trajectory)

        async def judged_later(trajectory: Trajectory) -> Reward:
            with reader.blaming(trajectory):
                returned = await ask(trajectory)
            return reader.verdict(returned, trajectory)

        asynchronous = getattr(of, "is_async", False) or is_async(of) or is_async(ask)
        super().__init__(judged_later if asynchronous else judged, NAME)
        self.of = of
        self.needs_answer = bool(getattr(of, "needs_answer", False))


class GroupReward(_Wrapped):
    """Calls `ask` for each group, and judges the verdicts that it returns."""

    name = NAME

    def __init__(
        self,
        ask: Callable[[Sequence[Trajectory]], Awaitable[Sequence[Any]]],
        reader: RewardReader,
        of: Any = None,
    ) -> None:
        self._ask = ask
        self._reader = reader
        self.of = of

    async def calculate(self, trajectory: Trajectory) -> Reward:
        [reward] = await self.calculate_group([trajectory])
        return reward

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Reward]:
        with self._reader.blaming(group[0]):
            returned = await self._ask(group)
        try:
            pairs = list(zip(returned, group, strict=True))
        except (TypeError, ValueError):
            what = f"returned {shown(returned)}, expected a list of {len(group)} rewards"
            raise self._reader.error(group[0], what) from None
        return [self._reader.verdict(one, trajectory) for one, trajectory in pairs]


def as_calculator(
    function: Callable[..., Any] | RewardCalculator, reader: RewardReader, pool: DaemonPool
) -> RewardCalculator:
    """A reward function as the pipe calls it. Raises TypeError for a wrong signature."""
    if isinstance(function, FunctionReward):
        return PairReward(function.call, reader, function)
    if isinstance(function, RewardCalculator):
        if compares(function):
            return GroupReward(function.calculate_group, reader, function)
        return PairReward(function.calculate, reader, function)
    row = takes_row(function)

    def arguments(trajectory: Trajectory) -> list[Any]:
        pair = [trajectory.prompt.text, response_of(trajectory)]
        return [*pair, row_of(trajectory.prompt)] if row else pair

    async def on_columns(group: Sequence[Trajectory]) -> Any:
        columns = [list(column) for column in zip(*map(arguments, group), strict=True)]
        return await call(pool, function, *columns)

    if getattr(function, "batched", False):
        return GroupReward(on_columns, reader)
    return PairReward(lambda trajectory: function(*arguments(trajectory)), reader, function)


def _finite(*values: Any) -> bool:
    return all(as_number(value) is not None for value in values)
