"""What all tests share: one torch thread, fixed examples, cheap collections, slow tests first.

Property tests draw the same examples in each run; `--hypothesis-profile=default` draws new ones.
Accelerate collects all garbage whenever TRL's loop starts, and each collection would walk through
the half a million objects that torch and its companions are made of: a third of a short run. While
the tests are imported, collection costs a fifth of the time and finds nothing.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import settings

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; inherited by subprocesses

settings.register_profile("same", derandomize=True)
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Start the slow tests first, so that no process waits at the end for another's long test."""
    gc.enable()
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Also after a test that has set another number."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _cheap_collections() -> None:
    """Let collections pass over what was there before this module's tests."""
    gc.collect()
    gc.freeze()
