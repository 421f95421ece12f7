"""A Hugging Face data set."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.config.paths import places
from retrain.errors import PromptError
from retrain.prompts.base import parse_rows
from retrain.prompts.sources.list import ListPrompts


class DatasetPrompts(ListPrompts):
    """A Hugging Face data set, from the Hub or from a folder written by `save_to_disk`.

    Args:
        path: The id on the Hub, or the folder.
        split: The split of the data set.
        name: The configuration of the data set, if it has several.

    Raises PromptError if the data set can't be loaded or lacks the columns.
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
        data = load_dataset(path, name, split, base_dir)
        if limit is not None:
            data = data.select(range(min(limit, len(data))))
        rows = [(f"row {index}", dict(row)) for index, row in enumerate(data)]
        source = f"data set {path} ({split})"
        self._rows = parse_rows(rows, source, prompt_column, answer_column, system, limit)


def load_dataset(path: str, name: str | None, split: str, base_dir: Path | None = None) -> Any:
    """A `datasets.Dataset` from the Hub or a folder; raises PromptError if it can't be loaded."""
    try:
        import datasets
    except ImportError:
        raise PromptError(
            f"data set {path}: needs the library datasets, which is not installed: "
            "pip install datasets"
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
