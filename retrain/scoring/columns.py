"""Reward functions written for TRL: `(prompts, completions, **columns) -> list`, called per group.

The arguments are those of TRL's GRPOTrainer: lists with one item per rollout, by name, and the
columns of the dataset. What TRL does with the returned values happens here too: None leaves the
function out of the sum of this rollout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, get_args

from retrain.config import RewardConfig
from retrain.config.binding import bind
from retrain.errors import PluginError, first_of, shown
from retrain.scoring.base import Reward, RewardCalculator, is_async, requires_answer
from retrain.supervision.threads import in_thread
from retrain.types import Message, Prompt, Row, Trajectory

Form = Literal["text", "messages"]
LISTS = ("prompts", "completions", "completion_ids")
"""A function that declares one of these is called per group."""
GIVEN = (*LISTS, "trainer_state", "log_extra", "log_metric")
"""The arguments that are not columns."""


def called_by_column(function: Callable[..., Any]) -> bool:
    """Whether it is written for TRL: it declares an argument of LISTS."""
    return not set(LISTS).isdisjoint(inspect.signature(function).parameters)


class ColumnReward(RewardCalculator):
    """A function written for TRL as a RewardCalculator.

    `form` says what a completion is, a string or a list of messages; by default the annotation of
    `completions` does, else the row's prompt, as in TRL. `bound` are arguments with fixed values.
    """

    def __init__(
        self, function: Callable[..., Any], form: Form | None = None, **bound: Any
    ) -> None:
        self.function, self.bound = function, bound
        self.name = getattr(function, "__name__", type(function).__name__)
        self.is_async = is_async(function)
        self.needs_answer = requires_answer(function, bound)
        parameters = inspect.signature(function).parameters
        self._form = form or _annotated(parameters.get("completions"))
        self._any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        self._declared = frozenset(parameters)
        self._required = _required(parameters.values())

    @classmethod
    def bound_to(
        cls, keys: Mapping[str, Any], function: Callable[..., Any], where: str
    ) -> ColumnReward:
        """With the keys of its section, of which `completions` is the form."""
        form = keys.get("completions")
        if form not in (None, *get_args(Form)):
            raise PluginError(f"{where}.completions: got {shown(form)}, expected text or messages")
        columns = _required(inspect.signature(function).parameters.values()) - keys.keys()
        bound = bind(
            function,
            {key: value for key, value in keys.items() if key != "completions"},
            where,
            provided=(*GIVEN, *columns),
            beside=RewardConfig.model_fields,
        )
        return cls(function, form, **bound)

    def check_row(self, row: Row) -> None:
        self._check_columns(_columns(row))

    def _check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise ValueError unless a row has all columns that the function requires."""
        if missing := sorted(self._required - columns.keys() - self.bound.keys()):
            raise ValueError(
                f"{self.name} requires the column {first_of(missing)}, but the row has "
                f"{first_of(list(columns)) or 'no columns'}. A prompt source's `answer_column` "
                "renames a column to `answer`."
            )

    async def calculate(self, trajectory: Trajectory) -> Any:
        [verdict] = await self.calculate_group([trajectory])
        return verdict

    async def calculate_group(self, group: Sequence[Trajectory]) -> Sequence[Any]:
        if not self.is_async:
            return await in_thread(partial(self.call, group))
        arguments, components = self._arguments(group)
        with self._advice(group):
            returned = await self.function(**arguments)
        return _verdicts(returned, len(group), components)

    def call(self, group: Sequence[Trajectory]) -> list[Any]:
        """The verdicts of a plain function, in this thread."""
        arguments, components = self._arguments(group)
        with self._advice(group):
            returned = self.function(**arguments)
        return _verdicts(returned, len(group), components)

    def _arguments(self, group: Sequence[Trajectory]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the function is called with, and the components that its `log_metric` fills."""
        form = self._form_of(group[0])
        rows = [_columns(trajectory.prompt) for trajectory in group]
        self._check_columns(rows[0])
        given: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
        given.update(self.bound)
        components: dict[str, Any] = {}
        given |= {
            "prompts": [_prompt(trajectory.prompt, form) for trajectory in group],
            "completions": [_completion(trajectory, form) for trajectory in group],
            "completion_ids": [_completion_ids(trajectory) for trajectory in group],
            "trainer_state": SimpleNamespace(global_step=max(0, *map(_version, group))),
            "log_extra": partial(_log_extra, group),
            "log_metric": components.__setitem__,
        }
        if not self._any:
            given = {name: value for name, value in given.items() if name in self._declared}
        return given, components

    def _form_of(self, trajectory: Trajectory) -> Form:
        prompt = trajectory.prompt
        single = prompt.plain and len(prompt.messages) == 1  # `system` adds a message
        return self._form or ("text" if single else "messages")

    @contextmanager
    def _advice(self, group: Sequence[Trajectory]) -> Iterator[None]:
        """Name the key for the form of the completions in an error, if the form was a guess."""
        try:
            yield
        except (TypeError, AttributeError, KeyError, IndexError) as error:
            if self._form is None:
                form = self._form_of(group[0])
                other = "messages" if form == "text" else "text"
                advice = f"its completions were {form}; for {other} set `completions: {other}`"
                error.args = (f"{error} ({advice})",)
            raise


def _required(parameters: Collection[inspect.Parameter]) -> frozenset[str]:
    """The columns without which the function can't be called."""
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    return frozenset(p.name for p in named if p.default is p.empty) - frozenset(GIVEN)


def _annotated(parameter: inspect.Parameter | None) -> Form | None:
    """The form that the annotation of `completions` says."""
    text = "" if parameter is None else str(parameter.annotation).lower()
    if "dict" in text or "message" in text:
        return "messages"
    return "text" if "list[str]" in text else None


def _columns(row: Row | Prompt) -> dict[str, Any]:
    answer = {} if row.answer is None else {"answer": row.answer}
    reserved = (*GIVEN, "prompt", "completion")
    return answer | {k: value for k, value in row.metadata.items() if k not in reserved}


def _prompt(prompt: Prompt, form: Form) -> str | list[Message]:
    return prompt.text if form == "text" else list(prompt.messages)


def _completion(trajectory: Trajectory, form: Form) -> str | list[Message]:
    """The text of the last turn, or the messages of all turns, with the reasoning."""
    turns = trajectory.turns
    if trajectory.result is not None or not turns:  # an agent's
        text = trajectory.completion
        return text if form == "text" else [{"role": "assistant", "content": text}]
    if form == "text":
        return turns[-1].completion.text
    parsed = [m for m in trajectory.messages if m["role"] == "assistant"][-len(turns) :]
    said: list[Message] = []
    for index, turn in enumerate(turns):
        message: Message = {"role": "assistant", "content": turn.completion.text}
        if len(parsed) == len(turns) and parsed[index].get("tool_calls"):
            message = parsed[index]
        said += [message, *turn.observation]
    return said


def _completion_ids(trajectory: Trajectory) -> list[int]:
    """All tokens since the first prompt, those of observations included."""
    if not trajectory.turns:
        return []
    first, last = trajectory.turns[0], trajectory.turns[-1]
    return [*last.prompt_ids, *last.completion.token_ids][len(first.prompt_ids) :]


def _version(trajectory: Trajectory) -> int:
    return max(trajectory.versions, default=0)


def _log_extra(group: Sequence[Trajectory], column: str, values: Sequence[Any]) -> None:
    for trajectory, value in zip(group, values, strict=True):
        trajectory.info[column] = value


def _verdicts(returned: Any, count: int, components: Mapping[str, Any]) -> list[Any]:
    """One verdict per rollout. Raises ValueError if the function returned something else."""
    try:
        values = list(returned)
    except TypeError:
        raise ValueError(f"it returned {shown(returned)}, expected a list of {count}") from None
    if len(values) != count:
        raise ValueError(
            f"it returned {len(values)} values, expected {count}: one for each completion"
        )
    return [
        Reward(0.0, applies=False) if value is None else Reward(value, dict(components))
        for value in values
    ]
