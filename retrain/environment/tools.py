"""The episode that environments with tools share: calls, their results, the next turn, the answer.

    class Search(ToolEnvironment):
        tools = [ToolSpec("search", "Search the pages.", {...})]

        async def call(self, call: ToolCall) -> object:
            return await find(call.arguments["query"])

A reply without calls ends the episode. A mistake of the model and an exception of a tool are
results that the model sees and may answer. An outage is neither: it fails the rollout.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from abc import abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from retrain.config.binding import has_schema, typed_keys
from retrain.environment import Action, Environment, StepResult, ToolCall, ToolSpec
from retrain.errors import ConfigError, text_of
from retrain.supervision.outages import is_outage
from retrain.types import Message, Prompt

_SECTION = re.compile(r"^(Args|Arguments|Returns|Yields|Raises|Examples?):\s*$", re.MULTILINE)
"""A heading of a docstring; the description for the model ends there."""


class ToolError(Exception):
    """A tool raises this to show the model a text of its own, without the name of an exception."""


class ToolEnvironment(Environment):
    """Answers each call of a reply; subclasses have `tools` and override `call`.

    `info` counts the calls as `tool_calls`, and those that failed as `tool_errors`. A subclass that
    overrides `reset` calls the inherited one.
    """

    def __init__(
        self,
        *,
        max_turns: int | None = None,
        tool_seconds: float = 60.0,
        max_result_characters: int = 10_000,
    ) -> None:
        """`max_turns` ends the episode as truncated; by default only `rollout.max_turns` does.

        Raises ConfigError for values out of range.
        """
        for name, value in (
            ("max_turns", max_turns),
            ("tool_seconds", tool_seconds),
            ("max_result_characters", max_result_characters),
        ):
            if value is not None and value <= 0:
                raise ConfigError(f"environment.{name}: got {value}, expected more than 0")
        self.max_turns = max_turns
        self.tool_seconds = tool_seconds
        self.max_result_characters = max_result_characters
        self._start()

    @abstractmethod
    async def call(self, call: ToolCall) -> object:
        """The result of a call that fits its tool: a string, or a value that becomes JSON.

        An exception is shown to the model, but an outage (see docs/running.md) is raised.
        """

    def lane(self, call: ToolCall) -> Hashable:
        """Calls of one reply with equal lanes run one after the other; others at the same time."""
        return call.id

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self._start()
        return prompt.messages

    def _start(self) -> None:
        self._turns = self._calls = self._errors = 0

    async def step(self, action: Action) -> StepResult:
        self._turns += 1
        messages = await self._answers(action.tool_calls)
        truncated = bool(messages) and self._turns == self.max_turns
        info: dict[str, Any] = {"tool_calls": self._calls, "tool_errors": self._errors}
        if truncated:
            info["truncated"] = "environment.max_turns"
        return StepResult(messages, 0.0, not messages, truncated, info)

    async def _answers(self, calls: Sequence[ToolCall]) -> list[Message]:
        """The results in the order of the calls; raises the outage of the first that has one."""
        lanes: dict[Hashable, list[int]] = {}
        for index, call in enumerate(calls):
            lanes.setdefault(self.lane(call), []).append(index)
        texts = [""] * len(calls)

        async def run(lane: Sequence[int]) -> None:
            for index in lane:
                texts[index] = await self._answer(calls[index])

        if len(lanes) == 1:
            await run(*lanes.values())
        else:  # each is within its deadline, so none is left behind
            for error in await asyncio.gather(*map(run, lanes.values()), return_exceptions=True):
                if error is not None:
                    raise error
        return [
            Message(role="tool", content=text, tool_call_id=call.id)
            for call, text in zip(calls, texts, strict=True)
        ]

    async def _answer(self, call: ToolCall) -> str:
        self._calls += 1
        if call.error:
            return self._failed(call.error)
        limit = asyncio.timeout(self.tool_seconds)
        try:
            async with limit:
                result = await self.call(call)
        except ToolError as error:
            return self._failed(text_of(error))
        except Exception as error:
            if limit.expired():
                return self._failed(f"{call.name} took longer than {self.tool_seconds:g} s")
            if is_outage(error):
                raise
            return self._failed(f"{type(error).__name__}: {text_of(error)}")
        try:
            return self._cut(_text(result))
        except Exception as error:  # noqa: BLE001 - of the result's own methods
            return self._failed(f"{call.name} returned an unusable result: {text_of(error)}")

    def _failed(self, reason: str) -> str:
        self._errors += 1
        return self._cut(f"error: {reason}")

    def _cut(self, text: str) -> str:
        limit = self.max_result_characters
        if len(text) <= limit:
            return text
        return f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"


def _text(result: Any) -> str:
    """A result as the model sees it; what is no string becomes JSON."""
    if isinstance(result, str):
        return result
    return json.dumps(result, ensure_ascii=False, default=_as_string)


def _as_string(value: Any) -> str:
    """The string of a value that JSON lacks, such as a date; raises TypeError if it has none."""
    text = str(value)
    if text == object.__repr__(value):
        raise TypeError(
            f"got an object of {type(value).__name__}, expected a string, JSON values, or an "
            "object with __str__"
        )
    return text


class FunctionTool:
    """A function as a tool: its name, docstring and type hints describe it to the model.

    `spec` is the tool. A type may be any that pydantic has a JSON schema for; the section `Args:`
    of the docstring describes the arguments.
    """

    def __init__(self, function: Callable[..., Any], where: str = "tool") -> None:
        """`function` may be a method that is not bound yet: its `self` is no argument.

        Raises ConfigError headed by `where` with all that the function lacks.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if problems := list(_lacking(function, name)):
            raise ConfigError(*(f"{where}: {problem}" for problem in problems))
        self._arguments = typed_keys(function, ("self",))
        schema = self._arguments.json_schema()
        for about in schema["properties"].values():
            about.pop("title", None)  # the name again
        more: dict[str, Any] = {key: schema[key] for key in ("required", "$defs") if key in schema}
        doc = _SECTION.split(inspect.getdoc(function) or "", maxsplit=1)[0].strip()
        parameters: dict[str, Any] = {"type": "object", "properties": schema["properties"], **more}
        self.spec = ToolSpec(name, doc, parameters)

    def convert(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call as values of the function's types; raises ToolError."""
        try:
            converted: dict[str, Any] = self._arguments.validate_python(dict(arguments))
        except ValidationError as error:
            faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise ToolError("; ".join(faults)) from None
        return converted


def _lacking(function: Callable[..., Any], name: str) -> Iterator[str]:
    """What a function lacks to be a tool."""
    if not inspect.getdoc(function):
        yield f"{name} has no docstring. Add one that describes the tool to the model."
    try:
        parameters = inspect.signature(function, eval_str=True).parameters.values()
    except Exception as error:  # noqa: BLE001 - of the user's annotations
        yield f"{name}: its signature can't be read: {type(error).__name__}: {error}"
        return
    for parameter in parameters:
        if parameter.name == "self":
            continue
        shown = f"{name}({parameter.name})"
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            yield f"{shown}: got {parameter}, expected named arguments only"
        elif parameter.annotation is parameter.empty:
            yield f"{shown} has no type hint. Add one, such as `{parameter.name}: str`."
        elif not has_schema(parameter.annotation):
            yield (
                f"{shown}: {inspect.formatannotation(parameter.annotation)} has no JSON schema. "
                "Use a type of JSON values, a dataclass or a pydantic model."
            )
