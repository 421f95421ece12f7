"""A Hugging Face dataset."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from retrain.config.paths import places
from retrain.errors import PromptError, install_command
from retrain.prompts.base import PromptSource
from retrain.prompts.sequences import IteratedPrompts


class DatasetPrompts(PromptSource):
    """A Hugging Face dataset, from the Hub or from a folder: one that `save_to_disk` wrote, or one
    with parquet, jsonl or csv files.

    Args:
        path: The id on the Hub, or the folder.
        split: The split of the dataset, or a slice of it, such as train[:10%].
        config: The configuration of the dataset, if it has several.
        revision: The commit, tag or branch on the Hub.
        streaming: Download only the rows that are used; also set `limit`.

    Raises PromptError if the dataset can't be loaded.
    """

    read_at_start = True

    def __init__(
        self,
        path: str,
        split: str = "train",
        config: str | None = None,
        revision: str | None = None,
        streaming: bool = False,
        base_dir: Path | None = None,
    ) -> None:
        self.name = f"dataset {path} ({split})"
        keys = {"revision": revision, "streaming": streaming}
        self._data = load_dataset(path, config, split, base_dir, **keys)
        self._stream = IteratedPrompts(iter(self._data), self.name) if streaming else None

    def __len__(self) -> int:
        return len(self._data if self._stream is None else self._stream)

    def row(self, index: int) -> Any:  # checked by the caller
        return dict(self._data[index]) if self._stream is None else self._stream.row(index)

    def rows(self) -> Iterator[Any]:
        if self._stream is not None:
            yield from self._stream.rows()
            return
        for columns in self._data.iter(batch_size=1000):  # much faster than row by row
            yield from (dict(zip(columns, row, strict=True)) for row in zip(*columns.values()))  # noqa: B905


def load_dataset(
    path: str, config: str | None, split: str, base_dir: Path | None = None, **keys: Any
) -> Any:
    """A `datasets.Dataset` from the Hub or a folder; raises PromptError if it can't be loaded.

    `keys` are `revision` and `streaming`.
    """
    try:
        import datasets
    except ImportError:
        raise PromptError(
            f"dataset {path}: needs the library datasets, which is not installed: "
            f"{install_command('data')}"
        ) from None
    saved = next((folder for folder in places(path, base_dir) if folder.is_dir()), None)
    try:
        if saved is None or not _was_saved(saved):
            return datasets.load_dataset(str(saved or path), config, split=split, **keys)
        data = datasets.load_from_disk(str(saved))
        data = data[split] if isinstance(data, datasets.DatasetDict) else data
        return data.to_iterable_dataset() if keys.get("streaming") else data
    except Exception as error:
        raise PromptError(f"dataset {path} ({split}): {_why(error, saved)}") from error


def _was_saved(folder: Path) -> bool:
    return (folder / "dataset_info.json").exists() or (folder / "dataset_dict.json").exists()


def _why(error: Exception, saved: Path | None) -> str:
    """What went wrong, on one line."""
    text = " ".join(str(error).split())
    if saved is None and isinstance(error, ConnectionError | OSError):
        return (
            f"no such folder, and the Hub can't be reached ({type(error).__name__}: {text}); "
            "check the network, or download the dataset and give its folder"
        )
    return f"{type(error).__name__}: {text}"
