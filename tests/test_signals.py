"""Signals that end a run, and code that holds it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from retrain.cli.process import STOPPING_EARLY
from tests.cli_kit import ROOT, events, written


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written(tmp_path, monkeypatch)


def run_apart(
    arguments: Sequence[str], folder: Path, module: str = "retrain.run", **streams: int
) -> subprocess.Popen[str]:
    """The command in a process of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **streams,
    )


def finished(process: subprocess.Popen[str], timeout: float = 30) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def test_a_signal_before_training_ends_the_run_with_130(config: Path) -> None:
    (config.parent / "loads.py").write_text(
        "import os, signal\n"
        "from retrain import Environment as Loads\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    process = run_apart(["task.yaml", "environment=loads.py:Loads"], config.parent)
    code, _, err = finished(process)
    assert code == 130, err
    assert f"{STOPPING_EARLY} Press Ctrl-C again" in err
    assert not (config.parent / "runs" / "task").exists(), "nothing was trained"


def wait_for_step(run_dir: Path, process: subprocess.Popen[str]) -> None:
    """Until the run has trained a step, seen in its files."""
    file = run_dir / "metrics.jsonl"
    waited = threading.Event()
    for _ in range(600):
        if file.exists() and file.read_text().strip():
            return
        assert process.poll() is None, process.communicate()
        waited.wait(0.05)
    raise AssertionError("no step in 30 s")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_p10_an_interrupt_checkpoints_and_ends_with_130(
    config: Path, number: signal.Signals
) -> None:
    process = run_apart(
        ["task.yaml", "train.total_train_steps=100000", "backend.latency=0.01"], config.parent
    )
    run_dir = config.parent / "runs" / "task"
    wait_for_step(run_dir, process)
    process.send_signal(number)
    code, out, err = finished(process)
    assert code == 130, err
    assert "Ctrl-C" in err
    assert (out + err).count("interrupted") == 1
    assert "Traceback" not in err
    steps = [event["step"] for event in events(run_dir) if event["event"] == "update"]
    assert (run_dir / "checkpoints" / f"step_{steps[-1]}").is_dir()


def test_p10_a_second_interrupt_ends_at_once(config: Path) -> None:
    process = run_apart(
        ["task.yaml", "train.total_train_steps=100000", "backend.update=0.3"], config.parent
    )
    wait_for_step(config.parent / "runs" / "task", process)
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    while "Finishing" not in process.stderr.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert finished(process)[0] == 130


def test_p12_ctrl_backslash_ends_code_that_holds_the_interpreter(config: Path) -> None:
    # One call of C both says so and holds: its write fills the pipe, which nobody empties.
    (config.parent / "holds.py").write_text(
        "import ctypes\n"
        "text = b'holding\\n' + bytes(1 << 20)\n"
        "def hold(completion):\n"
        "    ctypes.PyDLL(None).write(1, text, len(text))\n"
    )
    process = run_apart(["task.yaml", "rewards=holds.py:hold"], config.parent)
    assert process.stdout is not None
    while "holding" not in process.stdout.readline():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)  # no code of Python can answer
    process.send_signal(signal.SIGQUIT)
    assert process.wait(30) == -signal.SIGQUIT
    finished(process)
    assert "line 4" in (config.parent / "runs" / "task" / "error.txt").read_text()


def test_a_debugger_is_left_alone_and_gets_ctrl_c(config: Path) -> None:
    (config.parent / "debugged.py").write_text(
        "from retrain import Environment\n"
        "once = iter([0])\n"
        "class Debugged(Environment):\n"
        "    async def step(self, action):\n"
        "        for _ in once: breakpoint()\n"
        "        return await super().step(action)\n"
    )
    process = run_apart(
        ["task.yaml", "environment=debugged.py:Debugged", "deadlines.blocked=0.2"],
        config.parent,
        stdin=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None

    def until(words: str) -> None:
        read = ""
        while words not in read:
            letter = process.stdout.read(1)
            assert letter, process.communicate()
            read += letter

    until("(Pdb) ")
    process.stdin.write("import time; time.sleep(0.7); print('a' + 'wake')\n")  # the user thinks
    process.stdin.flush()
    until("awake")
    until("(Pdb) ")
    process.send_signal(signal.SIGINT)
    while not select.select([process.stdout], [], [], 0.5)[0]:  # it came before the read began
        process.send_signal(signal.SIGINT)
    until("--KeyboardInterrupt--")
    out, err = process.communicate("c\n", timeout=30)
    assert process.returncode == 0, out + err


def test_a_hanging_thread_does_not_keep_the_process(config: Path) -> None:
    (config.parent / "hangs.py").write_text(
        """
import threading
from retrain import Environment

class Hangs(Environment):
    async def setup(self):
        threading.Thread(target=threading.Event().wait, name="user-thread").start()
"""
    )
    process = run_apart(["task.yaml", "environment=hangs.py"], config.parent)
    code, _, err = finished(process)
    assert code == 0, err
    assert "user-thread" in err
