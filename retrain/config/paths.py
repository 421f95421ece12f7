"""Where a path of the config is looked up: in the config's folder, then in the working folder."""

from __future__ import annotations

import os
from pathlib import Path


def broken_link(path: Path) -> str:
    """What is wrong with a link whose target isn't there, in a sentence; empty for all else."""
    if not path.is_symlink() or path.exists():
        return ""
    return f"{path} is a link to {os.readlink(path)}, which isn't there"


def places(text: str, base_dir: Path | None) -> list[Path]:
    """The paths that `text` may mean, each once; `~` is the home folder.

    What starts with `~` and names no user is a path like any other.
    """
    path = os.path.expanduser(text)  # Path's own raises where there is no such user
    return list(dict.fromkeys(folder / path for folder in (base_dir or Path(), Path.cwd())))
