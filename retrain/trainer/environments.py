"""The `environment` of fit(): a class, a factory or an instance, retrain's or NeMo RL's.

Each rollout slot gets an instance of its own: a class or factory is called, an instance is copied.
NeMo RL's face is `step(message_log_batch, metadata)` and `global_post_process_and_metrics(batch)`
on any plain object, sync or async; its `step` is called with batches of one, and its hook before
each step's credit is given, with the whole step's batch.
"""

from __future__ import annotations

import copy
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from retrain.assembly import Learner
from retrain.concurrency.threads import DaemonPool
from retrain.environment import Action, Environment, StepResult
from retrain.errors import UserCodeError, blame, shown
from retrain.types import Group, Message, Metrics, Prompt

Made = Environment | Any
"""An Environment, or an object with NeMo RL's face."""


class EnvironmentReturn(NamedTuple):
    """What NeMo RL's `step` returns: one entry a conversation in each."""

    observations: Sequence[Mapping[str, str]]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Any
    """A sequence (or tensor) of numbers, or a dict from a name to one; a dict is summed."""
    terminateds: Sequence[bool]
    answers: Sequence[str | None] | None = None


class EnvironmentInterface(ABC):
    """NeMo RL's environment face; inheriting from it is optional."""

    @abstractmethod
    def step(
        self, message_log_batch: list[list[Message]], metadata: list[Any]
    ) -> EnvironmentReturn:
        """Answer the model's last message of each conversation; may be async."""

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: dict[str, list[Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Look at a step's rollouts; may change `rewards`, and returns metrics. May be async."""


def environment_factory(environment: Any) -> Callable[[], Made]:
    """What makes one instance of whatever was given.

    Raises TypeError when that is no environment, or an instance that can't be copied.
    """
    if isinstance(environment, type):
        make: Callable[[], Made] = environment
    elif callable(getattr(environment, "step", None)):
        make = lambda: copy.deepcopy(environment)  # noqa: E731 - the short form of a factory
    elif callable(environment):
        make = environment
    else:
        raise TypeError(
            f"environment: got {shown(environment)}, expected an Environment class, an instance, "
            "or a function that makes one"
        )
    try:
        made = make()
    except Exception as error:
        raise TypeError(
            f"environment: {_name(environment)} can't be made anew for each rollout "
            f"({type(error).__name__}: {error}); give a function that makes one"
        ) from error
    if not isinstance(made, Environment) and not _takes_batch(made):
        raise TypeError(
            f"environment: {_name(made)} is neither a retrain.Environment nor has "
            "step(message_log_batch, metadata) as NeMo RL's environments do"
        )
    return make


def environment_label(environment: Any) -> str:
    """How the run's config calls it: `module:Class`, or the function that makes it."""
    named = environment if hasattr(environment, "__qualname__") else type(environment)
    return f"{named.__module__}:{named.__qualname__}"


class MessageLogEnvironment(Environment):
    """An object with NeMo RL's `step`, as an Environment. The prompt's row is its metadata."""

    def __init__(
        self, inner: Any, row_of: Callable[[Prompt], Any], pool: DaemonPool | None = None
    ) -> None:
        self.inner = inner
        self._row_of = row_of
        self._pool = pool

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self._log: list[Message] = list(prompt.messages)
        self._metadata = self._row_of(prompt)
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        self._log.append({"role": "assistant", "content": action.text})
        returned = await call(self._pool, self.inner.step, [list(self._log)], [self._metadata])
        answer = _fields(returned)
        stops = answer["next_stop_strings"]
        if stops is not None and len(stops) and stops[0]:
            raise ValueError(
                f"next_stop_strings is {stops[0]!r}: a run has one set of stop strings, "
                "sampling.stop; return None"
            )
        reward, parts = _reward(answer["rewards"])
        over = bool(answer["terminateds"][0])
        observation = [] if over else [_message(answer["observations"][0])]
        self._log += observation
        metadata = answer["metadata"]
        self._metadata = metadata[0] if metadata is not None and len(metadata) else None
        return StepResult(observation, reward, over, False, {"rewards": parts} if parts else {})


class Review(Learner):
    """Calls `global_post_process_and_metrics` on the rollouts of each step.

    The batch has a list for each of `message_log text rewards is_end prompt_lengths
    generation_lengths metadata`, an entry a rollout. Changed `rewards` are trained; the metrics
    come back as `environment/NAME`. Raises UserCodeError when the hook fails.
    """

    def __init__(
        self, inner: Any, row_of: Callable[[Prompt], Any], pool: DaemonPool | None = None
    ) -> None:
        self._hook = inner.global_post_process_and_metrics
        self._row_of = row_of
        self._pool = pool

    async def review(self, groups: Sequence[Group]) -> Metrics:
        trajectories = [t for group in groups for t in group.scored]
        batch = {
            "message_log": [list(t.messages) for t in trajectories],
            "text": [t.prompt.text for t in trajectories],
            "rewards": [t.reward for t in trajectories],
            "is_end": [t.turns[-1].completion.stop_reason == "stop" for t in trajectories],
            "prompt_lengths": [len(t.turns[0].prompt_ids) for t in trajectories],
            "generation_lengths": [
                sum(len(turn.completion.token_ids) for turn in t.turns) for t in trajectories
            ],
            "metadata": [self._row_of(t.prompt) for t in trajectories],
        }
        try:
            changed, metrics = await call(self._pool, self._hook, batch)
            rewards = [float(value) for value in changed["rewards"]]
            if len(rewards) != len(trajectories) or not all(map(math.isfinite, rewards)):
                raise ValueError(f"rewards is now {rewards}: {len(trajectories)} finite numbers")
            noted = {f"environment/{name}": float(value) for name, value in metrics.items()}
        except Exception as error:
            raise blame("global_post_process_and_metrics", error) from error
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            trajectory.reward = reward
        return noted


async def call(pool: DaemonPool | None, function: Callable[..., Any], *arguments: Any) -> Any:
    """A user's function: an async one on the loop, a plain one in a thread."""
    if inspect.iscoroutinefunction(function) or pool is None:
        returned = function(*arguments)
    else:
        returned = await pool.run(lambda: function(*arguments))
    return await returned if inspect.isawaitable(returned) else returned


def _fields(returned: Any) -> dict[str, Any]:
    """The parts of an EnvironmentReturn, of NeMo RL's own, a plain tuple or a dict."""
    names = EnvironmentReturn._fields
    if isinstance(returned, Mapping):
        found = dict(returned)
    elif isinstance(returned, tuple) and len(returned) in (len(names) - 1, len(names)):
        found = dict(zip(names, returned, strict=False))
    else:
        found = {name: getattr(returned, name) for name in names if hasattr(returned, name)}
    missing = [name for name in ("observations", "rewards", "terminateds") if name not in found]
    if missing:
        raise UserCodeError(
            f"step returned {shown(returned)} without {', '.join(missing)}: an EnvironmentReturn "
            f"of {', '.join(names)} is expected"
        )
    return {name: found.get(name) for name in names}


def _reward(rewards: Any) -> tuple[float, dict[str, float]]:
    if isinstance(rewards, Mapping):
        parts = {str(name): float(values[0]) for name, values in rewards.items()}
        return math.fsum(parts.values()), parts
    return float(rewards[0]), {}


def _message(observation: Any) -> Message:
    """NeMo RL's role `environment` is `user` here: chat templates know no other."""
    if isinstance(observation, str):
        return {"role": "user", "content": observation}
    role = observation.get("role", "user")
    return {
        "role": "user" if role == "environment" else role,
        "content": str(observation.get("content", "")),
    }


def _takes_batch(made: Any) -> bool:
    step = getattr(made, "step", None)
    if not callable(step):
        return False
    try:
        inspect.signature(step).bind([], [])
    except (TypeError, ValueError):
        return False
    return True


def _name(thing: Any) -> str:
    return getattr(thing, "__name__", type(thing).__name__)
