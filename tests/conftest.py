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
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

gc.disable()
_writes_no_bytecode, sys.dont_write_bytecode = sys.dont_write_bytecode, False
# until all is imported: the next session, and the processes of tests, need not compile it again
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is loaded; inherited by subprocesses

settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is slow
settings.register_profile("long", max_examples=1000, deadline=None)
settings.load_profile("same")

_frozen = 0
"""The number of modules whose objects collections pass over."""


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's, for `-n auto`
def pytest_xdist_auto_num_workers() -> int:
    """One process more than cores: many tests wait, for a deadline or for another process."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what needs a real vLLM server, unless `-m` names it, and begin with the slow tests.

    So no process waits in the end for another's long one.
    pytest-xdist gives every process an even share of the list, in its order: each share begins
    with its part of the slow tests, the slowest first. A slow test with many cases is many short
    tests. What is in one `xdist_group` shares costly fixtures and stays in one process.
    """
    gc.enable()
    sys.dont_write_bytecode = _writes_no_bytecode
    if "vllm" not in config.option.markexpr:
        left_out = [item for item in items if item.get_closest_marker("vllm")]
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=left_out)
    cases = Counter(function_of(item) for item in items)
    slow: dict[str, list[pytest.Item]] = {}
    quick = []
    for item in items:
        group = item.get_closest_marker("xdist_group")
        if group or (item.get_closest_marker("slow") and cases[function_of(item)] < 10):
            slow.setdefault(group.args[0] if group else item.nodeid, []).append(item)
        else:
            quick.append(item)
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ordered: list[pytest.Item] = []
    for number, part in enumerate(balanced(list(slow.values()), processes)):
        share = (len(items) - len(ordered)) // (processes - number)
        more = max(share - len(part), 0)
        ordered += part + quick[:more]
        del quick[:more]
    items[:] = ordered + quick


def balanced(groups: list[list[pytest.Item]], processes: int) -> list[list[pytest.Item]]:
    """The groups' tests for each process: the longest group first, to who has least to do."""
    parts: list[list[pytest.Item]] = [[] for _ in range(processes)]
    load = [0.0] * processes
    for group in sorted(groups, key=seconds, reverse=True):
        least = load.index(min(load))
        parts[least] += group
        load[least] += seconds(group)
    return parts


def seconds(group: list[pytest.Item]) -> float:
    """What the group takes: the marker's number for each test, or five seconds."""
    markers = (item.get_closest_marker("slow") for item in group)
    return sum((marker.args or (5,))[0] for marker in markers if marker)


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the working folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def nothing_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is wrong is reported before the backend opens."""

    def opened(parts: object) -> None:
        raise AssertionError("the backend was opened before the mistake was reported")

    monkeypatch.setattr("retrain.assembly.Parts.open_adapter", opened)


@pytest.fixture
def clean_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The modules of a test's own folders are forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name, module in [item for item in sys.modules.items() if item[0] not in before]:
        folders = getattr(module, "__path__", ())
        if not isinstance(module, ModuleType) or not isinstance(folders, Iterable):
            continue  # torch puts objects of its own among the modules
        places = [getattr(module, "__file__", None) or ""]
        with suppress(AttributeError):  # a namespace package whose parent the test has hidden
            places += folders
        if any(str(place).startswith(temporary) for place in places):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Also after a test that has set another number."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(scope="module", autouse=True)
def _collected() -> None:
    """Begin each module without what the last one's tests have left."""
    freeze()


@pytest.fixture(autouse=True)
def _cheap_collections() -> None:
    """Let collections pass over what the tests before have imported."""
    if len(sys.modules) > _frozen + 20:
        freeze()


def freeze() -> None:
    global _frozen
    gc.collect()
    gc.freeze()
    _frozen = len(sys.modules)
