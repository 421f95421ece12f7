"""Check and copy what an environment returned, before it reaches a conversation, file or queue.

User objects may raise in any method, even in `__bool__`: what they raise is a UserCodeError too.
"""

from __future__ import annotations

import json
from typing import Any

from retrain.chat.messages import checked_messages
from retrain.chat.tools import check_tools
from retrain.environment import Environment, StepResult, ToolSpec
from retrain.errors import UserCodeError, shown, text_of
from retrain.scoring import as_number
from retrain.supervision.boundary import boundary
from retrain.types import Message


class UnusableError(UserCodeError):
    """Messages or tools that no chat template can show: the rollout's outcome is `invalid`."""


def opening_of(owner: str, answer: Any) -> list[Message]:
    """The first messages that `reset` returned; raises UserCodeError that names `owner`."""
    return _messages(owner, [] if answer is None else answer, "first messages")


def tools_of(owner: str, environment: Environment) -> tuple[ToolSpec, ...]:
    """The tools of an environment; raises UserCodeError that names `owner`."""
    with boundary(owner):
        tools = environment.tools
    if tools is Environment.tools:
        return ()
    if not isinstance(tools, list | tuple):
        raise UnusableError(f"{owner}: got the tools {shown(tools)}, expected a list of ToolSpec")
    try:
        check_tools(tools)
    except Exception as error:
        raise UnusableError(f"{owner}: {text_of(error)}") from error
    return tuple(tools)


def result_of(owner: str, answer: Any) -> StepResult:
    """The StepResult that `step` returned; raises UserCodeError that names `owner`."""
    with boundary(owner):
        result = _result(owner, answer)
    if (result.terminated or result.truncated) and not result.observation:
        return result
    return result._replace(observation=_messages(owner, result.observation, "observation"))


def _result(owner: str, answer: Any) -> StepResult:
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise UserCodeError(
            f"{owner} returned {shown(answer)}, expected StepResult(observation, reward, "
            "terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = answer
    value = as_number(reward)
    if value is None:
        raise UserCodeError(
            f"{owner} returned the reward {shown(reward)}, expected a finite number"
        )
    if not isinstance(info, dict):
        raise UserCodeError(f"{owner} returned the info {shown(info)}, expected a dict")
    ends = bool(terminated), bool(truncated)
    if any(ends) and observation is None:  # as is common with Gym
        observation = ()
    if not isinstance(observation, list | tuple):
        raise UserCodeError(
            f"{owner} returned the observation {shown(observation)}, expected a list of messages"
        )
    return StepResult(observation, value, *ends, dict(info))


def _messages(owner: str, answer: Any, what: str) -> list[Message]:
    """A copy of the messages, of JSON values only."""
    with boundary(owner):
        try:
            messages = checked_messages(answer, what)
            return [_json(message, f"{what}[{index}]") for index, message in enumerate(messages)]
        except Exception as error:
            raise UnusableError(f"{owner}: {text_of(error)}") from error


def _json(message: Message, what: str) -> Message:
    if all(type(key) is str and type(value) is str for key, value in message.items()):
        return message
    try:
        copy: Message = json.loads(json.dumps(message, allow_nan=False))
    except Exception as error:
        raise TypeError(
            f"{what}: got {shown(message)}, expected JSON values only ({text_of(error)})"
        ) from error
    return copy
