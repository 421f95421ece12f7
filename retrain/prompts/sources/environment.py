"""The tasks of the environment itself."""

from __future__ import annotations

from retrain.environment import Environment
from retrain.errors import PromptError
from retrain.prompts.base import Origin, PromptSource
from retrain.prompts.sequences import source_of
from retrain.types import Row


class _Counted(PromptSource):
    """Tasks that only differ by their seed."""

    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def row(self, index: int) -> Row:
        return Row(())


def environment(origin: Origin) -> PromptSource:
    """The environment's own tasks: what `Environment.prompts` returns. This is the default for an
    environment that has any."""
    made = origin.environment()
    kind = type(made)
    if kind.prompts is Environment.prompts:
        raise PromptError(
            f"missing, and the environment {kind.__name__} does not generate tasks; expected the "
            f"source of the prompts, such as {{type: file, path: data/my.jsonl}}"
        )
    tasks, name = made.prompts(), f"{kind.__name__}.prompts()"
    counted = isinstance(tasks, int) and not isinstance(tasks, bool)
    source = _Counted(tasks) if counted else source_of(tasks, name)  # type: ignore[arg-type]
    source.name = source.name or name
    source.opened = kind.reset is not Environment.reset or kind.run is not Environment.run
    return source
