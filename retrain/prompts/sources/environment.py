"""The tasks of the environment itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.environment import Environment
from retrain.errors import PromptError, shown
from retrain.prompts.base import Origin, PromptSource
from retrain.types import Row


class EnvironmentPrompts(PromptSource):
    """The environment's own tasks; the default for an environment that has any. See the method
    `prompts` of `Environment`.

    Raises PromptError if it has none.
    """

    def __init__(self, origin: Origin) -> None:
        environment = origin.environment()
        kind = type(environment)
        if kind.prompts is Environment.prompts:
            raise PromptError(
                f"missing, and the environment {kind.__name__} has no tasks of its own; expected "
                "the source of the prompts, such as {type: file, path: data/my.jsonl}"
            )
        self.name = f"{kind.__name__}.prompts()"
        self.opened = kind.reset is not Environment.reset or kind.run is not Environment.run
        self._tasks = _by_index(self.name, environment.prompts())

    def __len__(self) -> int:
        return self._tasks if isinstance(self._tasks, int) else len(self._tasks)

    def row(self, index: int) -> Row | Mapping[str, Any] | str:
        if isinstance(self._tasks, int):
            return Row(())
        if isinstance(self._tasks, PromptSource):
            return self._tasks.row(index)
        found: Row | Mapping[str, Any] | str = self._tasks[index]
        return found

    def place(self, index: int) -> str:
        return f"{self.name}, row {index}"


def _by_index(name: str, tasks: Any) -> int | PromptSource | Sequence[Any]:
    """What `prompts` returned; an iterator is read, once."""
    listed = not isinstance(tasks, bool | str | bytes | Mapping)
    if listed and isinstance(tasks, int | PromptSource):
        return tasks
    if listed and hasattr(tasks, "__len__") and hasattr(tasks, "__getitem__"):
        rows: Sequence[Any] = tasks
        return rows
    if not listed or not hasattr(tasks, "__iter__"):
        raise PromptError(f"{name} returned {shown(tasks)}, expected rows, or the number of tasks")
    return list(tasks)
