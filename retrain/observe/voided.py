"""Move the lines that a resume voids out of a journal, into `voided/` beside it.

The lines are copied and synced before they are removed, so that a kill in between loses none; the
next resume then copies them again.
"""

from __future__ import annotations

import mmap
import os
import shutil
from itertools import count
from pathlib import Path

from retrain.errors import RunError
from retrain.supervision.disk import sync

VOIDED = "voided"
CHUNK = 1 << 20


def cut(path: Path, size: int) -> None:
    """Move what follows the first `size` bytes of `path` to `voided/NAME.N.jsonl`.

    N counts the cuts of this file, from 1. Keeps whole lines. Raises RunError when the disk fails.
    """
    try:
        start = _line_start(path, size)
        if start is None:
            return
        _keep(path, start)
        os.truncate(path, start)
        sync(path)
    except OSError as error:
        raise RunError(
            f"can't move the voided lines of {path}: {error.strerror or error}; free some space, "
            "then continue with --resume"
        ) from error


def _line_start(path: Path, size: int) -> int | None:
    """Where to cut: `size`, or the start of a line before it; None if nothing follows it."""
    if not path.exists() or path.stat().st_size <= size:
        return None
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return content.rfind(b"\n", 0, size) + 1  # a user may have removed a line


def _keep(path: Path, start: int) -> None:
    """Copy the end of `path` from `start` on."""
    folder = path.with_name(VOIDED)
    folder.mkdir(exist_ok=True)
    names = (folder / f"{path.stem}.{number}{path.suffix}" for number in count(1))
    temporary = folder / f".{path.name}.partial"
    with path.open("rb") as source, temporary.open("wb") as copy:
        source.seek(start)
        shutil.copyfileobj(source, copy, CHUNK)
    sync(temporary)
    temporary.rename(next(name for name in names if not name.exists()))
    sync(folder)
