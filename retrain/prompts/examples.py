"""Rows that are trained on as they stand: demonstrations, and pairs of answers.

Both sources bring a row into one form: `messages` is the opening that the model is shown, `answer`
holds the continuations, a list of messages each: one for a demonstration, (chosen, rejected) for a
pair. Every assistant message of a continuation is trained, nothing else. A row's `tools` are shown
to the model as an environment's are. Every row is checked when the source is made, so that a bad
one is told before any model loads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple, Self, TypeVar

from retrain.chat.tools import tools_of
from retrain.errors import PromptError, shown
from retrain.prompts.base import PromptSource, Row, parse_messages
from retrain.types import Message

T = TypeVar("T")
Continuation = Sequence[Message]
RESPONSES = ("response", "completion")
"""Columns that hold an answer where there is no `answer`."""
TOOLS = "tools"
"""The column that holds the tools on offer."""
EQUAL = "chosen equals rejected"


class _Examples(PromptSource):
    """Rows of a source, brought into one form."""

    def __init__(self, rows: Sequence[Row], dropped: Mapping[str, int]) -> None:
        self._rows = rows
        self.dropped = dropped
        """Rows or prompts that are left out, by the reason."""

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._rows[index]


class Demonstrations(_Examples):
    """What the model is to imitate; see `demonstration` for the columns."""

    @classmethod
    def of(cls, prompts: PromptSource) -> Self:
        """The demonstrations of `prompts`; raises PromptError naming the first bad row."""
        if isinstance(prompts, cls):
            return prompts
        return cls(_parsed(prompts, demonstration), {})


class Pairs(_Examples):
    """A chosen and a rejected answer to each prompt; pairs of equal ones are dropped, counted."""

    @classmethod
    def of(cls, prompts: PromptSource, pair_by: str | None = None) -> Self:
        """The pairs of `prompts`: of its rows, or with `pair_by` of its scored responses.

        Raises PromptError naming the first bad row, or when no pair is left.
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
            raise PromptError(f"none of the {len(prompts)} rows makes a pair: {reasons}")
        return cls(rows, +dropped)


def demonstration(row: Row) -> Row:
    """A row of `prompt` and `answer` (or `response`, `completion`), or of `messages` alone.

    An answer is a text or messages; of `messages` without one, what precedes the first assistant
    turn is the opening. Raises ValueError when there is nothing to learn.
    """
    said = _response(row)
    if said is None:
        first = _first_assistant(row)
        opening, rest = row.messages[:first], _continuation(row.messages[first:], "messages")
    else:
        opening, rest = row.messages, _continuation(said, "the answer")
    if not opening:
        raise ValueError("its first message is the assistant's: one that asks must precede it")
    return Row(opening, (rest,), row.metadata)


def pair(row: Row) -> Row:
    """A row of `prompt`, `chosen` and `rejected`: texts, messages, or whole conversations.

    Raises ValueError when a column is missing or holds no answer.
    """
    missing = [name for name in ("chosen", "rejected") if row.metadata.get(name) is None]
    if missing:
        raise ValueError(_no_pair(row, missing))
    answers = tuple(
        _continuation(_after(row.messages, row.metadata[name]), name)
        for name in ("chosen", "rejected")
    )
    return Row(row.messages, answers, row.metadata)


class _Scored(NamedTuple):
    row: Row
    response: Continuation
    score: float


def _scored(row: Row, column: str) -> _Scored:
    said = _response(row)
    if said is None:
        raise ValueError(f"has no answer, response or completion to score; {_columns(row)}")
    score = row.metadata.get(column)
    if isinstance(score, str):  # csv knows no numbers
        with suppress(ValueError):
            score = float(score)
    if isinstance(score, bool) or not isinstance(score, int | float):
        raise ValueError(
            f"has {shown(score)} for {column!r} (algorithm.pair_by), expected a number; "
            f"{_columns(row)}"
        )
    return _Scored(row, _continuation(said, "the response"), float(score))


def _paired(scored: Sequence[_Scored], column: str) -> tuple[list[Row], Counter[str]]:
    """Of each prompt the best response with the worst; ties and single ones are left out."""
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
            dropped["one response to the prompt"] += 1
        elif best.score == worst.score:
            dropped[f"equal {column}"] += 1
        elif best.response == worst.response:
            dropped[EQUAL] += 1
        else:
            rows.append(Row(best.row.messages, (best.response, worst.response), best.row.metadata))
    return rows, dropped


def _parsed(prompts: PromptSource, parse: Callable[[Row], T]) -> list[T]:
    source = getattr(prompts, "path", "the data set")
    parsed = []
    for index in range(len(prompts)):
        row = prompts.row(index)
        try:
            tools_of(row.metadata.get(TOOLS))
            parsed.append(parse(row))
        except (TypeError, ValueError) as error:
            raise PromptError(f"{source}, row {index} (from 0): {error}") from None
    return parsed


def _response(row: Row) -> Any:  # whatever the data set holds
    found = (row.metadata[name] for name in RESPONSES if row.metadata.get(name) is not None)
    return row.answer if row.answer is not None else next(found, None)


def _first_assistant(row: Row) -> int:
    for index, message in enumerate(row.messages):
        if message["role"] == "assistant":
            return index
    raise ValueError(
        f"has no assistant tokens, so there is nothing to learn; {_columns(row)}: give it an "
        "`answer` (or name the column with prompts.answer_column, a trainer's column_mapping), or "
        "a message of the role assistant"
    )


def _continuation(said: Any, what: str) -> tuple[Message, ...]:
    """The messages of an answer up to its last assistant turn."""
    if isinstance(said, str):
        if not said.strip():
            raise ValueError(f"has no assistant tokens: {what} is empty")
        return ({"role": "assistant", "content": said},)
    messages = parse_messages(said) if not isinstance(said, int | float | Mapping) else None
    if messages is None:
        raise ValueError(f"{what} is {shown(said)}: a text or a list of messages is expected")
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError(f"has no assistant tokens: {what} holds no message of the assistant")
    for first, second in pairwise(messages[: last + 1]):
        if first["role"] == second["role"] == "assistant":
            raise ValueError(f"{what} holds two assistant messages in a row: join them")
    return messages[: last + 1]


def _after(opening: Sequence[Message], said: Any) -> Any:
    """An answer without the prompt that some data sets repeat before it."""
    if isinstance(said, str) or not isinstance(said, Sequence) or len(said) <= len(opening):
        return said
    heard = [(m["role"], m["content"]) for m in opening]
    given = [(m.get("role"), m.get("content")) for m in said if isinstance(m, Mapping)]
    return said[len(opening) :] if given[: len(opening)] == heard else said


def _columns(row: Row) -> str:
    return f"its further columns are {', '.join(map(str, row.metadata)) or 'none'}"


def _no_pair(row: Row, missing: Sequence[str]) -> str:
    scores = [
        str(name)
        for name, value in row.metadata.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    ]
    text = f"has no {' and no '.join(missing)}; {_columns(row)}"
    if _response(row) is not None and scores:
        return (
            f"{text}. It looks like one scored response: set algorithm.pair_by to one of "
            f"{', '.join(scores)}, and the best response to each prompt is paired with the worst"
        )
    return f"{text}; a preference row is prompt, chosen and rejected"
