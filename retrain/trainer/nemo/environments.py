"""NeMo RL's environments: `step(message_log_batch, metadata)` on any object, sync or async.

Each rollout calls `step` with batches of one. `global_post_process_and_metrics` is called once per
step, with all rollouts of the step, before credit is assigned.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from retrain.assembly import Learner
from retrain.environment import Action, Environment, StepResult
from retrain.errors import UserCodeError, blame, shown
from retrain.supervision.threads import DaemonPool
from retrain.trainer.data import row_of
from retrain.types import Group, Message, Metrics, Prompt, Trajectory

HOOK = "global_post_process_and_metrics"
COLUMNS: Mapping[str, Callable[[Trajectory], Any]] = {
    "message_log": lambda t: list(t.messages),
    "text": lambda t: t.prompt.text,
    "rewards": lambda t: t.reward,
    "is_end": lambda t: t.turns[-1].completion.stop_reason == "stop",
    "prompt_lengths": lambda t: len(t.turns[0].prompt_ids),
    "generation_lengths": lambda t: t.sampled_tokens,
}
"""What the hook's batch holds of each rollout, with `metadata`."""


class EnvironmentReturn(NamedTuple):
    """What NeMo RL's `step` returns: one entry per conversation in each field."""

    observations: Sequence[Mapping[str, str]]
    metadata: Sequence[Any]
    next_stop_strings: Sequence[Sequence[str] | None]
    rewards: Any
    """A sequence (or tensor) of numbers, or a dict from names to such sequences, which is summed"""
    terminateds: Sequence[bool]
    answers: Sequence[str | None] | None = None


class EnvironmentInterface(ABC):
    """The interface of NeMo RL's environments. Inheriting from it is optional."""

    @abstractmethod
    def step(
        self, message_log_batch: list[list[Message]], metadata: list[Any]
    ) -> EnvironmentReturn:
        """Reply to the model's last message in each conversation. May be async."""

    @abstractmethod
    def global_post_process_and_metrics(
        self, batch: dict[str, list[Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, float]]:
        """Return the batch of a step, with `rewards` changed or not, and metrics. May be async."""


def takes_batch(environment: Any) -> bool:
    """Whether the object has NeMo RL's `step`."""
    try:
        inspect.signature(environment.step).bind([], [])
    except (AttributeError, TypeError, ValueError):
        return False
    return True


class MessageLogEnvironment(Environment):
    """An object with NeMo RL's `step`, as an Environment; the row of the prompt is its metadata."""

    def __init__(self, inner: Any, pool: DaemonPool) -> None:
        self.inner = inner
        self._pool = pool

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self._log: list[Message] = list(prompt.messages)
        self._metadata = row_of(prompt)
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        self._log.append({"role": "assistant", "content": action.text})
        returned = await call(self._pool, self.inner.step, [list(self._log)], [self._metadata])
        answer = _fields(returned)
        if stops := _first(answer.next_stop_strings):
            raise ValueError(
                f"next_stop_strings: got {stops!r}, expected None: a run has one set of stop "
                "strings, sampling.stop"
            )
        self._metadata = _first(answer.metadata)
        reward, parts = _reward(answer.rewards)
        over = bool(answer.terminateds[0])
        observation = [] if over else [_message(answer.observations[0])]
        self._log += observation
        return StepResult(observation, reward, over, False, {"rewards": parts} if parts else {})


class Review(Learner):
    """Calls `global_post_process_and_metrics` on the rollouts of each step.

    Its batch has one list each for `message_log text rewards is_end prompt_lengths
    generation_lengths metadata`, with one entry per rollout. Changed `rewards` are trained on, and
    the metrics are returned as `environment/NAME`. Raises UserCodeError when the hook fails.
    """

    def __init__(self, inner: Any, pool: DaemonPool) -> None:
        self._hook = getattr(inner, HOOK)
        self._pool = pool

    async def review(self, groups: Sequence[Group]) -> Metrics:
        trajectories = [t for group in groups for t in group.scored]
        batch = {name: [of(t) for t in trajectories] for name, of in COLUMNS.items()}
        batch["metadata"] = [row_of(t.prompt) for t in trajectories]
        try:
            changed, metrics = await call(self._pool, self._hook, batch)
            rewards = _finite(changed["rewards"], len(trajectories))
            named = {f"environment/{name}": float(value) for name, value in metrics.items()}
        except Exception as error:
            raise blame(HOOK, error) from error
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            trajectory.reward = reward
        return named


async def call(pool: DaemonPool, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a user's function: an async one on the event loop, a plain one in a thread."""
    if inspect.iscoroutinefunction(function):
        return await function(*arguments)
    returned = await pool.run(lambda: function(*arguments))
    return await returned if inspect.isawaitable(returned) else returned


def _fields(returned: Any) -> EnvironmentReturn:
    """The fields of an EnvironmentReturn, of NeMo RL's own class, a plain tuple or a dict."""
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
            f"step returned {shown(returned)} without {', '.join(missing)}, expected an "
            f"EnvironmentReturn with {', '.join(names)}"
        )
    fields: list[Any] = [found.get(name) for name in names]
    return EnvironmentReturn(*fields)


def _finite(values: Sequence[Any], count: int) -> list[float]:
    rewards = [float(value) for value in values]
    if len(rewards) != count or not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards: got {shown(rewards)}, expected {count} finite numbers")
    return rewards


def _reward(rewards: Any) -> tuple[float, dict[str, float]]:
    if isinstance(rewards, Mapping):
        parts = {str(name): float(values[0]) for name, values in rewards.items()}
        return math.fsum(parts.values()), parts
    return float(rewards[0]), {}


def _first(entries: Sequence[Any] | None) -> Any:
    return entries[0] if entries is not None and len(entries) else None


def _message(observation: Any) -> Message:
    """NeMo RL's role `environment` becomes `user`: chat templates have no such role."""
    role = observation.get("role", "user")
    return {
        "role": "user" if role == "environment" else role,
        "content": str(observation.get("content", "")),
    }
