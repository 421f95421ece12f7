"""The place of a process among those that train together, by the variables that torchrun defines.

https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables
`accelerate launch` sets the same on GPUs. Imports no torch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from retrain.errors import ConfigError
from retrain.supervision.children import is_of_ranks


@dataclass(frozen=True, slots=True)
class Place:
    """One process of `size`, and where its leader, rank 0, can be reached."""

    rank: int
    size: int
    local_rank: int
    """Its number on its machine, and the number of its CUDA device."""
    local_size: int
    address: str
    port: int
    spawned: bool = False
    """The leader started it, or itself leads such processes; no launcher did."""

    def variables(self) -> dict[str, str]:
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


_NAMES = tuple(Place(0, 1, 0, 1, "", 0).variables())
_here: Place | None = None  # what `as_place` has set


def launched(environment: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place as its launcher set it; None without a launcher, or with one process.

    Raises ConfigError if a variable is missing or wrong.
    """
    if _here is not None and environment is os.environ:
        return None if _here.spawned else _here
    if int(environment.get("WORLD_SIZE") or 1) == 1:
        return None
    missing = [name for name in _NAMES if not environment.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE is {environment['WORLD_SIZE']}, but {', '.join(missing)} is not set; "
            "start the run with torchrun, which sets all of them, or unset WORLD_SIZE"
        )
    return _place_of(environment)


def _place_of(environment: Mapping[str, str]) -> Place:
    rank, size, local_rank, local_size, address, port = (environment[name] for name in _NAMES)
    try:
        found = Place(int(rank), int(size), int(local_rank), int(local_size), address, int(port))
    except ValueError as error:
        raise ConfigError(
            f"the variables {', '.join(_NAMES)} of the launcher must be integers, except "
            f"MASTER_ADDR: {error}"
        ) from error
    if found.port == 0:
        raise ConfigError(
            "MASTER_PORT is 0, on which the ranks can't find each other; start the run with "
            "`torchrun --standalone`, or pass --master-port with a free port"
        )
    return found


@contextmanager
def as_place(place: Place) -> Iterator[None]:
    """Set the variables meanwhile, for libraries that read them.

    Restores them afterwards, with those that accelerate sets by itself.
    """
    global _here
    before, outer = dict(os.environ), _here
    _here = place
    os.environ.update(place.variables())
    try:
        yield
    finally:
        for name in filter(is_of_ranks, list(os.environ)):
            if name in before:
                os.environ[name] = before[name]
            else:
                del os.environ[name]
        _here = outer


def ignore_signals() -> None:
    """For a follower: rank 0 decides what Ctrl-C and SIGTERM do, and its end ends the others."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
