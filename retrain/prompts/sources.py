"""Where prompts come from: a list, a file, or a Hugging Face data set.

- A row is a text, or `{prompt: text | messages: [...], answer: anything, ...}`; the rest is its
  metadata. Every row is checked when the source is made, so that a run can't meet a bad one later.
- The order of an epoch is a pure function of (seed, epoch): a resume needs no saved cursor but
  the ledger's.

A source of your own is a subclass with `__len__` and `row`; its constructor's arguments are its
keys in the YAML. `base_dir`, where a constructor asks for it, is the config file's folder.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from retrain.config.paths import broken_link, places
from retrain.errors import PromptError
from retrain.prompts.files import Format, Numbered, read_rows
from retrain.types import Message, Prompt, Ticket


class Row(NamedTuple):
    """What one row asks."""

    messages: Sequence[Message]
    answer: Any = None  # whatever the data set holds
    metadata: Mapping[str, Any] = {}


class PromptSource(ABC):
    """The prompts of a run, by their number."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def row(self, index: int) -> Row:
        """The row at `index`, the same at every call."""

    def prompt(self, ticket: Ticket) -> Prompt:
        """The prompt that the ticket names."""
        row = self.row(ticket.row)
        return Prompt(str(ticket), row.messages, row.answer, row.metadata)


def epoch_order(epoch: int, rows: int, seed: int, shuffle: bool) -> list[int]:
    """The rows in the order in which `epoch` issues them; the same for the same arguments."""
    order = list(range(rows))
    if shuffle:
        random.Random(f"{seed}:{epoch}").shuffle(order)
    return order


class ListPrompts(PromptSource):
    """Rows given as they are: `{type: list, rows: [...]}`.

    `system` is put before every prompt as a system message; `limit` takes the first rows alone.
    Raises PromptError naming the first bad row.
    """

    def __init__(
        self,
        rows: list[Any],
        prompt_column: str | None = None,
        answer_column: str | None = None,
        system: str | None = None,
        limit: int | None = None,
    ) -> None:
        numbered = [(f"row {index}", row) for index, row in enumerate(rows)]
        self._rows = _parsed(numbered, "the list", prompt_column, answer_column, system, limit)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> Row:
        return self._rows[index]


class FilePrompts(ListPrompts):
    """A file of rows: jsonl, json (a list), csv, txt (a prompt a line), or parquet.

    `path` is looked up in the config's folder, then in the working folder; `format` is told by
    its ending. Raises PromptError naming the file and the line.
    """

    def __init__(
        self,
        path: str,
        format: Format | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        system: str | None = None,
        limit: int | None = None,
        base_dir: Path | None = None,
    ) -> None:
        self.path = _found(path, base_dir)
        rows = read_rows(self.path, format)
        self._rows = _parsed(rows, str(self.path), prompt_column, answer_column, system, limit)


class DatasetPrompts(ListPrompts):
    """A Hugging Face data set: an id on the Hub, or a folder that `save_to_disk` wrote.

    Raises PromptError when it can't be loaded or lacks the columns.
    """

    def __init__(
        self,
        path: str,
        split: str = "train",
        name: str | None = None,
        prompt_column: str | None = None,
        answer_column: str | None = None,
        system: str | None = None,
        limit: int | None = None,
        base_dir: Path | None = None,
    ) -> None:
        data = _load_dataset(path, name, split, base_dir)
        if limit is not None:
            data = data.select(range(min(limit, len(data))))
        rows = [(f"row {index}", dict(row)) for index, row in enumerate(data)]
        self._rows = _parsed(
            rows, f"data set {path} ({split})", prompt_column, answer_column, system, limit
        )


def _parsed(
    rows: Sequence[Numbered],
    source: str,
    prompt_column: str | None,
    answer_column: str | None,
    system: str | None,
    limit: int | None,
) -> list[Row]:
    if limit is not None and limit < 1:
        raise PromptError(f"{source}: limit is {limit}, expected at least 1")
    taken = rows if limit is None else rows[:limit]
    if not taken:
        raise PromptError(f"{source} is empty: a run needs at least one prompt")
    parsed = []
    for where, raw in taken:
        try:
            row = parse_row(raw, prompt_column, answer_column)
        except ValueError as error:
            raise PromptError(f"{source}, {where}: {error}") from None
        if system is not None:
            first: Message = {"role": "system", "content": system}
            row = row._replace(messages=(first, *row.messages))
        parsed.append(row)
    return parsed


def parse_row(raw: Any, prompt_column: str | None = None, answer_column: str | None = None) -> Row:
    """One row of a data set. Raises ValueError saying what a row must be."""
    if isinstance(raw, str):
        return Row(_user(raw))
    if not isinstance(raw, Mapping):
        raise ValueError(
            f"a row is a text or a mapping with `prompt` or `messages`, got {type(raw).__name__}"
        )
    rest = dict(raw)
    if (
        prompt_column is None
        and rest.get("prompt") is not None
        and rest.get("messages") is not None
    ):
        raise ValueError("has both `prompt` and `messages`: keep one, or set prompt_column")
    column = prompt_column or ("prompt" if rest.get("prompt") is not None else "messages")
    if rest.get(column) is None:
        usual = (prompt_column,) if prompt_column else ("prompt", "messages")
        for name in usual:
            if name in rest:
                raise ValueError(f"its `{name}` is null, expected a text or a list of messages")
        raise ValueError(
            f"has no `{'` or `'.join(usual)}`; its columns are "
            f"{', '.join(map(str, rest)) or 'none'}; name the right one with "
            "prompt_column (in a trainer: column_mapping)"
        )
    if answer_column is not None and answer_column not in rest:
        raise ValueError(f"has no `{answer_column}`; its columns are {', '.join(map(str, rest))}")
    value = rest.pop(column)
    answer = rest.pop(answer_column or "answer", None)
    messages = _user(value) if isinstance(value, str) else parse_messages(value)
    return Row(messages, answer, rest)


def _user(text: str) -> tuple[Message, ...]:
    if not text.strip():
        raise ValueError("the prompt is empty")
    return ({"role": "user", "content": text},)


def parse_messages(value: Any) -> tuple[Message, ...]:
    """A list of messages of a data set. Raises ValueError saying what one must be."""
    if not isinstance(value, Sequence) or isinstance(value, bytes):
        raise ValueError(f"a prompt is a text or a list of messages, got {type(value).__name__}")
    if not value:
        raise ValueError("the list of messages is empty")
    for index, message in enumerate(value):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(f"message {index} must be a mapping with `role` and `content`")
        content = message.get("content")
        if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
            raise ValueError(
                f"message {index} has {type(content).__name__} for its content, expected a text"
            )
    plain = ({**message, "content": message.get("content") or ""} for message in value)
    return cast("tuple[Message, ...]", tuple(plain))


def load_dataset_rows(path: str, name: str | None, split: str) -> list[dict[str, Any]]:
    """All rows of a data set on the Hub or in a folder; raises PromptError when it can't be had."""
    return [dict(row) for row in _load_dataset(path, name, split, None)]


def _found(path: str, base_dir: Path | None) -> Path:
    tried = places(path, base_dir)
    for file in tried:
        if file.is_file():
            return file
    for file in tried:
        if file.is_dir():
            raise PromptError(f"{file} is a folder: expected a file of prompts")
        if told := broken_link(file):
            raise PromptError(told)
    raise PromptError(f"there is no prompt file {' nor '.join(map(str, tried))}")


def _load_dataset(path: str, name: str | None, split: str, base_dir: Path | None) -> Any:
    try:
        import datasets
    except ImportError:
        raise PromptError(
            f"data set {path}: needs the datasets library: pip install datasets"
        ) from None
    saved = next((folder for folder in places(path, base_dir) if folder.is_dir()), None)
    try:
        if saved is None or not _was_saved(saved):
            return datasets.load_dataset(str(saved or path), name, split=split)
        data = datasets.load_from_disk(str(saved))
        return data[split] if isinstance(data, datasets.DatasetDict) else data
    except Exception as error:
        raise PromptError(f"data set {path} ({split}): {type(error).__name__}: {error}") from error


def _was_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()
