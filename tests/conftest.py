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
from collections import Counter

import pytest
from hypothesis import settings

gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; inherited by subprocesses

settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is slow
settings.load_profile("same")


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's, for `-n auto`
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: many tests wait, for a deadline or for another process."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, so that no process waits in the end for another's long one.

    pytest-xdist gives every process an even share of the list, in its order: each share begins
    with its part of the slow tests. A slow test with many cases is many short tests.
    """
    gc.enable()
    cases = Counter(function_of(item) for item in items)
    slow, quick = [], []
    for item in items:
        alone = item.get_closest_marker("slow") and cases[function_of(item)] < 10
        (slow if alone else quick).append(item)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for number in range(processes):
        part = slow[number::processes]
        share = (len(items) - len(ordered)) // (processes - number)
        more = max(share - len(part), 0)
        ordered += part + quick[:more]
        del quick[:more]
    items[:] = ordered + quick


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


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
