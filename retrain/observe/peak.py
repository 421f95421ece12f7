"""The most memory that a run has used, to compare with its estimate. Imports no torch."""

from __future__ import annotations

import os
import re
import resource
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

GB = 1e9
SMALL = 5e7
"""The process that ends children after `kill -9` takes less, and every run has it."""


def peak_memory(before: Mapping[str, int]) -> dict[str, int]:
    """Bytes at the peak: `ram` of this process, `ram_children` of its running children, each at its
    own peak, and `cuda` of this process, if it uses CUDA.

    `before` is an earlier result, which has the children that have ended since.
    """
    unit = 1 if sys.platform == "darwin" else 1024
    # on Linux, `ru_maxrss` begins with the peak of the process that started this one
    own = _peak(os.getpid()) or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    found = {"ram": own}
    if children := sum(_peaks_of_children(os.getpid())):
        found["ram_children"] = children
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["cuda"] = int(torch.cuda.max_memory_allocated())
    return {name: max(found.get(name, 0), before.get(name, 0)) for name in {**found, **before}}


def in_words(peak: Mapping[str, int]) -> str:
    """For the summary and the report."""
    text = f"{peak['ram'] / GB:.2f} GB in RAM at the peak"
    if (children := peak.get("ram_children", 0)) >= SMALL:
        text += f", {children / GB:.2f} in child processes"
    if cuda := peak.get("cuda"):
        text += f"; {cuda / GB:.2f} GB on CUDA"
    return text


def _peaks_of_children(process: int) -> Iterator[int]:
    """Of all descendants; none without Linux's /proc."""
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        with suppress(OSError):  # the thread has ended; the others still have children
            for child in map(int, file.read_text(encoding="ascii").split()):
                yield _peak(child)
                yield from _peaks_of_children(child)


def _peak(process: int) -> int:
    try:
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    found = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else 0
