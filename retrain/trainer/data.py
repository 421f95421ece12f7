"""A trainer's dataset as prompts: a path, a Hub id, a list, a table or a DataModule.

Everything is read and checked before a model loads. A prompt's metadata has the other columns of
its row, and those that were renamed, for reward functions and environments that ask for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from retrain.config import Section
from retrain.errors import NotFoundError, PromptError
from retrain.prompts import PromptSource, load_dataset
from retrain.prompts.files import FORMATS, table_of
from retrain.prompts.preparing import prepared
from retrain.prompts.sequences import SequencePrompts
from retrain.trainer.columns import HELPSTEER, Wanted, mapping_of, renamed
from retrain.types import Prompt, Trajectory


class DataOptions(Section):
    """How a dataset is read."""

    split: str = "train"
    name: str | None = None
    """The configuration of a dataset on the Hub."""
    column_mapping: dict[str, str] = Field(default_factory=dict)
    """From the dataset's columns to ours: prompt, messages, answer, response, chosen, rejected."""


@dataclass(frozen=True, slots=True)
class Data:
    """A dataset that was read."""

    prompts: PromptSource
    label: Mapping[str, Any]
    """The config's `prompts:`. Its digest differs for a dataset with other rows."""
    eval_prompts: PromptSource | None = None
    pair_by: str | None = None
    """The score to pair by, for a known dataset of scored responses without pairs."""
    close: Callable[[], None] = lambda: None
    """Call it when training ends."""


def row_of(prompt: Prompt) -> dict[str, Any]:
    """What reward functions and environments get: the row, and its prompt and answer as such."""
    messages = list(prompt.messages)
    ours = {"prompt": prompt.text, "messages": messages, "answer": prompt.answer}
    return {**ours, **prompt.metadata}


def response_of(trajectory: Trajectory) -> str:
    """What reward functions get as the response: the last turn, with its reasoning."""
    if trajectory.result is not None or not trajectory.turns:
        return trajectory.completion
    return trajectory.turns[-1].completion.text


def read_data(dataset: Any, wanted: Wanted, options: DataOptions) -> Data:
    """Read the dataset that a trainer was given.

    Raises PromptError when it has no rows or lacks a column, NotFoundError for a missing path,
    TypeError for any other object.
    """
    if isinstance(dataset, PromptSource):
        label = {"type": "given", "source": type(dataset).__name__, "rows": len(dataset)}
        return Data(dataset, label)
    if callable(getattr(dataset, "train_dataloader", None)):
        return _of_module(dataset, wanted, options)
    source, rows = _rows(dataset, options)
    return _data(source, rows, wanted, options)


def _data(source: str, rows: Sequence[Any], wanted: Wanted, options: DataOptions) -> Data:
    if not rows:
        raise PromptError(f"{source} is empty, expected at least one row")
    columns = list(map(str, rows[0])) if isinstance(rows[0], Mapping) else []
    mapping = mapping_of(columns, wanted, options.column_mapping, source) if columns else {}
    prompts = prepared(SequencePrompts([renamed(row, mapping) for row in rows], source))
    label = {
        "type": "given",
        "source": source,
        "rows": len(prompts),
        "digest": _digest([prompts.row(index) for index in range(len(prompts))]),
    }
    scored = wanted == "pairs" and set(columns) >= HELPSTEER and "chosen" not in columns
    return Data(prompts, label, pair_by="helpfulness" if scored else None)


def _rows(dataset: Any, options: DataOptions) -> tuple[str, Sequence[Any]]:
    """The name of the dataset in messages, and its rows."""
    if isinstance(dataset, str | Path):
        return str(dataset), _named(str(dataset), options)
    if hasattr(dataset, "iterrows"):  # a pandas.DataFrame
        return "the DataFrame given as dataset", dataset.to_dict("records")
    rows = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    if not rows or isinstance(dataset, Mapping):
        raise TypeError(
            f"dataset: got {type(dataset).__name__}, expected a path, a Hub id, a list of rows, a "
            "DataFrame, a datasets.Dataset or a DataModule; rows are read more than once, so pass "
            "list(generator) instead of a generator"
        )
    kind = "list" if isinstance(dataset, list | tuple) else type(dataset).__name__
    return f"the {kind} given as dataset", [dataset[index] for index in range(len(dataset))]


def _named(name: str, options: DataOptions) -> Sequence[Any]:
    if not name.strip():
        raise PromptError("dataset: got an empty string, expected a path or a Hub id")
    path = Path(name).expanduser()
    if path.is_file():
        return list(table_of(path))
    if not path.is_dir() and _looks_like_a_path(name):
        raise NotFoundError(f"dataset: no file or folder {path}")
    return [dict(row) for row in load_dataset(name, options.name, options.split)]


def _looks_like_a_path(name: str) -> bool:
    return (
        name.startswith(("/", "./", "../", "~"))
        or name.count("/") > 1
        or Path(name).suffix.lower() in FORMATS
    )


def _of_module(module: Any, wanted: Wanted, options: DataOptions) -> Data:
    """Read a DataModule: its loaders are read once, and the pipe orders the rows."""
    if callable(getattr(module, "setup", None)):
        module.setup("fit")
    name = type(module).__name__
    data = _data(f"{name}.train_dataloader()", list(_loaded(module, "train")), wanted, options)
    if held_out := list(_loaded(module, "val")):
        evaluated = _data(f"{name}.val_dataloader()", held_out, wanted, options).prompts
        data = replace(data, eval_prompts=evaluated)
    if callable(teardown := getattr(module, "teardown", None)):
        data = replace(data, close=lambda: teardown("fit"))
    return data


def _loaded(module: Any, stage: str) -> Iterator[Any]:
    make = getattr(module, f"{stage}_dataloader", None)
    loader = make() if callable(make) else None
    for item in () if loader is None else loader:
        if isinstance(item, Mapping) and _is_columnar(item):
            yield from (
                dict(zip(item, row, strict=True)) for row in zip(*item.values(), strict=True)
            )
        elif isinstance(item, list | tuple):
            yield from item
        else:
            yield item


def _is_columnar(batch: Mapping[str, Any]) -> bool:
    """Whether a batch is {column: [one value per row]}, as torch's default collation makes it."""
    columns = list(batch.values())
    return bool(columns) and all(
        hasattr(column, "__len__")
        and not isinstance(column, str | Mapping)
        and len(column) == len(columns[0])
        and not (len(column) and isinstance(column[0], Mapping) and "role" in column[0])
        for column in columns
    )


def _digest(rows: Sequence[Any]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for row in rows:
        digest.update(json.dumps(row, default=repr, sort_keys=True).encode())
    return digest.hexdigest()
