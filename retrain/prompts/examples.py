"""Rows that are trained on directly: demonstrations, and pairs of answers.

Both sources convert a row to one form: `messages` is the opening, and `answer` a list of
continuations, one for a demonstration and (chosen, rejected) for a pair. A continuation is a list
of messages; only its assistant messages are trained. A row's `tools` are offered to the model like
an environment's. All rows are checked when the source is made, before any model loads; what is kept
is the index of each row, not the row.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import pairwise
from operator import itemgetter
from typing import Any, NamedTuple, Self, TypeVar

from retrain.chat.tools import tools_of
from retrain.errors import PromptError, shown
from retrain.prompts.base import PromptSource, RowShape, parse_messages
from retrain.prompts.preparing import PreparedPrompts
from retrain.types import Message, Row

T = TypeVar("T")
Continuation = Sequence[Message]
RESPONSES = ("response", "completion")
"""Columns of the answer if there is no `answer`."""
TOOLS = "tools"
"""The column of the tools."""
EQUAL = "chosen equals rejected"


class _Examples(PreparedPrompts):
    """Some rows of a source in one form: each is made when it is needed, and not kept."""

    def __init__(
        self,
        source: PromptSource,
        kept: Sequence[int],
        made: Callable[[int], Row],
        dropped: Mapping[str, int],
    ) -> None:
        """`made` makes the row at an index of `kept`, which has the places in the source."""
        super().__init__(source, RowShape(), kept)
        self._made, self.read_at_start = made, True
        self.dropped = dropped
        """The number of dropped rows or prompts per reason."""

    def checked_row(self, index: int) -> Row:
        return self._made(index)

    row = checked_row


class Demonstrations(_Examples):
    """Conversations to imitate; see `demonstration` for the columns."""

    @classmethod
    def of(cls, prompts: PromptSource) -> Self:
        """The demonstrations in `prompts`; raises PromptError for the first invalid row."""
        if isinstance(prompts, cls):
            return prompts
        made, kept = partial(_parsed, prompts, demonstration), range(len(prompts))
        for index in kept:
            made(index)
        return cls(prompts, kept, made, {})


class Pairs(_Examples):
    """A chosen and a rejected answer per prompt; pairs of equal answers are dropped and counted."""

    @classmethod
    def of(cls, prompts: PromptSource, pair_by: str | None = None) -> Self:
        """The pairs in `prompts`: its rows, or with `pair_by` made of its scored responses.

        Raises PromptError for the first invalid row, or if no pair remains.
        """
        if isinstance(prompts, cls):
            return prompts
        kept, made, dropped = _paired(prompts, pair_by) if pair_by else _differing(prompts)
        if not kept:
            reasons = ", ".join(f"{count} x {why}" for why, count in dropped.items())
            raise PromptError(f"no pair in {len(prompts)} rows: {reasons}")
        return cls(prompts, kept, made, dropped)


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


_Found = tuple[Sequence[int], Callable[[int], Row], Counter[str]]


def _differing(prompts: PromptSource) -> _Found:
    """The rows whose answers differ."""
    kept = array("Q")
    for index in range(len(prompts)):
        chosen, rejected = _parsed(prompts, pair, index).answer
        if chosen != rejected:
            kept.append(index)
    dropped = +Counter({EQUAL: len(prompts) - len(kept)})
    return kept, lambda number: _parsed(prompts, pair, kept[number]), dropped


class _Ends(NamedTuple):
    """The number of responses to a prompt, and the index and score of two of them."""

    number: int
    best: tuple[int, float]
    worst: tuple[int, float]


def _paired(prompts: PromptSource, column: str) -> _Found:
    """The best and the worst response to each prompt; ties and single responses are dropped."""
    scored = partial(_parsed, prompts, lambda row: _scored(row, column))
    ends: dict[bytes, _Ends] = {}
    for index in range(len(prompts)):
        row, _, score = scored(index)
        said = repr([(m["role"], m["content"]) for m in row.messages])
        key = hashlib.blake2b(said.encode(errors="replace"), digest_size=16).digest()
        one = index, score
        count, best, worst = ends.get(key, _Ends(0, one, one))
        best, worst = max(best, one, key=itemgetter(1)), min(worst, one, key=itemgetter(1))
        ends[key] = _Ends(count + 1, best, worst)
    kept, others = array("Q"), array("Q")
    dropped: Counter[str] = Counter()
    for count, (best_index, high), (worst_index, low) in ends.values():
        if count == 1:
            dropped["only one response to the prompt"] += 1
        elif high == low:
            dropped[f"equal {column}"] += 1
        elif scored(best_index).response == scored(worst_index).response:
            dropped[EQUAL] += 1
        else:
            kept.append(best_index)
            others.append(worst_index)

    def made(number: int) -> Row:
        best, worst = scored(kept[number]), scored(others[number])
        return Row(best.row.messages, (best.response, worst.response), best.row.metadata)

    return kept, made, dropped


def _parsed(prompts: PromptSource, parse: Callable[[Row], T], index: int) -> T:
    row = prompts.checked_row(index)
    try:
        tools_of(row.metadata.get(TOOLS))
        return parse(row)
    except (TypeError, ValueError) as error:
        raise PromptError(f"{prompts.place(index)}: {error}") from None


def _response(row: Row) -> Any:  # whatever the dataset holds
    found = (row.metadata[name] for name in RESPONSES if row.metadata.get(name) is not None)
    return row.answer if row.answer is not None else next(found, None)


def _continuation(said: Any, what: str) -> tuple[Message, ...]:
    """The messages of an answer up to its last assistant turn."""
    if isinstance(said, str):
        if not said.strip():
            raise ValueError(f"has no assistant tokens: {what} is empty")
        return ({"role": "assistant", "content": said},)
    messages = parse_messages(said, what)
    last = max((i for i, m in enumerate(messages) if m["role"] == "assistant"), default=-1)
    if last < 0:
        raise ValueError(f"has no assistant tokens: {what} contains no assistant message")
    for first, second in pairwise(messages[: last + 1]):
        if first["role"] == second["role"] == "assistant":
            raise ValueError(f"{what} contains two assistant messages in a row: join them")
    return messages[: last + 1]


def _after(opening: Sequence[Message], said: Any) -> Any:
    """An answer without the prompt, which some datasets repeat before it."""
    if isinstance(said, str) or not isinstance(said, Sequence) or len(said) <= len(opening):
        return said
    heard = [(m["role"], m["content"]) for m in opening]
    given = [(m.get("role"), m.get("content")) for m in said if isinstance(m, Mapping)]
    return said[len(opening) :] if given[: len(opening)] == heard else said


def _columns(row: Row) -> str:
    return f"its other columns are {', '.join(map(str, row.metadata)) or 'none'}"
