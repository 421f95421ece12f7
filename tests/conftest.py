"""What every test's process has in common: one thread of torch, and cheap garbage collections.

Accelerate collects all garbage whenever TRL's loop starts, and each collection would walk through
the half a million objects that torch and its companions are made of: a third of a short run.
"""

from __future__ import annotations

import gc
import os

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; inherited by subprocesses


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> None:
    """Let collections pass over what was there before this module's tests."""
    gc.collect()
    gc.freeze()
