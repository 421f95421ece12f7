"""`retrain`: RL post-training for language models as one asyncio program.

The public names load on first use: `import retrain` imports no torch, trl, transformers or
pydantic. `__init__.pyi` lists them, for type checkers and for this module.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HOME_OF = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""The module of each public name."""

__all__ = ["__version__", *sorted(_HOME_OF)]


def __getattr__(name: str) -> Any:  # any: whichever public name
    if name not in _HOME_OF:
        raise AttributeError(f"module 'retrain' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(str(_HOME_OF[name])), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
