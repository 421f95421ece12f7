"""How long a run takes to read and check its prompts, and how much memory they need.

    python -m benchmarks.prompts [--rows 1000000] [--format jsonl]

Writes a file of rows, then starts a process that reads it as a run does: all rows are checked, the
order of an epoch is computed, and 1,000 prompts are issued. Prints the seconds and the memory of
the process beside the size of the file. The memory is the peak of the process minus its memory
after the imports; for parquet, pyarrow's own memory is part of it.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

WORDS = (
    "the", "of", "and", "to", "a", "in", "is", "that", "for", "it", "was", "with", "be", "by",
)  # fmt: skip
MIB = 2**20
CLEAR = Path("/proc/self/clear_refs")


def rows(count: int) -> Iterator[dict[str, Any]]:
    """Rows of about 170 bytes, all different."""
    draw = random.Random(0)
    for number in range(count):
        text = " ".join(draw.choices(WORDS, k=25))
        yield {"prompt": f"{number}: {text}?", "answer": str(number), "level": number % 5}


def write(path: Path, count: int) -> None:
    if path.suffix == ".jsonl":
        with path.open("w") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows(count))
        return
    import datasets

    datasets.Dataset.from_list(list(rows(count))).to_parquet(path)


def measure(path: str, keys: dict[str, Any]) -> dict[str, float]:
    """Seconds and MiB of reading the file."""
    from retrain.config import PromptsConfig
    from retrain.environment import Environment
    from retrain.prompts.base import Origin
    from retrain.prompts.building import built
    from retrain.types import Ticket

    if path.endswith(".parquet"):
        import pyarrow.parquet  # noqa: F401
    if CLEAR.exists():  # else the peak is that of the parent process at first
        CLEAR.write_text("5")
    before, started = peak(), time.perf_counter()
    section = PromptsConfig.model_validate({"type": "file", "path": path, **keys})
    source = built(section, Origin("prompts", Path(), Environment))
    checked = time.perf_counter()
    order = source.order(0, 0, True)
    shuffled = time.perf_counter()
    for row in order[:1000]:
        source.prompt(Ticket(0, row))
    return {
        "rows": len(source),
        "check_s": checked - started,
        "shuffle_s": shuffled - checked,
        "prompt_us": (time.perf_counter() - shuffled) * 1000,
        "memory_mib": peak() - before,
    }


def peak() -> float:
    """MiB of the peak so far."""
    if CLEAR.exists():
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024
    scale = 1024 if sys.platform == "linux" else 1
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / MIB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl")
    parser.add_argument("--keys", default="{}", help="more keys of the section, as JSON")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, json.loads(options.keys))))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"rows.{options.format}"
        write(path, options.rows)
        command = [sys.executable, "-m", "benchmarks.prompts", "--measure", str(path)]
        done = subprocess.run(
            [*command, "--keys", options.keys], check=True, stdout=subprocess.PIPE, text=True
        )
        print(
            "{rows:,} rows, {size:.0f} MiB: read and checked in {check_s:.1f} s, shuffled in "
            "{shuffle_s:.1f} s, {prompt_us:.0f} us per prompt, {memory_mib:.0f} MiB of "
            "memory".format(**json.loads(done.stdout), size=path.stat().st_size / MIB)
        )


if __name__ == "__main__":
    main()
