"""What a prompt source is, and what one of its rows must be.

- A row is a string, or `{prompt: text | messages: [...], answer: anything, ...}`; its other columns
  are the metadata. All rows are checked when the source is made, before a run can meet a bad one.
- The order of an epoch is a pure function of (seed, epoch): a resume needs no cursor but the
  ledger's.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.chat.messages import checked_messages
from retrain.environment import Environment
from retrain.errors import PromptError, blame, shown
from retrain.types import Message, Prompt, Row, Ticket

Raw = Any  # a string, a mapping or a Row, or a user's mistake
MIXTURE = "mixture"
"""The column of the metadata with the name of a row's source in a mixture."""
HASHED = 16
"""The approximate number of rows in the hash by which a resume finds that a source has changed."""


class EmptyPromptError(ValueError):
    """The prompt of a row is empty: such a row is skipped."""


@dataclass(frozen=True)
class Origin:
    """What a source is made for: an argument called `origin` of its constructor receives it."""

    where: str
    """The dotted path of its section, for messages."""
    base_dir: Path
    """The config file's folder."""
    environment: Callable[[], Environment]
    """Makes an instance of the run's environment; raises ConfigError if that fails."""
    held_out: Callable[[], PromptSource | None] = lambda: None
    """The rows that `prompts.held_out` holds out of training; only for evaluations."""


class PromptSource(ABC):
    """The prompts of a run, by index. Subclass it to write your own source.

    The constructor's arguments are the source's keys in the YAML. An argument called `base_dir`
    receives the config file's folder.
    """

    name = ""
    """What to call it in messages."""
    opened = False
    """Whether the environment writes the first messages, so that a row needs no prompt."""
    read_at_start = False
    """Whether to read and check all rows at the start, instead of the first and the last one."""
    warnings: Sequence[str] = ()
    """What was found when all rows were checked."""
    sizes: Sequence[int] = ()
    """The bytes of each row's messages, if all were read."""
    held_out: PromptSource | None = None
    """The rows that `prompts.held_out` holds out of training."""
    mixed: Sequence[str] = ()
    """The names of the sources of a mixture, which its rows have in the column MIXTURE."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row | Mapping[str, Any] | str:
        """The row at `index`, the same one at every call.

        A Row, or what a row of a dataset may be: a string, or a mapping with `prompt` or
        `messages`.
        """

    def rows(self) -> Iterator[Row | Mapping[str, Any] | str]:
        """All rows in their order; override it if that is faster than by `row`."""
        return map(self.row, range(len(self)))

    def order(self, epoch: int, seed: int, shuffle: bool) -> Sequence[int]:
        """The rows of an epoch in the order in which they are issued, each at most once.

        The same for the same arguments, so that a resumed run continues in the same order. If there
        are many rows, a thread calls it.
        """
        return epoch_order(epoch, len(self), seed, shuffle)

    @property
    def epoch_length(self) -> int:
        """The number of rows in each `order`."""
        return len(self)

    def each(self, change: Callable[[PromptSource], PromptSource]) -> PromptSource:
        """The changed source; a mixture changes each of its sources."""
        return change(self)

    def first_rows(self, count: int) -> Sequence[int]:
        """The first `count` rows; of a mixture at least one of each source."""
        return range(min(count, len(self)))

    def location(self, index: int) -> str:
        """Where a row is in the source, such as "line 3"."""
        return f"row {index}"

    def place(self, index: int) -> str:
        """What to call a row in messages."""
        if not self.name:
            return f"{type(self).__name__}.row({index})"
        return f"{self.name}, {self.location(index)}"

    def checked_row(self, index: int) -> Row:
        """What `row` returns, as a Row. Raises PromptError for anything else."""
        try:
            row = self.row(index)
        except (Exception, SystemExit) as error:
            raise PromptError(str(blame(self.place(index), error))) from error
        try:
            return as_row(row, opened=self.opened)
        except ValueError as error:
            raise PromptError(f"{self.place(index)}: {error}") from None

    def rows_hash(self) -> str:
        """A hash of rows in equal distances: of the first and the last one if the others are not
        read at the start."""
        found, count = hashlib.sha256(), len(self)
        distance = count // HASHED if self.read_at_start else count - 1
        for index in range(0, count, max(1, distance)):
            row = self.checked_row(index)
            parts = [(message["role"], message["content"]) for message in row.messages]
            found.update(repr((parts, row.answer)).encode(errors="replace"))
        return found.hexdigest()

    def prompt(self, ticket: Ticket, seed: int = 0) -> Prompt:
        """The prompt of a ticket in a run with this seed. Raises PromptError for an invalid row.

        Its own seed doesn't depend on the attempt: a prompt that is issued again is the same task.
        """
        row = self.checked_row(ticket.row)
        key = f"{seed}/{ticket.epoch}.{ticket.row}"
        digest = hashlib.blake2b(key.encode(), digest_size=4).digest()
        own = int.from_bytes(digest, "big") & 0x7FFFFFFF
        return Prompt(str(ticket), row.messages, row.answer, row.metadata, own, 0, row.plain)


def epoch_order(epoch: int, rows: int, seed: int, shuffle: bool) -> Sequence[int]:
    """The rows in the order of `epoch`; the same for the same arguments."""
    if not shuffle:
        return range(rows)
    order = numbers(0, rows)
    random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


def numbers(start: int, stop: int) -> array[int]:
    """The integers of a range, in 8 bytes each. In a thread it lets others run meanwhile."""
    made = array("Q")
    for first in range(start, stop, 2**16):  # each call holds the interpreter's lock
        made.extend(range(first, min(first + 2**16, stop)))
    return made


def as_row(raw: Any, *, opened: bool = False) -> Row:
    """A Row, from one or from what a row of a dataset may be; see `PromptSource.opened`.

    Raises ValueError that says what was expected.
    """
    if not isinstance(raw, Row):
        if opened and isinstance(raw, Mapping) and not raw.keys() & {"prompt", "messages"}:
            rest = dict(raw)
            return Row((), rest.pop("answer", None), rest)
        return parse_row(raw)
    if not isinstance(raw.metadata, Mapping):
        raise ValueError(f"metadata is {type(raw.metadata).__name__}, expected a mapping")
    if opened and not raw.messages:
        return raw
    return raw._replace(messages=parse_messages(raw.messages))


def parse_row(raw: Any, prompt_column: str | None = None, answer_column: str | None = None) -> Row:
    """One row of a dataset. Raises ValueError that says what was expected."""
    if isinstance(raw, str):
        return Row(_user(raw), plain=True)
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"got {type(raw).__name__}, expected a string, or a mapping with `prompt` or `messages`"
        )
    column = _prompt_column(raw, prompt_column)
    if answer_column is not None and answer_column not in raw:
        raise ValueError(f"column `{answer_column}` is missing; its columns are {_columns(raw)}")
    rest = dict(raw)
    value = rest.pop(column)
    answer = rest.pop(answer_column or "answer", None)
    if isinstance(value, str):
        return Row(_user(value), answer, rest, plain=True)
    return Row(parse_messages(value, column), answer, rest)


def parse_messages(value: Any, what: str = "messages") -> tuple[Message, ...]:
    """A list of messages of a dataset. Raises ValueError that says what was expected."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{what}: got {shown(value)}, expected a string or a list of messages")
    if not value:
        raise EmptyPromptError(f"{what} is an empty list")
    try:
        return tuple(checked_messages(value, what))
    except TypeError as error:
        raise ValueError(str(error)) from None


def _user(text: str) -> tuple[Message, ...]:
    if not text.strip():
        raise EmptyPromptError("the prompt is empty")
    return ({"role": "user", "content": text},)


def _prompt_column(row: Mapping[str, Any], wanted: str | None) -> str:
    usual = (wanted,) if wanted else ("prompt", "messages")
    present = [name for name in usual if row.get(name) is not None]
    if len(present) == 1:
        return present[0]
    if present:
        raise ValueError("has both `prompt` and `messages`: remove one, or set prompt_column")
    for name in usual:
        if name in row:
            raise EmptyPromptError(f"`{name}` is null, expected a string or a list of messages")
    raise ValueError(
        f"column `{'` or `'.join(usual)}` is missing; its columns are {_columns(row)}; name the "
        "right one with prompt_column (in a trainer: column_mapping)"
    )


def _columns(row: Mapping[str, Any]) -> str:
    return ", ".join(map(str, row)) or "none"


class RowShape:
    """What the keys of a source choose and change: here nothing. `shaping` has the others."""

    plain = True
    """Whether a row is used as it is, so that `quick_size` can check it."""

    def keeps(self, raw: Raw) -> bool:
        """Whether the row is used."""
        return True

    def changed(self, raw: Raw) -> Raw:
        """What a key makes of the row."""
        return raw

    def row(self, raw: Raw) -> Row:
        """The Row of a changed row. Raises ValueError that says what was expected."""
        return as_row(raw)

    def filtered_values(self, raws: Iterable[Raw]) -> str:
        """For a message: some values of the columns that a filter reads."""
        return ""
