"""Files of rows."""

from __future__ import annotations

import glob
import os
from array import array
from collections.abc import Iterator
from itertools import accumulate, chain
from pathlib import Path
from typing import Any

from retrain.config.paths import find_file, places
from retrain.errors import PromptError
from retrain.prompts.base import PromptSource
from retrain.prompts.files import FORMATS, Format, place_in, table_of


class FilePrompts(PromptSource):
    """A file of rows, or several: jsonl, json (a list), csv, txt (one prompt per line) or parquet.

    Args:
        path: The file, in the config's folder or in the working folder. A pattern such as
            data/*.jsonl stands for all files that match, in the order of their names.
        format: The format, if it can't be inferred from the file extension.

    Raises PromptError with the file and the line.
    """

    read_at_start = True

    def __init__(
        self, path: str, format: Format | None = None, base_dir: Path | None = None
    ) -> None:
        self._tables = [table_of(file, format) for file in _files(path, base_dir)]
        self._starts = array("Q", accumulate(map(len, self._tables), initial=0))
        self.name = path if len(self._tables) > 1 else str(self._tables[0].path)

    def __len__(self) -> int:
        return self._starts[-1]

    def row(self, index: int) -> Any:  # checked by the caller
        number, within = place_in(self._starts, index)
        return self._tables[number][within]

    def rows(self) -> Iterator[Any]:
        return chain.from_iterable(self._tables)

    def location(self, index: int) -> str:
        number, within = place_in(self._starts, index)
        where = self._tables[number].location(within)
        return f"{self._tables[number].path.name}, {where}" if len(self._tables) > 1 else where


def _files(path: str, base_dir: Path | None) -> list[Path]:
    """The file, or the files that match a pattern."""
    tried = places(path, base_dir)
    if not glob.has_magic(path) or any(map(os.path.isfile, tried)):
        for folder in filter(Path.is_dir, tried):
            ends = sorted(FORMATS.keys() & {file.suffix for file in folder.iterdir()})
            raise PromptError(
                f"{folder} is a folder, expected a file, or a pattern such as "
                f"{path.rstrip('/')}/*{[*ends, '.jsonl'][0]}"
            )
        return [find_file(path, base_dir, error=PromptError)]
    for pattern in tried:
        if found := sorted(filter(os.path.isfile, glob.glob(str(pattern), recursive=True))):
            return list(map(Path, found))
    raise PromptError(f"no file matches {' or '.join(map(str, tried))}")
