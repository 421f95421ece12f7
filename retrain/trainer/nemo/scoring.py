"""The `reward_fn` of `fit`: called with (prompt, response[, row]), as a RewardCalculator.

It may return a number, a bool or a dict of numbers, be `async`, or score a group in one call
(`@batched`). A RewardCalculator, such as an `@reward` function, is called as in a YAML: by name, or
with the trajectory. A reward_fn that raises, or returns anything else, is a RewardError with the
prompt and the response. It ends training, or with `on_reward_error: drop` its rollout is dropped
and counted. It never becomes a reward of 0.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from retrain.concurrency.threads import DaemonPool
from retrain.errors import RewardError, blame, shown
from retrain.rewarding import NAMES, FunctionReward, Reward, RewardCalculator
from retrain.types import Prompt, Trajectory

F = TypeVar("F", bound=Callable[..., Any])
NAME = "reward_fn"
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def batched(function: F) -> F:
    """Mark a reward function that takes lists: (prompts, responses[, rows]) -> a reward each.

    It is called once per group of rollouts.
    """
    function.__dict__["batched"] = True
    return function


def takes_row(function: Callable[..., Any]) -> bool:
    """Whether to pass the row as a third argument: if it is required, or its default is None.

    Raises TypeError when the function can't be called with (prompt, response) or (prompt, response,
    row), or when its third parameter is called `answer`.
    """
    if not callable(function):
        raise TypeError(
            f"{NAME}: got {shown(function)}, expected a function (prompt, response) -> float"
        )
    try:
        signature = inspect.signature(function)
    except ValueError:  # some built-in functions have no signature
        return False
    if not _accepts(signature, 2) and not _accepts(signature, 3):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{NAME}: {name}{signature} can't be called with (prompt, response) or (prompt, "
            "response, row); write e.g. def reward_fn(prompt, response)"
        )
    parameters = signature.parameters.values()
    third = [p for p in parameters if p.kind in _POSITIONAL][2:3]
    passed = any(p.default is p.empty or p.default is None for p in third)
    if passed and third[0].name in ("answer", "answers"):
        raise TypeError(
            f"{NAME}: the third argument is the row of the data set, not its answer: call it `row` "
            "and read row[...], or decorate the function with @retrain.reward, which calls it by "
            f"name with any of {', '.join(NAMES)}"
        )
    return passed or any(p.kind is p.VAR_POSITIONAL for p in parameters)


def _accepts(signature: inspect.Signature, count: int) -> bool:
    try:
        signature.bind(*range(count))
    except TypeError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Judge:
    """Checks what a reward function returns."""

    weights: Mapping[str, float] | None
    failed: Callable[[RewardError], None]
    """Called with each failure, possibly from a thread."""

    def verdict(self, returned: Any, trajectory: Trajectory) -> Reward:
        """The reward that was returned. Raises RewardError for anything else."""
        if isinstance(returned, Reward):
            numbers = (returned.value, *returned.components.values())
            if returned.outcome != "ok" or all(map(_is_number, numbers)):
                return returned
        if isinstance(returned, Mapping):
            return self._sum(returned, trajectory)
        if not _is_number(returned):
            what = f"returned {shown(returned)}, expected a finite number or a dict of them"
            raise self.error(trajectory, what)
        return Reward(float(returned))

    def error(self, trajectory: Trajectory, what: str) -> RewardError:
        error = RewardError(
            f"{NAME}(prompt={shown(trajectory.prompt.text, 120)}, "
            f"response={shown(trajectory.completion, 120)}) {what}"
        )
        self.failed(error)
        return error

    def raised(self, trajectory: Trajectory, error: Exception) -> RewardError:
        return self.error(trajectory, str(blame(NAME, error)).removeprefix(f"{NAME} "))

    def _sum(self, parts: Mapping[Any, Any], trajectory: Trajectory) -> Reward:
        weights = dict.fromkeys(parts, 1.0) if self.weights is None else self.weights
        if not parts or not all(map(_is_number, parts.values())):
            what = f"returned {shown(dict(parts))}, expected finite numbers"
            raise self.error(trajectory, what)
        if set(weights) != set(parts):
            what = f"returned the parts {sorted(map(str, parts))}, but reward_weights names "
            raise self.error(trajectory, what + str(sorted(weights)))
        values = {str(name): float(value) for name, value in parts.items()}
        return Reward(math.fsum(weights[name] * value for name, value in parts.items()), values)


class PairReward(FunctionReward):
    """Scores one rollout per call of `ask`; the Scorer runs a plain function in a thread."""

    def __init__(
        self, ask: Callable[[Trajectory], Any], judge: Judge, *, is_async: bool, answer: bool
    ) -> None:
        self.name = NAME
        self.function = ask
        self.bound = {}
        self.is_async = is_async
        self._judge = judge
        self._answer = answer

    @property
    def needs_answer(self) -> bool:
        return self._answer

    async def calculate(self, trajectory: Trajectory) -> Reward:
        try:
            returned = await self.function(trajectory)
        except Exception as error:
            raise self._judge.raised(trajectory, error) from error
        return self._judge.verdict(returned, trajectory)

    def call(self, trajectory: Trajectory) -> Reward:
        try:
            returned = self.function(trajectory)
        except Exception as error:
            raise self._judge.raised(trajectory, error) from error
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            what = "returned an awaitable: declare it with `async def`"
            raise self._judge.error(trajectory, what)
        return self._judge.verdict(returned, trajectory)


class GroupReward(RewardCalculator):
    """Scores a group of rollouts per call of `ask`."""

    name = NAME

    def __init__(self, ask: Callable[[Sequence[Trajectory]], Any], judge: Judge) -> None:
        self._ask = ask
        self._judge = judge

    async def calculate(self, trajectory: Trajectory) -> Reward:
        [reward] = await self.calculate_group([trajectory])
        return reward

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Reward]:
        try:
            returned = await self._ask(group)
        except Exception as error:
            raise self._judge.raised(group[0], error) from error
        if not hasattr(returned, "__len__") or len(returned) != len(group):
            what = f"returned {shown(returned)}, expected a list of {len(group)} rewards, one each"
            raise self._judge.error(group[0], what)
        return [self._judge.verdict(one, t) for one, t in zip(returned, group, strict=True)]


def as_calculator(
    function: Callable[..., Any] | RewardCalculator,
    row_of: Callable[[Prompt], Any],
    judge: Judge,
    pool: DaemonPool,
) -> RewardCalculator:
    """A reward function as the pipe calls it; `row_of` is the row of the data set.

    Raises TypeError for a wrong signature.
    """
    if isinstance(function, RewardCalculator):
        if type(function).calculate_group is not RewardCalculator.calculate_group:
            return GroupReward(function.calculate_group, judge)
        if isinstance(function, FunctionReward):
            asynchronous, answer = function.is_async, function.needs_answer
            return PairReward(function.call, judge, is_async=asynchronous, answer=answer)
        return PairReward(function.calculate, judge, is_async=True, answer=False)
    row, asynchronous = takes_row(function), _is_async(function)

    def arguments(trajectory: Trajectory) -> list[Any]:
        pair = [trajectory.prompt.text, trajectory.completion]
        return [*pair, row_of(trajectory.prompt)] if row else pair

    async def on_columns(group: Sequence[Trajectory]) -> Any:
        columns = [list(column) for column in zip(*map(arguments, group), strict=True)]
        if asynchronous:
            return await function(*columns)
        return await pool.run(lambda: function(*columns))

    if getattr(function, "batched", False):
        return GroupReward(on_columns, judge)
    return PairReward(lambda t: function(*arguments(t)), judge, is_async=asynchronous, answer=False)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # the last for integers such as 10**400
        return False
