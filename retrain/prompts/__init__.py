"""The rows that a run prompts with or trains on: sources, files, examples."""

from retrain.prompts.base import MIXTURE, Origin, PromptSource, epoch_order
from retrain.prompts.sources.file import FilePrompts
from retrain.prompts.sources.hf import DatasetPrompts, load_dataset
from retrain.prompts.sources.list import ListPrompts
from retrain.types import Row

__all__ = [
    "MIXTURE",
    "DatasetPrompts",
    "FilePrompts",
    "ListPrompts",
    "Origin",
    "PromptSource",
    "Row",
    "epoch_order",
    "load_dataset",
]
