"""Whether a server can start here, asked before anything loads: its environment and its devices.

Imports no torch.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from retrain.engine.available import present_devices
from retrain.supervision.children import plain_environment

QUESTION = "import importlib.util; print(importlib.util.find_spec('vllm') is not None)"
SECONDS = 20.0
"""How long Python may take to answer; it takes much less, unless its disk is slow."""


def environment_problem(python: Path) -> str | None:
    """Why `python`, a program, can't start vLLM. No answer in time is no problem."""
    kept = {k: v for k, v in plain_environment().items() if not k.startswith("PYTHON")}
    path = python.absolute()
    try:
        done = subprocess.run(
            [path, "-c", QUESTION],
            cwd=path.parent,
            env=kept,  # as for the server
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired:
        return None
    except OSError as error:
        return f"{path} can't be started: {error.strerror}"
    answer = done.stdout.split()[-1:]  # what starts Python may print more
    if answer == ["False"]:
        return f"{path} has no module vllm; run: {path} -m pip install 'vllm>=0.32'"
    if answer != ["True"]:
        said = "".join(f": {line}" for line in done.stderr.strip().splitlines()[-1:])
        return (
            f"{path} is not a Python interpreter; expected the Python of the environment with "
            f"vLLM{said}"
        )
    return None


def devices_problem(devices: Sequence[int]) -> str | None:
    """Which of the devices are not on this machine, as far as nvidia-smi says."""
    found = present_devices() if devices else None
    if found is None or max(devices) < found:
        return None
    return f"got {list(devices)}, but nvidia-smi lists {found}, numbered from 0"
