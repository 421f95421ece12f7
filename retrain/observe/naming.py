"""The directories of runs without a given one: runs/NAME, runs/NAME-2, ...

Creating the directory claims it, so that two runs that start at the same moment get two.
"""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import count
from pathlib import Path

from retrain.config import RunConfig
from retrain.observe.run_dir import EVENTS, read_config, unwritable


def wanted_folder(config: RunConfig) -> Path:
    """The run directory of `config`, without a number."""
    return config.run_dir or Path("runs") / (config.name or "run")


def unused_folder(config: RunConfig) -> Path:
    """The run directory of a new run: the given one if it has no run, else a new one.

    A new one is created, with the number after the last one of this name. Raises ConfigError if
    that fails.
    """
    wanted = wanted_folder(config)
    if config.run_dir is not None and not (wanted / EVENTS).exists():
        return wanted
    first = max(_numbered(wanted, config.name), default=0) + 1
    for number in count(first):
        folder = wanted if number == 1 else wanted.with_name(f"{wanted.name}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError as error:
            raise unwritable(folder.absolute(), error) from error
        return folder
    raise AssertionError("count() ends")


def last_folder(config: RunConfig) -> Path | None:
    """The last directory of this name that has a run; if any has checkpoints, the last of these."""
    found = _numbered(wanted_folder(config), config.name)
    runs = {number for number, folder in found.items() if (folder / EVENTS).exists()}
    saved = {number for number in runs if any(found[number].glob("checkpoints/step_*"))}
    return found[max(saved or runs)] if runs else None


def unclaim(folder: Path) -> None:
    """Remove a directory that was claimed, if it is empty: the run has not begun."""
    with suppress(OSError):
        folder.rmdir()


def _numbered(wanted: Path, name: str | None) -> dict[int, Path]:
    """The existing directories by number, without those of runs that have another name.

    `runs/llama-8` may be the eighth run of `llama`, or the first one of `llama-8`.
    """
    found = {1: wanted} if wanted.is_dir() else {}
    for folder in wanted.parent.glob("*-*"):
        number = re.fullmatch(re.escape(wanted.name) + r"-([1-9][0-9]{0,8})", folder.name)
        if number and folder.is_dir() and _name(folder, name) == name:
            found[int(number[1])] = folder
    return found


def _name(folder: Path, default: str | None) -> str | None:
    """The name of the run in `folder`; `default` if it can't be read."""
    name: str | None = read_config(folder)[0].get("name", default)
    return name
