"""The rows that a run asks or trains on: sources, files, examples."""

from retrain.prompts.sources import (
    DatasetPrompts,
    FilePrompts,
    ListPrompts,
    PromptSource,
    Row,
    epoch_order,
    load_dataset_rows,
    parse_messages,
)

__all__ = [
    "DatasetPrompts",
    "FilePrompts",
    "ListPrompts",
    "PromptSource",
    "Row",
    "epoch_order",
    "load_dataset_rows",
    "parse_messages",
]
