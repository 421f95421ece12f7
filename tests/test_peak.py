"""The measured peak of memory: what each process had at once, not what it has now."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from retrain.observe import peak
from retrain.observe.peak import in_words, peak_memory

CHILD = """
import sys
del (block := [bytearray(60 * 10**6)])[:]
print(flush=True)
sys.stdin.read()
"""
OF_A_CHILD = f"""
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}])
sys.stdin.read()
child.wait()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="children are found in /proc")
@pytest.mark.parametrize("program", [CHILD, OF_A_CHILD])
def test_the_peak_counts_children_and_theirs(program: str) -> None:
    before = peak_memory({}).get("ram_children", 0)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        found = peak_memory({})
        assert found["ram_children"] - before > 60 * 10**6
        child.communicate()
    assert peak_memory({}).get("ram_children", 0) - before < 60 * 10**6
    assert peak_memory(found)["ram_children"] == found["ram_children"]


def test_a_child_that_ends_meanwhile_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with sandboxes has children that end at any time."""
    with subprocess.Popen(["sleep", "100"]) as child:

        def ends(process: int, measured: Callable[[int], int] = peak._peak) -> int:
            if process == child.pid:  # it was found, and ends
                child.kill()
                child.wait()
            return measured(process)

        monkeypatch.setattr(peak, "_peak", ends)
        assert peak_memory({})["ram"] > 0
        assert child.returncode is not None, "it was found"


def test_the_peak_of_this_process_imports_no_torch() -> None:
    script = (
        "import sys; block = bytearray(80 * 10**6); del block\n"
        "from retrain.observe.peak import peak_memory; found = peak_memory({})\n"
        "print(found['ram'], found.keys() >= {'cuda'}, 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    ram, *others = done.stdout.split()
    assert 80 * 10**6 < int(ram) < 400 * 10**6
    assert others == ["False", "False"]


def test_the_words_have_what_was_measured() -> None:
    peak = {"ram": 1_240_000_000, "ram_children": 860_000_000, "cuda": 12_300_000_000}
    assert in_words(peak) == (
        "1.24 GB in RAM at the peak, 0.86 in child processes; 12.30 GB on CUDA"
    )
    assert in_words({"ram": 5 * 10**8, "ram_children": 10**7}) == "0.50 GB in RAM at the peak"
