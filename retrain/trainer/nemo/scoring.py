"""The `reward_fn` of fit(): called with (prompt, response[, row]), as a RewardCalculator.

It may return a number, a bool or a dict of numbers, be `async`, or score a group in one call
(`@batched`). What is a RewardCalculator already, such as an `@reward` function, is called as it is
in a YAML: by name, or with the trajectory. What either raises, or returns instead, is a RewardError
that shows the prompt and the response: by default it ends training, with `on_reward_error: drop`
its rollout is left out and counted. It is never a reward of 0.
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

    It is called once for the rollouts of one prompt.
    """
    function.__dict__["batched"] = True
    return function


def takes_row(function: Callable[..., Any]) -> bool:
    """Whether to pass the row as a third argument.

    It is passed when a third parameter is required, or optional with the default None. Raises
    TypeError when the function can't be called with (prompt, response) or (prompt, response, row),
    or seems to expect the answer in the row's place.
    """
    if not callable(function):
        raise TypeError(
            f"{NAME}: got {shown(function)}, expected a function (prompt, response) -> float"
        )
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:  # some builtins tell no signature
        return False
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    variadic = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    required = sum(p.default is p.empty for p in positional)
    keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if keyword or required > 3 or (len(positional) < 2 and not variadic):
        name = getattr(function, "__name__", type(function).__name__)
        raise TypeError(
            f"{NAME}: {name}{inspect.signature(function)} can't be called with (prompt, response) "
            "or (prompt, response, row): write e.g. def reward_fn(prompt, response)"
        )
    passed = required == 3 or (len(positional) > 2 and positional[2].default is None)
    if passed and positional[2].name in ("answer", "answers"):
        raise TypeError(
            f"{NAME}: the third argument is the data set's row, not its answer: call it "
            f"`row` and read row[...], or decorate the function with @retrain.reward, to have "
            f"it called by name with any of {', '.join(NAMES)}"
        )
    return variadic or passed


@dataclass(frozen=True, slots=True)
class Judge:
    """Calls a reward function on trajectories and checks what it returns."""

    function: Callable[..., Any] | RewardCalculator
    row_of: Callable[[Prompt], Any]
    """The data set's row as it came."""
    weights: Mapping[str, float] | None
    failed: Callable[[RewardError], None]
    """Told of each failure; may be called from a thread."""

    def ask(self, trajectory: Trajectory) -> Any:
        """What the reward function says of it, or an awaitable of that."""
        if isinstance(self.function, FunctionReward):
            return self.function.call(trajectory)
        if isinstance(self.function, RewardCalculator):
            return self.function.calculate(trajectory)
        return self.function(*self.arguments(trajectory))

    def arguments(self, trajectory: Trajectory) -> list[Any]:
        prompt = trajectory.prompt
        pair: list[Any] = [prompt.text, trajectory.completion]
        assert not isinstance(self.function, RewardCalculator)
        if takes_row(self.function):
            pair.append(self.row_of(prompt))
        return pair

    def verdict(self, returned: Any, trajectory: Trajectory) -> Reward:
        """The reward that was returned; raises RewardError when it is none."""
        if isinstance(returned, Reward):
            numbers = (returned.value, *returned.components.values())
            if returned.outcome != "ok" or all(map(_is_number, numbers)):
                return returned
        if isinstance(returned, Mapping):
            return self._sum(returned, trajectory)
        if not _is_number(returned):
            raise self.error(
                trajectory,
                f"returned {shown(returned)}: a finite number or a dict of them is expected",
            )
        return Reward(float(returned))

    def error(self, trajectory: Trajectory, what: str) -> RewardError:
        error = RewardError(
            f"{NAME}(prompt={shown(trajectory.prompt.text, 120)}, "
            f"response={shown(trajectory.completion, 120)}) {what}"
        )
        self.failed(error)
        return error

    def raised(self, trajectory: Trajectory, error: Exception) -> RewardError:
        text = str(blame(NAME, error)).removeprefix(f"{NAME} ")
        made = self.error(trajectory, text)
        made.__cause__ = error
        return made

    def _sum(self, parts: Mapping[Any, Any], trajectory: Trajectory) -> Reward:
        weights = self.weights if self.weights is not None else dict.fromkeys(parts, 1.0)
        bad = {name: value for name, value in parts.items() if not _is_number(value)}
        if bad or not parts:
            what = f"returned {shown(dict(parts))}: finite numbers are expected"
            raise self.error(trajectory, what)
        if set(weights) != set(parts):
            raise self.error(
                trajectory,
                f"returned the parts {sorted(map(str, parts))}, but reward_weights names "
                f"{sorted(weights)}",
            )
        values = {str(name): float(value) for name, value in parts.items()}
        return Reward(math.fsum(weights[name] * value for name, value in parts.items()), values)


class PairReward(FunctionReward):
    """A function or calculator of one rollout; a plain function runs in a thread."""

    def __init__(self, judge: Judge) -> None:
        self.judge = judge
        self.name = NAME
        self.function = judge.ask
        self.bound = {}
        self.is_async = _is_async(judge.function)

    @property
    def needs_answer(self) -> bool:
        function = self.judge.function
        return isinstance(function, FunctionReward) and function.needs_answer

    async def calculate(self, trajectory: Trajectory) -> Reward:
        try:
            returned = await self.judge.ask(trajectory)
        except Exception as error:
            raise self.judge.raised(trajectory, error) from error
        return self.judge.verdict(returned, trajectory)

    def call(self, trajectory: Trajectory) -> Reward:
        try:
            returned = self.judge.ask(trajectory)
        except Exception as error:
            raise self.judge.raised(trajectory, error) from error
        if inspect.isawaitable(returned):
            if inspect.iscoroutine(returned):
                returned.close()
            what = "returned an awaitable: declare it with `async def`"
            raise self.judge.error(trajectory, what)
        return self.judge.verdict(returned, trajectory)


class BatchedReward(RewardCalculator):
    """A function of lists, or a calculator that compares: called once a group."""

    name = NAME

    def __init__(self, judge: Judge, pool: DaemonPool) -> None:
        self.judge = judge
        self.pool = pool

    async def calculate(self, trajectory: Trajectory) -> Reward:
        [reward] = await self.calculate_group([trajectory])
        return reward

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Reward]:
        function = self.judge.function
        try:
            if isinstance(function, RewardCalculator):
                returned: Any = await function.calculate_group(group)
            else:
                returned = await self._on_columns(function, group)
        except Exception as error:
            raise self.judge.raised(group[0], error) from error
        if not hasattr(returned, "__len__") or len(returned) != len(group):
            raise self.judge.error(
                group[0],
                f"returned {shown(returned)}: a list of {len(group)} rewards, one each, is "
                "expected",
            )
        return [self.judge.verdict(one, t) for one, t in zip(returned, group, strict=True)]

    async def _on_columns(self, function: Callable[..., Any], group: Sequence[Trajectory]) -> Any:
        columns = [list(column) for column in zip(*map(self.judge.arguments, group), strict=True)]
        if _is_async(function):
            return await function(*columns)
        return await self.pool.run(lambda: function(*columns))


def as_calculator(judge: Judge, pool: DaemonPool) -> RewardCalculator:
    """The reward function as the pipe calls it. Raises TypeError for a wrong signature."""
    function = judge.function
    if isinstance(function, RewardCalculator):
        own = type(function).calculate_group
        compares = own is not RewardCalculator.calculate_group
        return BatchedReward(judge, pool) if compares else PairReward(judge)
    takes_row(function)
    return BatchedReward(judge, pool) if getattr(function, "batched", False) else PairReward(judge)


def _is_async(function: Any) -> bool:  # any: a function or a RewardCalculator
    if isinstance(function, RewardCalculator):
        return function.is_async if isinstance(function, FunctionReward) else True
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _is_number(value: Any) -> bool:
    try:
        return not isinstance(value, str | bytes) and math.isfinite(value)
    except (TypeError, ValueError, OverflowError):  # the last of a whole number like 10**400
        return False
