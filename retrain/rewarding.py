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
from typing import Any, overload

from retrain.errors import PluginError, UserCodeError, blame
from retrain.threads import DaemonPool
from retrain.types import Group, Outcome, Trajectory

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
            columns = await asyncio.gather(
                *(self._verdicts(part, trajectories) for part in self.rewards)
            )
        seconds = time.perf_counter() - started
        for index, trajectory in enumerate(trajectories):
            trajectory.seconds["reward"] = seconds
            self._combine(trajectory, [column[index] for column in columns])

    def _combine(self, trajectory: Trajectory, row: Sequence[Any]) -> None:
        total = trajectory.rewards.get("environment", 0.0)
        for part, verdict in zip(self.rewards, row, strict=True):
            try:
                judged = _checked(part.name, verdict)
            except (UserCodeError, TimeoutError) as error:
                trajectory.outcome = "timeout" if isinstance(error, TimeoutError) else "infra_error"
                trajectory.info["error"] = str(error)
                return
            if judged.outcome != "ok":
                trajectory.outcome = judged.outcome
                trajectory.info.setdefault("error", f"reward '{part.name}' said {judged.outcome}")
                return
            trajectory.rewards[part.name] = judged.value
            for component, value in judged.components.items():
                trajectory.rewards[f"{part.name}.{component}"] = value
            total += part.weight * judged.value
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
                return await self._one_by_one(
                    part, [calculator.calculate(trajectory) for trajectory in trajectories]
                )
            return await self._as_group(part, trajectories)

    async def _one_by_one(
        self, part: WeightedReward, calls: Sequence[Coroutine[Any, Any, Any]]
    ) -> list[Any]:
        """All calls at once; one that fails or is late is the matter of its rollout alone."""
        tasks = [asyncio.ensure_future(call) for call in calls]
        try:
            _, late = await asyncio.wait(tasks, timeout=self.deadline)
        except asyncio.CancelledError:
            for task in tasks:
                task.cancel()
            raise
        for task in late:
            task.cancel()
        return [
            self._fault(part, TimeoutError() if task in late else task.exception())
            if task in late or task.cancelled() or task.exception()
            else task.result()
            for task in tasks
        ]

    async def _as_group(
        self, part: WeightedReward, trajectories: Sequence[Trajectory]
    ) -> Sequence[Any]:
        began = time.perf_counter()
        try:
            async with asyncio.timeout(self.deadline):
                verdicts = list(await part.calculator.calculate_group(trajectories))
            if len(verdicts) != len(trajectories):
                raise ValueError(
                    f"calculate_group returned {len(verdicts)} rewards for "
                    f"{len(trajectories)} trajectories: one each, in order, is expected"
                )
        except Exception as error:  # noqa: BLE001 - the boundary that attributes user errors
            late = time.perf_counter() - began >= self.deadline
            fault = self._fault(part, TimeoutError() if late else error)
            return [fault] * len(trajectories)
        return verdicts

    async def _in_threads(
        self, part: WeightedReward, calculator: FunctionReward, trajectories: Sequence[Trajectory]
    ) -> list[Any]:
        """A plain function: one thread for the group while it is quick, else one a rollout."""
        if part.name not in self._slow:
            return await self._thread(part, calculator, trajectories)
        pieces = await asyncio.gather(*(self._thread(part, calculator, [t]) for t in trajectories))
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
                except Exception as error:  # noqa: BLE001 - attributed below, rollout by rollout
                    verdicts.append(blame(f"reward '{part.name}'", error))
            if time.perf_counter() - began > SLOW * len(trajectories):
                self._slow.add(part.name)

        try:
            async with asyncio.timeout(self.deadline):
                await self._pool.run(work)
        except TimeoutError as error:
            self._slow.add(part.name)
            done = list(verdicts)  # the abandoned thread may still append to the other list
            return done + [self._fault(part, error)] * (len(trajectories) - len(done))
        return verdicts

    def _fault(self, part: WeightedReward, error: BaseException | None) -> Exception:
        name = f"reward '{part.name}'"
        if type(error) is TimeoutError and not error.args:
            return TimeoutError(f"{name} took longer than deadlines.reward = {self.deadline} s")
        return blame(name, error or asyncio.CancelledError("it cancelled itself"))


def _checked(name: str, verdict: Any) -> Reward:
    if isinstance(verdict, Exception):
        raise verdict
    judged = verdict if isinstance(verdict, Reward) else None
    value = verdict if judged is None else judged.value
    if judged is not None and judged.outcome != "ok":
        return judged
    numbers = {"": value} if judged is None else {"": value, **judged.components}
    for component, number in numbers.items():
        where = f"reward '{name}'" + (f", component '{component}'" if component else "")
        try:
            finite = not isinstance(number, str) and math.isfinite(number)
        except TypeError:
            finite = False
        if not finite:
            raise UserCodeError(
                f"{where} returned {number!r}: a finite number is expected; to leave a rollout "
                "out, return Reward(0.0, outcome='invalid')"
            )
    if judged is None:
        return Reward(float(value))
    return Reward(float(value), {key: float(v) for key, v in judged.components.items()})
