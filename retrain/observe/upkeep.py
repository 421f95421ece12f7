"""Keep a run directory in order: temporary files of killed processes, and what must be durable."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

SCRATCH = ".scratch-"
"""Prefix of the temporary folders of a run, in its directory."""
LEFTOVERS = (
    "*.tmp",
    f"{SCRATCH}*",
    "checkpoints/.step_*.partial",
    "checkpoints/.best",
    "voided/.*.partial",
)
"""Temporary files, which a process that is killed leaves."""


def sweep(folder: Path, patterns: Iterable[str] = LEFTOVERS) -> None:
    """Remove what matches `patterns` below `folder`, as far as possible."""
    for pattern in patterns:
        for path in list(folder.glob(pattern)):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                with suppress(OSError):
                    path.unlink()


def scratch(run_dir: Path | None) -> tempfile.TemporaryDirectory[str]:
    """A temporary folder in the run directory, which the next start removes after a kill.

    Without a run directory it is in the system's folder for temporary files.
    """
    place = run_dir if run_dir is not None and run_dir.is_dir() else None
    return tempfile.TemporaryDirectory(prefix=SCRATCH, dir=place)
