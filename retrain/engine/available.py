"""The CUDA devices of this machine, and how much memory is free: on them, and in RAM.

Imports no torch, which would take seconds: cards are those that `nvidia-smi` lists. The exception
is `cuda_devices`, where torch has the last word.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

QUERY = ("--query-gpu=name,memory.free", "--format=csv,noheader,nounits")
SECONDS = 10.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device."""

    name: str
    free: int
    """Bytes."""


def cards() -> list[Card]:
    """The CUDA cards that torch can use.

    Empty if torch is not built for CUDA, or `nvidia-smi` is missing or fails, as it does for a MIG
    device: its card's free memory is not its own.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen == "" or not _built_for_cuda():
        return []
    rows = [line.rpartition(", ") for line in _listed(*(["-i", chosen] if chosen else []))]
    return [Card(name, int(free) * MIB) for name, _, free in rows if free.isdigit()]


def present_devices() -> int | None:
    """How many cards the machine has, whatever CUDA_VISIBLE_DEVICES says; None if unknown."""
    return len(_listed()) or None


def cuda_devices() -> int:
    """How many CUDA devices torch can use; imports torch if it is built for CUDA."""
    if not _built_for_cuda():
        return 0
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def too_few_devices(key: str, processes: int) -> str | None:
    """Why that many processes of this machine can't each have a CUDA device; `key` says so."""
    found = cuda_devices()
    if processes <= found:
        return None
    return (
        f"{key}: got {processes} on this machine, but torch finds {found} CUDA "
        f"device{'' if found == 1 else 's'}, of which each process needs its own; lower it, or "
        "train on the CPU"
    )


def ram(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes of RAM that this process may still use; None where Linux's files are missing.

    It is the least of what the machine has available and of what each control group of the process
    leaves under its limit. File caches count as free.
    """
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", (proc / "meminfo").read_text(), re.M)
    except OSError:
        return None
    if found is None:
        return None
    left, own = [int(found[1]) * 1024], proc / "self" / "cgroup"
    lines = own.read_text().splitlines() if own.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers == "":  # version 2
            left += _left(groups, path, "memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            left += _left(groups / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes")
    return min(left)


def _left(root: Path, path: str, limit: str, usage: str) -> Iterator[int]:
    """Bytes under the limit of a control group and of each that contains it."""
    folder = root / path.lstrip("/")
    for group in (folder, *folder.parents):
        with suppress(OSError, ValueError):  # outside `root`, or "max": no limit
            most, used = int((group / limit).read_text()), int((group / usage).read_text())
            stat = (group / "memory.stat").read_text()
            cached = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.M)
            yield max(0, most - used + max(map(int, cached), default=0))


def _listed(*options: str) -> list[str]:
    """The name and the free memory of each card in a line; none if `nvidia-smi` fails."""
    try:
        done = subprocess.run(
            ["nvidia-smi", *options, *QUERY],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def _built_for_cuda() -> bool:
    """Whether the installed torch is, by its version.py."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    try:
        text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    except OSError:
        return False
    return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None
