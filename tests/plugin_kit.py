"""Finding plug-ins and putting runs together from them, or the error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.assembly import KINDS, Parts, assemble
from retrain.config import parse_config
from retrain.config.plugins import find_plugin
from retrain.errors import ConfigError, PluginError

ENVIRONMENT = """
from retrain import Environment
from .constants import WORD

class Mine(Environment):
    word = WORD
    def __init__(self, size: int, mode: str = "easy"):
        self.size = size
"""


def written(folder: Path) -> Path:
    """`folder`, with the environment in mine.py, which imports constants.py."""
    (folder / "mine.py").write_text(ENVIRONMENT)
    (folder / "constants.py").write_text("WORD = 'hello'")
    return folder


def found(kind: str, text: str, folder: Path) -> Any:
    return find_plugin(KINDS[kind], text, f"{kind}.type", folder)


def refusal(kind: str, text: str, folder: Path) -> str:
    with pytest.raises(PluginError) as caught:
        found(kind, text, folder)
    return str(caught.value)


def make(folder: Path, **sections: Any) -> Parts:
    rows = [{"prompt": "a", "answer": "a"}]
    base = {"prompts": rows, "environment": "echo", "rewards": "exact_match"}
    return assemble(parse_config({**base, **sections}, folder))


def problems(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(folder, **sections)
    return str(caught.value)
