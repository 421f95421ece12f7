"""Rows that are trained on directly: demonstrations, and pairs of answers.

Both sources convert a row to one form: `messages` is the opening, and `answer` a list of
continuations, one for a demonstration and (chosen, rejected) for a pair. A continuation is a list
of messages; only its assistant messages are trained. A row's `tools` are offered to the model like
an environment's. All rows are checked when the source is made, before any model loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

from retrain.chat.tools import tools_of
from retrain.errors import PromptError, shown
from retrain.prompts.base import PromptSource, parse_messages
from retrain.prompts.sequences import SequencePrompts
from retrain.types import Message, Row

T = TypeVar("T")
Continuation = Sequence[Message]
RESPONSES = ("response", "completion")
"""Columns of the answer if there is no `answer`."""
TOOLS = "tools"
"""The column of the tools."""
EQUAL = "chosen equals rejected"


class _Examples(SequencePrompts):
    """The rows of a source in one form."""

    def __init__(self, rows: list[Row], dropped: Mapping[str, int]) -> None:
        super().__init__(rows, "the examples")
        self.dropped = dropped
        """The number of dropped rows or prompts per reason."""


class Demonstrations(_Examples):
    """Conversations to imitate; see `demonstration` for the columns."""

    @classmethod
    def of(cls, prompts: PromptSource) -> Self:
        """The demonstrations in `prompts`; raises PromptError for the first invalid row."""
        if isinstance(prompts, cls):
            return prompts
        return cls(_parsed(prompts, demonstration), {})


class Pairs(_Examples):
    """A chosen and a rejected answer per prompt; pairs of equal answers are dropped and counted."""

    @classmethod
    def of(cls, prompts: PromptSource, pair_by: str | None = None) -> Self:
        """The pairs in `prompts`: its rows, or with `pair_by` made of its scored responses.

        Raises PromptError for the first invalid row, or if no pair remains.
        """
        if isinstance(prompts, cls):
            return prompts
        if pair_by is None:
            rows = [row for row in _parsed(prompts, pair) if row.answer[0] != row.answer[1]]
            dropped = Counter({EQUAL: len(prompts) - len(rows)})
        else:
            rows, dropped = _paired(_parsed(prompts, lambda row: _scored(row, pair_by)), pair_by)
        if not rows:
            reasons = ", ".join(f"{count} x {why}" for why, count in dropped.items() if count)
            raise PromptError(f"no pair in {len(prompts)} rows: {reasons}")
        return cls(rows, +dropped)


def demonstration(row: Row) -> Row:
    """A row of `prompt` and `answer` (or `response`, `completion`), or of only `messages`.

    An answer is a string or a list of messages. Without an answer, the opening is what precedes the
    first assistant message. Raises ValueError if there is nothing to learn.
    """
    said, opening = _response(row), row.messages
    if said is not None:
        answer = _continuation(said, "the answer")
    else:
        roles = [message["role"] for message in row.messages]
        if "assistant" not in roles:
            raise ValueError(
                f"has no assistant tokens, so there is nothing to learn; {_columns(row)}: add an "
                "`answer` (or name its column by prompts.answer_column, in a trainer by "
                "column_mapping), or a message with the role assistant"
            )
        first = roles.index("assistant")
        opening, answer = opening[:first], _continuation(opening[first:], "messages")
    if not opening:
        raise ValueError("its first message is the assistant's, expected a message before it")
    return Row(opening, (answer,), row.metadata)


def pair(row: Row) -> Row:
    """A row of `prompt`, `chosen` and `rejected`: strings, messages, or whole conversations.

    Raises ValueError if a column is missing or contains no answer.
    """
    columns = ("chosen", "rejected")
    missing = [name for name in columns if row.metadata.get(name) is None]
    if missing:
        text = f"has no {' and no '.join(missing)}; {_columns(row)}"
        numbers = [str(n) for n, value in row.metadata.items() if type(value) in (int, float)]
        if _response(row) is None or not numbers:
            raise ValueError(f"{text}; expected prompt, chosen and rejected")
        raise ValueError(
            f"{text}. If it is a scored response, set algorithm.pair_by to one of "
            f"{', '.join(numbers)} to pair the best response to each prompt with the worst"
        )
    said = [_after(row.messages, row.metadata[name]) for name in columns]
    answers = tuple(map(_continuation, said, columns))
    return Row(row.messages, answers, row.metadata)


class _Scored(NamedTuple):
    row: Row
    response: Continuation
    score: float


def _scored(row: Row, column: str) -> _Scored:
    said = _response(row)
    if said is None:
        raise ValueError(f"has no answer, response or completion; {_columns(row)}")
    score = row.metadata.get(column)
    if isinstance(score, str):  # csv has no numbers
        with suppress(ValueError):
            score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(
            f"{column!r} (algorithm.pair_by) is {shown(score)}, expected a number; {_columns(row)}"
        )
    return _Scored(row, _continuation(said, "the response"), float(score))


def _paired(scored: Sequence[_Scored], column: str) -> tuple[list[Row], Counter[str]]:
    """The best and the worst response to each prompt; ties and single responses are dropped."""
    prompts: dict[tuple[tuple[str, str], ...], list[_Scored]] = {}
    for one in scored:
        key = tuple((m["role"], m["content"]) for m in one.row.messages)
        prompts.setdefault(key, []).append(one)
    rows: list[Row] = []
    dropped: Counter[str] = Counter()
    for responses in prompts.values():
        best = max(responses, key=lambda one: one.score)
        worst = min(responses, key=lambda one: one.score)
        if len(responses) == 1:
            dropped["only one response to the prompt"] += 1
        elif best.score == worst.score:
            dropped[f"equal {column}"] += 1
        elif best.response == worst.response:
            dropped[EQUAL] += 1
        else:
            rows.append(Row(best.row.messages, (best.response, worst.response), best.row.metadata))
    return rows, dropped


def _parsed(prompts: PromptSource, parse: Callable[[Row], T]) -> list[T]:
    parsed = []
    for index in range(len(prompts)):
        row = prompts.checked_row(index)
        try:
            tools_of(row.metadata.get(TOOLS))
            parsed.append(parse(row))
        except (TypeError, ValueError) as error:
            raise PromptError(f"{prompts.place(index)}: {error}") from None
    return parsed


def _response(row: Row) -> Any:  # whatever the data set holds
    found = (row.metadata[name] for name in RESPONSES if row.metadata.get(name) is not None)
    return row.answer if row.answer is not None else next(found, None)


def _continuation(said: Any, what: str) -> tuple[Message, ...]:
    """The messages of an answer up to its last assistant turn."""
    if isinstance(said, str):
        if not said.strip():
            raise ValueError(f"has no assistant tokens: {what} is empty")
        return ({"role": "assistant", "content": said},)
    messages = parse_messages(said) if not isinstance(said, int | float | Mapping) else None
    if messages is None:
        raise ValueError(f"{what} is {shown(said)}, expected a string or a list of messages")
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError(f"has no assistant tokens: {what} contains no assistant message")
    for first, second in pairwise(messages[: last + 1]):
        if first["role"] == second["role"] == "assistant":
            raise ValueError(f"{what} contains two assistant messages in a row: join them")
    return messages[: last + 1]


def _after(opening: Sequence[Message], said: Any) -> Any:
    """An answer without the prompt, which some data sets repeat before it."""
    if isinstance(said, str) or not isinstance(said, Sequence) or len(said) <= len(opening):
        return said
    heard = [(m["role"], m["content"]) for m in opening]
    given = [(m.get("role"), m.get("content")) for m in said if isinstance(m, Mapping)]
    return said[len(opening) :] if given[: len(opening)] == heard else said


def _columns(row: Row) -> str:
    return f"its other columns are {', '.join(map(str, row.metadata)) or 'none'}"
