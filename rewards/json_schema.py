"""1 if the completion is JSON that fits a schema, else 0."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from jsonschema.exceptions import SchemaError
from jsonschema.validators import validator_for
from referencing import Registry

from retrain import RewardCalculator, Row, Trajectory

CHECKING = 5.0
"""Seconds that the schemas of all rows may be checked before the run."""


class JsonSchema(RewardCalculator):
    """1 if the completion is one JSON value that fits the schema, else 0.

    References to other documents are not loaded. Set `processes` if the schema contains a `pattern`
    that may backtrack for a long time.

    Args:
        schema: The schema, or a JSON file that contains it.
        column: The column of the row that contains the schema, as a mapping or as JSON.
        fenced: If the completion has a block between ``` fences, read the last one.
    """

    def __init__(
        self,
        schema: dict[str, Any] | str | None = None,
        column: str | None = None,
        fenced: bool = False,
        base_dir: Path = Path(),
    ) -> None:
        if (schema is None) == (column is None):
            raise ValueError("expected either schema or column")
        if isinstance(schema, str):
            file = next((f for f in (base_dir / schema, Path(schema)) if f.is_file()), None)
            if file is None:
                raise ValueError(f"schema: there is no file {schema} in {base_dir} or {Path.cwd()}")
            schema = json.loads(file.read_text(encoding="utf-8"))
        self.validator = None if schema is None else _validator(schema)
        self.column, self.fenced = column, fenced
        self.checking = CHECKING

    def check_row(self, row: Row) -> None:
        if self.column is None or self.checking < 0:
            return
        started = time.perf_counter()
        self.of_row(row.metadata)
        self.checking -= time.perf_counter() - started

    async def calculate(self, trajectory: Trajectory) -> float:
        validator = self.validator or self.of_row(trajectory.prompt.metadata)
        text = trajectory.completion
        try:
            value = json.loads(
                _last_block(text) if self.fenced else text, parse_constant=_no_constant
            )
            return float(validator.is_valid(value))
        except (ValueError, RecursionError, OverflowError):  # multipleOf, for 1e400
            return 0.0

    def of_row(self, row: Mapping[str, Any]) -> Any:
        if self.column is None or self.column not in row:
            names = ", ".join(row) or "none"
            raise ValueError(f"column `{self.column}` is missing; its columns are {names}")
        schema = row[self.column]
        try:
            return _read(schema if isinstance(schema, str) else json.dumps(schema, sort_keys=True))
        except TypeError:  # YAML has dates, and keys of several types
            return _validator(schema)


@lru_cache(maxsize=1024)
def _read(text: str) -> Any:
    """The validator of a schema in JSON; raises ValueError."""
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the schema {text[:100]!r} is not valid JSON: {error}") from None
    return _validator(schema)


def _validator(schema: Any) -> Any:
    if not isinstance(schema, dict | bool):
        raise ValueError(f"the schema is {str(schema)[:100]!r}, expected a mapping")
    kind: Any = validator_for(schema)
    try:
        kind.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"the schema is invalid at {error.json_path}: {error.message}") from None
    return kind(schema, registry=Registry())


def _last_block(text: str) -> str:
    """The content of the last closed block between fences, else the whole text."""
    blocks = text.split("```")  # those inside have odd numbers
    if len(blocks) < 3:
        return text
    block = blocks[(len(blocks) - 3) // 2 * 2 + 1]
    language, _, rest = block.partition("\n")
    return rest if language.strip().isalnum() or not language.strip() else block


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not valid JSON")
