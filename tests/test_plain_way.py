"""The plain way stays plain: how many files of `retrain/` one step of the plainest run enters.

A file is entered when one of its functions is called; what only an import calls doesn't count, nor
does the watch thread, whose ticks come when they come.
`python tests/test_plain_way.py` prints the files.
"""

import asyncio
import inspect
import json
import subprocess
import sys
import threading
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

import pytest

IN_ALL, FEED_TO_UPDATE = 72, 36
"""The most files in all of `train()`, and from the first call of `feed` to the update."""
ROOT = Path(__file__).parent.parent
PACKAGE = str(ROOT / "retrain") + "/"


class Entered:
    """The files that are entered while this is the profile function."""

    def __init__(self) -> None:
        self.in_all: set[str] = set()
        self.feed_to_update: set[str] = set()
        self._stage = "before"

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_flags & inspect.CO_NEWLOCALS:  # a module, a class body
            return
        if threading.current_thread().name == "retrain-watch":
            return
        if code.co_name == "update" and code.co_filename.endswith("mock_engine.py"):
            self._stage = "updated"
        if not code.co_filename.startswith(PACKAGE) or imports(frame):
            return
        if code.co_name == "feed" and self._stage == "before":
            self._stage = "feed"
        self.in_all.add(code.co_filename.removeprefix(PACKAGE))
        if self._stage == "feed":
            self.feed_to_update.add(code.co_filename.removeprefix(PACKAGE))


def imports(frame: FrameType | None) -> bool:
    """Whether the frame is part of an import."""
    while frame is not None:
        if "importlib._bootstrap" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def entered(folder: Path) -> dict[str, list[str]]:
    """Take one step of the echo task on the mock engine."""
    from benchmarks.mock_engine import mock_config
    from retrain import train

    config, files = mock_config(folder / "run", train={"total_train_steps": 1}), Entered()
    threading.setprofile(files)
    sys.setprofile(files)
    asyncio.run(train(config))
    sys.setprofile(None)
    threading.setprofile(None)
    return {"in all": sorted(files.in_all), "feed to update": sorted(files.feed_to_update)}


@pytest.fixture(scope="module")
def files() -> dict[str, list[str]]:
    """Found in a new process, in which nothing has been called and cached."""
    command = [sys.executable, __file__]
    printed = subprocess.run(command, check=True, cwd=ROOT, capture_output=True, text=True).stdout
    sys.stdout.write(printed)
    found: dict[str, list[str]] = json.loads(printed)
    return found


def test_a_plain_step_enters_few_files(files: dict[str, list[str]]) -> None:
    assert "pipeline/stages.py" in files["in all"]
    assert len(files["in all"]) <= IN_ALL


def test_few_files_are_between_a_prompt_and_its_update(files: dict[str, list[str]]) -> None:
    assert "rollout/slot.py" in files["feed to update"]
    assert len(files["feed to update"]) <= FEED_TO_UPDATE


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    with TemporaryDirectory() as folder, redirect_stdout(sys.stderr):  # of the console
        found = entered(Path(folder))
    sys.stdout.write(json.dumps(found, indent=2) + "\n")
