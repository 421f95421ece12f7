"""What a user writes to score a rollout: a function, or a RewardCalculator.

    @reward
    def exact(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

A function is called with the arguments that it declares, of `prompt completion reasoning
answer messages metadata trajectory`; `**kwargs` receives all others.
"""

from __future__ import annotations

import asyncio
import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, cast, overload

from retrain.errors import PluginError, nearest, place_of, shown
from retrain.types import Metrics, Outcome, Row, Trajectory

ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "prompt": attrgetter("prompt.text"),
    "completion": attrgetter("completion"),
    "reasoning": attrgetter("reasoning"),
    "answer": attrgetter("prompt.answer"),
    "messages": attrgetter("messages"),
    "metadata": attrgetter("prompt.metadata"),
    "trajectory": lambda trajectory: trajectory,
}
"""The arguments that a reward function may declare."""
NAMES = tuple(ARGUMENTS)


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with its components, or an `outcome` other than `ok` where there is no reward.

    `turns` and `tokens` say where in the rollout the value was earned; what they leave of it was
    earned by the last turn. Only an algorithm whose `credit` is not `whole` reads them.
    """

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "ok"
    turns: Sequence[float] = ()
    """One part per turn of the trajectory, or none."""
    tokens: Sequence[float] = ()
    """One part per sampled token, turn after turn, or none."""
    applies: bool = True
    """False leaves this reward out of the rollout's sum. A rollout to which no reward applies is
    `invalid`."""


Verdict = float | Reward


class RewardCalculator(ABC):
    """Scores rollouts. The constructor arguments of a subclass are its keys in the YAML.

    A run calls `setup` once before the first rollout and `close` once after the last one, both in
    the same task: what `setup` enters by `async with` (an AsyncExitStack), `close` can exit.
    """

    name: str = ""
    """The name of the component; by default that of the class."""
    processes: int | None = None
    """In how many worker processes it runs, unless its section says otherwise."""
    needs_answer: bool = False
    """Whether it requires an answer in the prompt's row; a dataset without any is warned of."""
    solved_by_answer: bool = False
    """Whether the row's answer is a reference solution, which should get the full reward."""
    after: Sequence[str] = ()
    """The names of rewards that are calculated before: it finds them in `trajectory.rewards`."""

    def check_row(self, row: Row) -> None:  # noqa: B027 - a default, not a forgotten body
        """Raise ValueError for a row that can't be scored; see `Environment.check_row`."""

    def check_group(self, size: int) -> None:  # noqa: B027 - a default, not a forgotten body
        """Raise ValueError if groups of `size` rollouts can't be scored, in training or in
        evaluations."""

    async def setup(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Connect or load, within `deadlines.setup`. If this raises, the run ends."""

    async def close(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """Release it, within `deadlines.close`; called after a failed `setup` too."""

    @abstractmethod
    async def calculate(self, trajectory: Trajectory) -> Verdict:
        """The reward of one finished rollout. If this raises, the rollout is not scored."""

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Verdict]:
        """The rewards of all rollouts of a prompt; override this to compare them."""
        return await asyncio.gather(*map(self.calculate, group))

    def metrics(self) -> Metrics:
        """What to report of this step, such as its cost; called once per step, and not in worker
        processes. The row of the step has each as `reward/NAME/KEY`."""
        return {}


class FunctionReward(RewardCalculator):
    """A plain or async function as a RewardCalculator; still callable as the function itself.

    `bound` are arguments with fixed values. That the function requires no others is checked later,
    by `wants`, before the first rollout: the YAML may bind arguments of a decorated function.
    """

    def __init__(self, function: Callable[..., Any], name: str = "", **bound: Any) -> None:
        """Raises PluginError for what can't be a reward."""
        check_function(function, name, bound)
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.bound = bound
        self.is_async = is_async(function)
        self.needs_answer = requires_answer(function, bound)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**self.bound, **kwargs})

    async def calculate(self, trajectory: Trajectory) -> Verdict:
        verdict: Any = self.call(trajectory)
        return cast(Verdict, await verdict if inspect.isawaitable(verdict) else verdict)

    def call(self, trajectory: Trajectory) -> Any:
        """What the function returns: a verdict, or an awaitable of one."""
        return self.function(**self.arguments(trajectory), **self.bound)

    def arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        """The arguments that it declares, of this rollout."""
        return {name: value_of(trajectory) for name, value_of in self.wants}

    def call_with(self, arguments: Mapping[str, Any]) -> Any:
        """What the function returns for these arguments."""
        return self.function(**arguments, **self.bound)

    @cached_property
    def wants(self) -> list[tuple[str, Callable[[Trajectory], Any]]]:
        """The arguments to call it with, less the bound ones, and what makes each of a rollout.

        Raises PluginError if it requires one that is neither bound nor one of ARGUMENTS.
        """
        parameters = inspect.signature(self.function).parameters.values()
        free = tuple(name for name in NAMES if name not in self.bound)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return [(name, ARGUMENTS[name]) for name in free]
        required = [p.name for p in parameters if p.default is p.empty]
        unknown = [name for name in required if name not in (*free, *self.bound)]
        if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise PluginError(
                f"reward '{self.name}'{place_of(self.function)} requires "
                f"{', '.join(unknown) or 'positional arguments'}, but a reward is called by name "
                f"with any of {', '.join(NAMES)}. Give other arguments a default, or a value in "
                "the YAML."
            )
        return [(p.name, ARGUMENTS[p.name]) for p in parameters if p.name in free]


@overload
def reward(function: Callable[..., Any]) -> FunctionReward: ...
@overload
def reward(
    function: None = None, *, name: str = "", **bound: Any
) -> Callable[[Callable[..., Any]], FunctionReward]: ...


def reward(function: Callable[..., Any] | None = None, *, name: str = "", **bound: Any) -> Any:
    """Make a RewardCalculator of a function: `@reward`, or `@reward(name="...")`."""
    if function is not None:
        return FunctionReward(function, name, **bound)
    return lambda wrapped: FunctionReward(wrapped, name, **bound)


def check_function(function: object, name: object, bound: Mapping[str, Any]) -> None:
    """Raises PluginError unless `function` can be a reward with the arguments `bound`."""
    if not callable(function):
        advice = f"; to name a reward, write @reward(name={function!r})"
        raise PluginError(
            f"@reward: got {shown(function)}, expected a function"
            f"{advice if isinstance(function, str) else ''}"
        )
    if not isinstance(name, str):
        raise PluginError(f"@reward: got the name {shown(name)}, expected a string")
    owner = f"reward '{name or getattr(function, '__name__', '')}'{place_of(function)}"
    if yields(function):
        raise PluginError(f"{owner} yields; expected it to return a number or a Reward")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise PluginError(f"{owner} has no signature; wrap it in a function") from None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for unknown in sorted(bound.keys() - parameters.keys()):
        raise PluginError(f"{owner} has no argument {unknown}{nearest(unknown, parameters)}")


def requires_answer(function: Callable[..., Any], bound: Mapping[str, Any]) -> bool:
    """Whether it requires the argument `answer`."""
    answer = inspect.signature(function).parameters.get("answer")
    return answer is not None and answer.default is answer.empty and "answer" not in bound


def is_async(function: Callable[..., Any]) -> bool:
    """Whether the function, or the `__call__` of the object, is a coroutine function."""
    return any(map(inspect.iscoroutinefunction, (function, _called(function))))


def yields(function: Callable[..., Any]) -> bool:
    """Whether the function, or the `__call__` of the object, is a plain or async generator."""
    both = (function, _called(function))
    return any(inspect.isgeneratorfunction(f) or inspect.isasyncgenfunction(f) for f in both)


def _called(function: Callable[..., Any]) -> object:
    """The `__call__` of an object."""
    return getattr(function, "__call__", None)  # noqa: B004 - it is inspected, not called
