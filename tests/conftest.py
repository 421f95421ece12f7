"""What every test has in common: one thread of torch, the same examples, cheap collections.

Property tests draw the same examples each time; `--hypothesis-profile=default` looks for new ones.
Accelerate collects all garbage whenever TRL's loop starts, and each collection would walk through
the half a million objects that torch and its companions are made of: a third of a short run.
"""

from __future__ import annotations

import gc
import os

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; inherited by subprocesses

settings.register_profile("same", derandomize=True)
settings.load_profile("same")


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> None:
    """Let collections pass over what was there before this module's tests."""
    gc.collect()
    gc.freeze()
