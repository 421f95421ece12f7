"""Configs in files, and the errors they end with."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.config import load_config
from retrain.errors import ConfigError

PROMPTS = {"type": "list", "rows": ["a"]}


def write(folder: Path, text: str) -> Path:
    path = folder / "task.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value)


def steady(completion: str) -> float:
    return 1.0
