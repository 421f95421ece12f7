"""Rewards: what a user writes to score a rollout, and how several make one reward.

    @reward
    def exact(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

A function is called with the arguments that it declares, of `prompt completion answer messages
metadata trajectory`; `**kwargs` receives all others. `Scorer` runs the calculators of a group at
the same time, within bounds and deadlines, plain functions in threads. A calculator that fails sets
the outcome of its rollout; a failure is never a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast, overload

from retrain.algorithms.functional import LARGEST
from retrain.concurrency.deadlines import apart, is_theirs, own_task, user_call
from retrain.concurrency.threads import DaemonPool
from retrain.errors import LateError, PluginError, UserCodeError, blame, shown
from retrain.types import Group, Outcome, Trajectory

T = TypeVar("T")

ARGUMENTS: Mapping[str, Callable[[Trajectory], Any]] = {
    "prompt": lambda trajectory: trajectory.prompt.text,
    "completion": lambda trajectory: trajectory.completion,
    "answer": lambda trajectory: trajectory.prompt.answer,
    "messages": lambda trajectory: trajectory.messages,
    "metadata": lambda trajectory: trajectory.prompt.metadata,
    "trajectory": lambda trajectory: trajectory,
}
"""The arguments that a reward function may declare."""
NAMES = tuple(ARGUMENTS)
SLOW = 0.02
"""Seconds. A plain function that is slower gets one thread per rollout instead of per group."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with its components, or an `outcome` other than `ok` where there is no reward."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "ok"


Verdict = float | Reward


class RewardCalculator(ABC):
    """Scores rollouts. The constructor arguments of a subclass are its keys in the YAML."""

    name: str = ""
    """The name of the component; by default that of the class."""

    @abstractmethod
    async def calculate(self, trajectory: Trajectory) -> Verdict:
        """The reward of one finished rollout. If this raises, the rollout is not scored."""

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Verdict]:
        """The rewards of all rollouts of a prompt; override this to compare them."""
        return await asyncio.gather(*map(self.calculate, group))


class FunctionReward(RewardCalculator):
    """A plain or async function as a RewardCalculator; still callable as the function itself.

    `bound` are arguments with fixed values. Raises PluginError when the function requires an
    argument that is neither bound nor one of ARGUMENTS.
    """

    def __init__(self, function: Callable[..., Any], name: str = "", **bound: Any) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.bound = bound
        self.is_async = is_async(function)
        self._wants = self._declared()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**self.bound, **kwargs})

    async def calculate(self, trajectory: Trajectory) -> Verdict:
        verdict: Any = self.call(trajectory)
        return cast(Verdict, await verdict if inspect.isawaitable(verdict) else verdict)

    def call(self, trajectory: Trajectory) -> Any:
        """What the function returns: a verdict, or an awaitable of one."""
        given = {name: ARGUMENTS[name](trajectory) for name in self._wants}
        return self.function(**given, **self.bound)

    @property
    def needs_answer(self) -> bool:
        """Whether it requires the argument `answer`."""
        answer = inspect.signature(self.function).parameters.get("answer")
        return answer is not None and answer.default is answer.empty and "answer" in self._wants

    def _declared(self) -> tuple[str, ...]:
        """The arguments to call it with, less the bound ones."""
        parameters = inspect.signature(self.function).parameters.values()
        free = tuple(name for name in NAMES if name not in self.bound)
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return free
        required = [p.name for p in parameters if p.default is p.empty]
        unknown = [name for name in required if name not in (*free, *self.bound)]
        if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise PluginError(
                f"reward '{self.name}' requires {', '.join(unknown) or 'positional arguments'}, "
                f"but a reward is called by name with any of {', '.join(NAMES)}. Give other "
                "arguments a default, or a value in the YAML."
            )
        return tuple(p.name for p in parameters if p.name in free)


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


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One of the rewards of a run."""

    name: str
    weight: float
    calculator: RewardCalculator


def fail(trajectory: Trajectory, error: UserCodeError) -> None:
    """Mark a rollout as failed by user code."""
    trajectory.outcome = "timeout" if isinstance(error, LateError) else "infra_error"
    trajectory.info["error"] = str(error)


class Scorer:
    """The rewards of a run. The reward of a rollout is their weighted sum.

    `deadline` is in seconds per call; each reward scores at most `concurrency` groups at once.
    Raises PluginError when two rewards have the same name.
    """

    def __init__(
        self, rewards: Sequence[WeightedReward], *, deadline: float = 120.0, concurrency: int = 64
    ) -> None:
        names = [part.name for part in rewards]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PluginError(f"several rewards have the name {twice}: give each its own `name`")
        self.rewards = tuple(rewards)
        self.deadline = deadline
        self._bounds = {part.name: asyncio.Semaphore(concurrency) for part in rewards}
        self._pool = DaemonPool(4 * concurrency)
        self._slow: set[str] = set()

    def close(self) -> None:
        """End the idle threads."""
        self._pool.close()

    async def score(self, group: Group) -> None:
        """Set `rewards` and `reward` of the rollouts that are `ok`, or their new outcome."""
        trajectories = group.scored
        if not trajectories:
            return
        started = time.perf_counter()
        columns = await _together([self._verdicts(p, trajectories) for p in self.rewards])
        seconds = time.perf_counter() - started
        for index, trajectory in enumerate(trajectories):
            trajectory.seconds["reward"] = seconds
            try:
                self._add_up(trajectory, [column[index] for column in columns])
            except UserCodeError as error:
                fail(trajectory, error)

    def _add_up(self, trajectory: Trajectory, row: Sequence[Any]) -> None:
        total = trajectory.rewards.get("environment", 0.0)
        for part, verdict in zip(self.rewards, row, strict=True):
            judged = _checked(part.name, verdict)
            if judged.outcome != "ok":
                trajectory.outcome = judged.outcome
                error = f"reward '{part.name}' returned the outcome {judged.outcome}"
                trajectory.info.setdefault("error", error)
                return
            trajectory.rewards[part.name] = judged.value
            for component, value in judged.components.items():
                trajectory.rewards[f"{part.name}.{component}"] = value
            total += part.weight * judged.value
        if max(map(abs, (*trajectory.rewards.values(), total))) > LARGEST:
            raise UserCodeError(
                f"the rewards {shown(trajectory.rewards, 200)} sum to {total}, expected numbers "
                f"of at most {LARGEST:g}, for a loss in float32. Scale the reward down."
            )
        trajectory.reward = total

    async def _verdicts(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:  # any: what user code returned, or an exception; `_checked` judges
        """One verdict per trajectory. The deadline starts once the bound admits the group."""
        calculator = part.calculator
        async with self._bounds[part.name]:
            if isinstance(calculator, FunctionReward) and not calculator.is_async:
                return await self._in_threads(part, calculator, trajectories)
            if type(calculator).calculate_group is RewardCalculator.calculate_group:
                return await self._one_by_one(part, trajectories)
            return await self._as_group(part, trajectories)

    async def _one_by_one(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        """All calls at once; one that fails or is late affects only its rollout.

        A late call is cancelled, and only awaited if the run itself ends.
        """
        tasks = [own_task(_judged(part, t)) for t in trajectories]
        try:
            await asyncio.sleep(0)  # calls that never wait are done after this
            late = {task for task in tasks if not task.done()}
            if late:
                _, late = await asyncio.wait(late, timeout=self.deadline)
        except asyncio.CancelledError:
            for task in tasks:
                task.end()
            await asyncio.wait(tasks)
            raise
        for task in late:
            task.end()
        return [self._late(part) if task in late else task.result() for task in tasks]

    async def _as_group(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:
        async def call() -> list[Any]:
            verdicts = list(await part.calculator.calculate_group(trajectories))
            if len(verdicts) != len(trajectories):
                raise ValueError(
                    f"calculate_group returned {len(verdicts)} rewards, expected one for each of "
                    f"{len(trajectories)} trajectories"
                )
            return verdicts

        name = f"reward '{part.name}'"
        try:
            return await apart(user_call(name, call, self.deadline, "reward"), name)
        except UserCodeError as error:
            return [error] * len(trajectories)

    async def _in_threads(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        """A plain function: one thread per group while it is fast, else one per rollout."""
        pieces = [[t] for t in trajectories] if part.name in self._slow else [trajectories]
        pieces = await _together([self._thread(part, calculator, piece) for piece in pieces])
        return [verdict for piece in pieces for verdict in piece]

    async def _thread(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        verdicts: list[Any] = []

        def work() -> None:
            began = time.perf_counter()
            for trajectory in trajectories:
                try:
                    verdicts.append(calculator.call(trajectory))
                except BaseException as error:  # noqa: BLE001 - fails this rollout only, even SystemExit
                    verdicts.append(blame(f"reward '{part.name}'", error))
            if time.perf_counter() - began > SLOW * len(trajectories):
                self._slow.add(part.name)

        try:
            await self._pool.run(work, self.deadline)
        except TimeoutError:
            self._slow.add(part.name)
            done = list(verdicts)  # a copy: the abandoned thread may still append
            return done + [self._late(part)] * (len(trajectories) - len(done))
        return verdicts

    def _late(self, part: WeightedReward) -> LateError:
        return LateError(
            f"reward '{part.name}' took longer than deadlines.reward = {self.deadline} s"
        )


async def _judged(part: WeightedReward, trajectory: Trajectory) -> Any:
    """The verdict of the calculator, or the error that it raised."""
    try:
        return await part.calculator.calculate(trajectory)
    except BaseException as error:
        if not is_theirs(error):
            raise
        return blame(f"reward '{part.name}'", error)


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls; a cancellation waits until each has ended."""
    if len(calls) == 1:  # the common case needs no task
        return [await calls[0]]
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def is_async(function: Callable[..., Any]) -> bool:
    """Whether the function, or the `__call__` of the object, is a coroutine function."""
    called = getattr(function, "__call__", None)  # noqa: B004 - it is inspected, not called
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(called)


def as_number(value: Any) -> float | None:
    """A reward as a float, also one of numpy or torch; None if it is no finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        return None
    return number if math.isfinite(number) else None


def _checked(name: str, verdict: Any) -> Reward:
    """The verdict as a Reward of floats; raises UserCodeError."""
    if type(verdict) is float and math.isfinite(verdict):  # the common case, fast
        return Reward(verdict)
    if isinstance(verdict, UserCodeError):
        raise verdict
    judged = verdict if isinstance(verdict, Reward) else Reward(verdict)
    if judged.outcome != "ok":
        return judged
    if not isinstance(judged.components, Mapping):
        raise UserCodeError(
            f"reward '{name}' returned the components {shown(judged.components)}, expected a "
            "mapping of names to numbers"
        )
    numbers: dict[str, float] = {}
    for component, given in {"": judged.value, **judged.components}.items():
        number = as_number(given)
        if number is None:
            where = f"reward '{name}'" + (f", component '{component}'" if component else "")
            raise UserCodeError(
                f"{where} returned {shown(given)}, expected a finite number. To exclude a rollout, "
                "return Reward(0.0, outcome='invalid')."
            )
        numbers[component] = number
    return Reward(numbers.pop(""), numbers)
