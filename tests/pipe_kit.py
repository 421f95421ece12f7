"""What the tests of the pipe share."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.mock_engine import MockAdapter, MockOptions
from retrain.assembly import assemble
from retrain.observe.run_dir import read_events

ROOT = Path(__file__).parent.parent


def played(folder: Path, script: str, prefix=()) -> subprocess.CompletedProcess:
    """The script as a process of its own, whose argument is the folder's `run`."""
    file = folder / "main.py"
    file.write_text(script)
    return subprocess.run(
        [*prefix, sys.executable, str(file), str(folder / "run")],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        check=False,
    )


async def until(condition: Callable[[], object]) -> None:
    """Turn the loop until another thread or process has got there; a test's timeout bounds it."""
    while not condition():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.001)


def slot_share(completion: str, answer: str) -> float:
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)


def events(folder: Path, kind: str) -> list[dict]:
    return [event for event in read_events(folder) if event["event"] == kind]


def rollouts_of(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_text().splitlines()]


def kept_adapter(config, batches: int = 100) -> MockAdapter:
    """A mock adapter that remembers its batches."""
    adapter = MockAdapter(MockOptions(**config.backend.arguments), config)
    adapter.keep_batches = batches
    return adapter


def parts_with(config, adapter, *given):
    """The config's parts, with this adapter in place of a new one."""
    parts = assemble(config, *given)

    class Opened(type(parts)):
        def open_adapter(self):
            return adapter

    return Opened(**{name: getattr(parts, name) for name in parts.__dataclass_fields__})
