"""A file of rows."""

from __future__ import annotations

from pathlib import Path

from retrain.config.paths import find_file
from retrain.errors import PromptError
from retrain.prompts.base import parse_rows
from retrain.prompts.files import Format, read_rows
from retrain.prompts.sources.list import ListPrompts


class FilePrompts(ListPrompts):
    """A file of rows: jsonl, json (a list), csv, txt (one prompt per line) or parquet.

    Args:
        path: The file, in the config's folder or else in the working folder.
        format: The format, if it can't be inferred from the file extension.

    Raises PromptError with the file and the line.
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
        self.path = find_file(path, base_dir, error=PromptError)
        rows = read_rows(self.path, format)
        self._rows = parse_rows(rows, str(self.path), prompt_column, answer_column, system, limit)
