"""Python functions as tools, and classes whose methods are tools with a state.

    environment: {type: tools, tools: [mine.py:search, mine.py:Shop], max_turns: 8}

A function is described to the model by its name, type hints and docstring. Each rollout has an
object of its own of each class. A reply without calls ends the episode. See docs/tools.md.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from retrain import (
    Action,
    ConfigError,
    DaemonPool,
    FunctionTool,
    Message,
    Prompt,
    StepResult,
    ToolCall,
    ToolEnvironment,
    find_object,
    in_thread,
)

HOOKS = ("setup", "close")
"""Public methods that are no tools."""


class Tools(ToolEnvironment):
    """The model can call your functions and methods; a reply without calls is the answer.

    Args:
        tools: Functions and classes, as path/file.py:name or module:name.
        max_turns: End the episode as truncated after this many turns; `rollout.max_turns` also
            applies.
        tool_seconds: The time limit of a call in seconds; a slower call returns an error.
        max_result_characters: The maximum length of a result; a longer one is truncated.
    """

    def __init__(
        self,
        *,
        tools: list[str],
        max_turns: int | None = None,
        tool_seconds: float = 60.0,
        max_result_characters: int = 10_000,
        base_dir: Path = Path(),
    ) -> None:
        super().__init__(
            max_turns=max_turns,
            tool_seconds=tool_seconds,
            max_result_characters=max_result_characters,
        )
        self.classes: list[type] = []
        self.offered: dict[str, tuple[FunctionTool, Callable[..., Any]]] = {}
        """By name: the tool, and its function, or the class that has it."""
        problems: list[str] = []
        for index, path in enumerate(tools):
            try:
                self._offer(path, f"environment.tools.{index}", base_dir)
            except ConfigError as error:
                problems += error.problems
        if not tools:
            problems.append("environment.tools: got an empty list, expected functions or classes")
        if problems:
            raise ConfigError(*problems)
        self.tools = [tool.spec for tool, _ in self.offered.values()]
        self.objects: dict[object, _Object] = {}

    def _offer(self, path: str, where: str, base_dir: Path) -> None:
        found = find_object(path, base_dir, where)
        if inspect.isclass(found):
            self.classes.append(found)
            _wants_prompt(found, where)
            functions = list(_methods(found))
            if not functions:
                raise ConfigError(f"{where}: {found.__name__} has no public methods")
        elif callable(found):
            functions = [found]
        else:
            raise ConfigError(f"{where}: got {found!r}, expected a function or a class")
        for function in functions:
            tool = FunctionTool(function, where)
            if tool.spec.name in self.offered:
                raise ConfigError(f"{where}: got a second tool named {tool.spec.name!r}")
            self.offered[tool.spec.name] = tool, found

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        await self._leave()
        for kind in self.classes:
            self.objects[kind] = state = _Object()
            await state.make(kind, prompt)
        return await super().reset(prompt)

    async def step(self, action: Action) -> StepResult:
        result = await super().step(action)
        for state in self.objects.values():
            result.info.update(state.info())
        if result.terminated or result.truncated:
            await self._leave()
        return result

    async def close(self) -> None:
        await self._leave()

    async def call(self, call: ToolCall) -> object:
        tool, owner = self.offered[call.name]
        arguments = tool.convert(call.arguments)
        if owner in self.objects:
            return await self.objects[owner].call(call.name, arguments)
        return await _run(partial(owner, **arguments), in_thread)

    def lane(self, call: ToolCall) -> Hashable:
        """The methods of an object run in order, so that its state needs no lock."""
        owner = self.offered[call.name][1] if call.name in self.offered else None
        return owner if owner in self.objects else super().lane(call)

    async def _leave(self) -> None:
        """Close the objects of a rollout; a failure is none of the next one."""
        objects, self.objects = self.objects, {}
        with ExitStack() as threads:  # one `close` may hang, but no other's thread stays
            for state in objects.values():
                threads.callback(state.thread.close)
            for kind, state in objects.items():
                try:
                    async with asyncio.timeout(self.tool_seconds):
                        await state.call("close", {})
                except Exception:
                    log = logging.getLogger(__name__)
                    log.warning("%s.close failed", getattr(kind, "__name__", kind), exc_info=True)


class _Object:
    """An object of a user's class; its constructor and sync methods run in one thread."""

    def __init__(self) -> None:
        self.thread = DaemonPool(1)
        self.state: Any = None

    async def make(self, kind: type, prompt: Prompt) -> None:
        wanted = {"prompt": prompt} if _wants_prompt(kind) else {}
        self.state = await self.thread.run(partial(kind, **wanted))
        await self.call("setup", {})

    async def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        """Call a method; a hook that the class lacks does nothing."""
        if name in HOOKS and not hasattr(self.state, name):
            return None
        return await _run(partial(getattr(self.state, name), **arguments), self.thread.run)

    def info(self) -> Mapping[str, Any]:
        info = getattr(self.state, "info", None)
        return info if isinstance(info, Mapping) else {}


def _methods(kind: type) -> Iterator[Callable[..., Any]]:
    """The public methods of a class in the order of their definition, the bases' first."""
    names = [name for base in reversed(kind.__mro__) for name in vars(base)]
    for name in dict.fromkeys(names):
        method = getattr(kind, name)
        if not name.startswith("_") and name not in HOOKS and inspect.isroutine(method):
            yield method


def _wants_prompt(kind: type, where: str = "") -> bool:
    """Whether the constructor declares `prompt`; raises ConfigError if it requires more."""
    parameters = inspect.signature(kind).parameters
    for name, parameter in parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if name != "prompt" and parameter.default is parameter.empty and not variadic:
            raise ConfigError(
                f"{where}: {kind.__name__} requires {name!r}, expected no argument but `prompt`. "
                "Give others a default."
            )
    return "prompt" in parameters


async def _run(call: partial[Any], thread: Callable[[partial[Any]], Awaitable[Any]]) -> Any:
    """Await an async function, and run any other in a thread."""
    if inspect.iscoroutinefunction(call.func):
        return await call()
    answer = await thread(call)
    return await answer if inspect.isawaitable(answer) else answer
