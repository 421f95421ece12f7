"""RewardCalculators: what a user writes to score a rollout, and how several make one reward.

    @reward
    def exact(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

A function is called with the names it declares, of `prompt completion answer messages metadata
trajectory`; `**kwargs` takes the rest. `Scorer` runs all calculators of a group: concurrently,
bounded, each call with a deadline, a plain function in a thread. A calculator that fails makes an
outcome of that rollout, never a reward of 0.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from retrain.algorithms.functional import LARGEST
from retrain.concurrency.deadlines import is_theirs, user_call
from retrain.concurrency.threads import DaemonPool
from retrain.errors import LateError, PluginError, UserCodeError, blame, shown
from retrain.types import Group, Outcome, Trajectory

T = TypeVar("T")

NAMES = ("prompt", "completion", "answer", "messages", "metadata", "trajectory")
SLOW = 0.02
"""Seconds: a plain function slower than this gets a thread for each rollout, not each group."""


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward with its parts, or the reason why there is none (`outcome` other than `ok`)."""

    value: float
    components: Mapping[str, float] = field(default_factory=dict)
    outcome: Outcome = "ok"


Verdict = float | Reward


class RewardCalculator(ABC):
    """Scores rollouts; a subclass's constructor arguments are its keys in the YAML."""

    name: str = ""
    """The component's name; by default the class's."""

    @abstractmethod
    async def calculate(self, trajectory: Trajectory) -> Verdict:
        """The reward of one finished rollout. May raise: that rollout is then not scored."""

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Verdict]:
        """The rewards of one prompt's rollouts; override it to compare them with each other."""
        return await asyncio.gather(*map(self.calculate, group))


class FunctionReward(RewardCalculator):
    """A plain or async function as a RewardCalculator; still callable as the function itself.

    Raises PluginError when the function asks for a name that nobody provides.
    """

    def __init__(self, function: Callable[..., Any], name: str = "", **bound: Any) -> None:
        self.function = function
        self.name = name or getattr(function, "__name__", type(function).__name__)
        self.bound = bound
        self.is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
        )
        self._wants = self._declared()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **{**self.bound, **kwargs})

    def bind(self, **bound: Any) -> FunctionReward:
        """The same function with some arguments fixed (the YAML's further keys)."""
        return FunctionReward(self.function, self.name, **{**self.bound, **bound})

    async def calculate(self, trajectory: Trajectory) -> Verdict:
        result = self.call(trajectory)
        if self.is_async or inspect.isawaitable(result):
            result = await result
        verdict: Verdict = result
        return verdict

    def call(self, trajectory: Trajectory) -> Any:
        """The function's own result: a verdict, or an awaitable of one."""
        return self.function(**self._arguments(trajectory), **self.bound)

    @property
    def needs_answer(self) -> bool:
        """Whether it asks for the row's answer by name, without a default."""
        answer = inspect.signature(self.function).parameters.get("answer")
        return answer is not None and answer.default is answer.empty and "answer" in self._wants

    def _declared(self) -> tuple[str, ...]:
        parameters = inspect.signature(self.function).parameters.values()
        if any(p.kind is p.VAR_KEYWORD for p in parameters):
            return tuple(name for name in NAMES if name not in self.bound)
        unknown = [
            p.name
            for p in parameters
            if p.name not in NAMES and p.name not in self.bound and p.default is p.empty
        ]
        if unknown or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
            raise PluginError(
                f"reward '{self.name}' asks for {', '.join(unknown) or 'positional arguments'}: "
                f"a reward is called by name with any of {', '.join(NAMES)}; "
                "give other arguments a default or a value in the YAML"
            )
        return tuple(p.name for p in parameters if p.name in NAMES and p.name not in self.bound)

    def _arguments(self, trajectory: Trajectory) -> dict[str, Any]:
        prompt = trajectory.prompt
        values: dict[str, Any] = {}
        for name in self._wants:
            if name == "prompt":
                values[name] = prompt.text
            elif name == "trajectory":
                values[name] = trajectory
            elif name in ("answer", "metadata"):
                values[name] = getattr(prompt, name)
            else:
                values[name] = getattr(trajectory, name)
        return values


@overload
def reward(function: Callable[..., Any]) -> FunctionReward: ...
@overload
def reward(
    function: None = None, *, name: str = "", **bound: Any
) -> Callable[[Callable[..., Any]], FunctionReward]: ...


def reward(function: Callable[..., Any] | None = None, *, name: str = "", **bound: Any) -> Any:
    """Make a function a RewardCalculator: `@reward`, or `@reward(name="...")`."""
    if function is not None:
        return FunctionReward(function, name, **bound)
    return lambda wrapped: FunctionReward(wrapped, name, **bound)


@dataclass(frozen=True, slots=True)
class WeightedReward:
    """One of a run's rewards."""

    name: str
    weight: float
    calculator: RewardCalculator


class Scorer:
    """A run's rewards together: the reward is the weighted sum of the components.

    `deadline` is in seconds a call; at most `concurrency` groups are scored at once by each.
    Raises PluginError when two rewards have one name.
    """

    def __init__(
        self, rewards: Sequence[WeightedReward], *, deadline: float = 120.0, concurrency: int = 64
    ) -> None:
        names = [part.name for part in rewards]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise PluginError(f"two rewards are called {twice}: give each its own `name`")
        self.rewards = tuple(rewards)
        self.deadline = deadline
        self._bounds = {part.name: asyncio.Semaphore(concurrency) for part in rewards}
        self._pool = DaemonPool(4 * concurrency)
        self._slow: set[str] = set()

    def close(self) -> None:
        """Let the idle threads end."""
        self._pool.close()

    async def score(self, group: Group) -> None:
        """Fill in `rewards` and `reward` of the group's good rollouts, or their bad outcome."""
        trajectories = group.scored
        if not trajectories:
            return
        started = time.perf_counter()
        if len(self.rewards) == 1:  # the common case, without a task for each reward
            columns = [await self._verdicts(self.rewards[0], trajectories)]
        else:
            columns = await _together([self._verdicts(p, trajectories) for p in self.rewards])
        seconds = time.perf_counter() - started
        for index, trajectory in enumerate(trajectories):
            trajectory.seconds["reward"] = seconds
            self._combine(trajectory, [column[index] for column in columns])

    def _combine(self, trajectory: Trajectory, row: Sequence[Any]) -> None:
        try:
            self._add_up(trajectory, row)
        except UserCodeError as error:
            trajectory.outcome = "timeout" if isinstance(error, LateError) else "infra_error"
            trajectory.info["error"] = str(error)

    def _add_up(self, trajectory: Trajectory, row: Sequence[Any]) -> None:
        total = trajectory.rewards.get("environment", 0.0)
        for part, verdict in zip(self.rewards, row, strict=True):
            judged = _checked(part.name, verdict)
            if judged.outcome != "ok":
                trajectory.outcome = judged.outcome
                trajectory.info.setdefault("error", f"reward '{part.name}' said {judged.outcome}")
                return
            trajectory.rewards[part.name] = judged.value
            for component, value in judged.components.items():
                trajectory.rewards[f"{part.name}.{component}"] = value
            total += part.weight * judged.value
        if max(map(abs, (*trajectory.rewards.values(), total))) > LARGEST:
            raise UserCodeError(
                f"the rewards {shown(trajectory.rewards, 200)} sum to {total}: numbers of at most "
                f"{LARGEST:g} are expected, as a loss in float32 can take them; scale the reward "
                "down"
            )
        trajectory.reward = total

    async def _verdicts(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:  # any: what user code returned, or an exception; `_checked` judges
        """One verdict a trajectory. The deadline runs once the bound admits the group."""
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
        """All calls at once; one that fails or is late is the matter of its rollout alone.

        A late one is cancelled and not waited for, unless the run itself ends.
        """
        tasks = [asyncio.create_task(_judged(part, t)) for t in trajectories]
        try:
            await asyncio.sleep(0)  # by then those that wait for nothing are done
            late = {task for task in tasks if not task.done()}
            if late:
                _, late = await asyncio.wait(late, timeout=self.deadline)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            raise
        for task in late:
            task.cancel()
        return [self._late(part) if task in late else task.result() for task in tasks]

    async def _as_group(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:
        async def call() -> list[Any]:
            verdicts = list(await part.calculator.calculate_group(trajectories))
            if len(verdicts) != len(trajectories):
                raise ValueError(
                    f"calculate_group returned {len(verdicts)} rewards for "
                    f"{len(trajectories)} trajectories: one each, in order, is expected"
                )
            return verdicts

        try:
            return await user_call(f"reward '{part.name}'", call, self.deadline, "reward")
        except UserCodeError as error:
            return [error] * len(trajectories)

    async def _in_threads(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        """A plain function: one thread for the group while it is quick, else one a rollout."""
        if part.name not in self._slow:
            return await self._thread(part, calculator, trajectories)
        pieces = await _together([self._thread(part, calculator, [t]) for t in trajectories])
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
                except BaseException as error:  # noqa: BLE001 - the rollout's own, even SystemExit
                    verdicts.append(blame(f"reward '{part.name}'", error))
            if time.perf_counter() - began > SLOW * len(trajectories):
                self._slow.add(part.name)

        try:
            await self._pool.run(work, self.deadline)
        except TimeoutError:
            self._slow.add(part.name)
            done = list(verdicts)  # the abandoned thread may still append to the other list
            return done + [self._late(part)] * (len(trajectories) - len(done))
        return verdicts

    def _late(self, part: WeightedReward) -> LateError:
        return LateError(
            f"reward '{part.name}' took longer than deadlines.reward = {self.deadline} s"
        )


async def _judged(part: WeightedReward, trajectory: Trajectory) -> Any:
    """The calculator's verdict, or the error that it raised."""
    try:
        return await part.calculator.calculate(trajectory)
    except BaseException as error:
        if not is_theirs(error):
            raise
        return blame(f"reward '{part.name}'", error)


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all; a cancellation waits until each of them has ended."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(call) for call in calls]
    return [task.result() for task in tasks]


def as_number(value: Any) -> float | None:
    """A reward as a float, of numpy or torch too; None where it is no finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - whatever an object of a user's raises when asked
        return None
    return number if math.isfinite(number) else None


def _checked(name: str, verdict: Any) -> Reward:
    if type(verdict) is float and math.isfinite(verdict):  # the common case, and a quick one
        return Reward(verdict)
    if isinstance(verdict, UserCodeError):
        raise verdict
    judged = verdict if isinstance(verdict, Reward) else None
    value = verdict if judged is None else judged.value
    if judged is not None and judged.outcome != "ok":
        return judged
    components = {} if judged is None else judged.components
    if not isinstance(components, Mapping):
        raise UserCodeError(
            f"reward '{name}' returned the components {shown(components)}: a mapping of names to "
            "numbers is expected"
        )
    numbers: dict[str, float] = {}
    for component, given in {"": value, **components}.items():
        number = as_number(given)
        if number is None:
            where = f"reward '{name}'" + (f", component '{component}'" if component else "")
            raise UserCodeError(
                f"{where} returned {shown(given)}: a finite number is expected; to leave a rollout "
                "out, return Reward(0.0, outcome='invalid')"
            )
        numbers[component] = number
    return Reward(numbers.pop(""), numbers)
