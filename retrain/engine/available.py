"""The CUDA devices of this machine, and how much memory is free: on them, and in RAM.

Imports no torch, which would take seconds: cards are those that `nvidia-smi` lists. The exception
is `cuda_devices`, where torch has the last word.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

QUERY = ("--query-gpu=index,uuid,name,memory.free", "--format=csv,noheader,nounits")
SECONDS = 10.0
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Card:
    """A CUDA device."""

    name: str
    free: int
    """Bytes."""


def cards() -> list[Card]:
    """The CUDA cards that torch can use, in the order of CUDA_VISIBLE_DEVICES.

    Empty if torch is not built for CUDA, or `nvidia-smi` is missing or fails. A MIG device is not
    listed: its card's free memory is not its own.
    """
    listed = _listed() if _built_for_cuda() else None
    return [] if listed is None else _visible(listed, os.environ.get("CUDA_VISIBLE_DEVICES"))


def present_devices() -> int | None:
    """How many cards the machine has, whatever CUDA_VISIBLE_DEVICES says; None if unknown."""
    listed = _listed()
    return None if listed is None else len(listed.strip().splitlines())


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
        text = (proc / "meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s+(\d+) kB", text, re.MULTILINE)
    if found is None:
        return None
    return min([int(found[1]) * 1024, *_left_in_groups(proc, groups)])


def _listed() -> str | None:
    """The cards by `nvidia-smi`, one per line; None if it is missing or fails."""
    command = shutil.which("nvidia-smi")
    if command is None:
        return None
    try:
        done = subprocess.run(
            [command, *QUERY], capture_output=True, text=True, timeout=SECONDS, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def _visible(listed: str, chosen: str | None) -> list[Card]:
    """Cards of nvidia-smi's lines `index, uuid, name, free MiB`, as CUDA_VISIBLE_DEVICES chooses.

    As in CUDA, an unknown device ends the list.
    """
    rows = [[part.strip() for part in line.split(",")] for line in listed.strip().splitlines()]
    rows = [row for row in rows if len(row) == 4 and row[3].isdigit()]
    every = [(index, uuid, Card(name, int(free) * MIB)) for index, uuid, name, free in rows]
    if chosen is None:
        return [card for _, _, card in every]
    picked: list[Card] = []
    for name in (part.strip() for part in chosen.split(",")):
        match = [c for i, uuid, c in every if name and (name == i or uuid.startswith(name))]
        if len(match) != 1:
            break
        picked += match
    return picked


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


def _left_in_groups(proc: Path, groups: Path) -> Iterator[int]:
    """Bytes under the limit of each control group of this process: version 2, then version 1."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    names = ("memory.max", "memory.current", "inactive_file")
    older = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, (limit, usage, cached) = groups, names
        elif "memory" in controllers.split(","):
            root, (limit, usage, cached) = groups / "memory", older
        else:
            continue
        folder = root / path.lstrip("/")
        for group in (folder, *folder.parents):
            if group == root.parent:
                break
            left = _left(group, limit, usage, cached)
            if left is not None:
                yield left


def _left(group: Path, limit: str, usage: str, cached: str) -> int | None:
    try:
        most = (group / limit).read_text(encoding="ascii").strip()
        used = int((group / usage).read_text(encoding="ascii"))
        stat = (group / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):
        return None
    if not most.isdigit():  # max: no limit
        return None
    found = re.search(rf"^{cached} (\d+)$", stat, re.MULTILINE)
    return max(int(most) - used + (int(found[1]) if found else 0), 0)
