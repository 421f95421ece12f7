"""What a program does not decide about its tests, and what a test says of it."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.sandbox import SandboxChoice, SandboxLimits, grade, read_tests, sandbox_of
from tests.sandbox_kit import needs_sandbox

WILD = """
class R:
    __sub__ = __rsub__ = __truediv__ = lambda self, o: 0.0
    __gt__ = __lt__ = __ge__ = __le__ = lambda self, o: True
class D(R):
    __sub__ = lambda self, o: D()
    __abs__ = lambda self: 0.0
def Area(r): return D() if r == 3 else R()
class math:
    isclose = lambda *a, **k: True
def f(x): return 0
def silent(x): pass
def skip(x):
    import unittest
    raise unittest.SkipTest
def twice(x):
    import sys
    frame = sys._getframe()
    while type(peer := frame.f_locals.get("self")).__name__ != "ProgramPeer": frame = frame.f_back
    peer.send({"value": {"mine": [1, "int", "int"]}})
    for value in (3, 5):
        peer.receive()
        peer.send({"value": value})
    peer.receive()
"""
UNEARNED = r"""
assert abs(Area(2) - 12.566) < 1e-3
---
assert abs(Area(3) - 12.566) < 1e-3
---
assert abs(12.566 - Area(2)) < 1e-3
---
assert Area(2) / 12.566 < 1e-3
---
assert 12.5 < Area(2) < 12.6
---
assert Area(2) >= 12
---
assert math.isclose(f(1), 3)
---
assert silent.__doc__
---
import io, unittest
class T(unittest.TestCase):
    def test_skip(self): self.assertEqual(skip(1), 2)
ran = unittest.TextTestRunner(io.StringIO()).run(unittest.TestLoader().loadTestsFromTestCase(T))
assert ran.wasSuccessful()
---
r = twice(1)
assert r == 3 and r == 5
"""


@needs_sandbox
async def test_a_program_does_not_decide_by_its_operators_its_modules_or_later_answers() -> None:
    tests = read_tests(UNEARNED.split("\n---\n"))
    async with sandbox_of(SandboxChoice()) as sandbox:
        graded = await grade(sandbox, WILD, tests)
    assert [t.source for t, good in zip(tests, graded.passed, strict=True) if good] == []


LOOP = "def check(candidate):\n    for i in range(3):\n        assert candidate(i) == i"
CHECK = "def check(g):\n    assert g(1) == 1\n    assert True, 'x'\n\ncheck(f)"


@needs_sandbox
@pytest.mark.parametrize(
    ("tests", "passed", "feedback"),
    [
        (LOOP, (True,), ""),
        (CHECK, (True,), ""),
        ("assert f(1) == 1\nfor i in range(3):\n    assert f(i) == 0", (True, False), "`f(1)`"),
        ("assert sum(1, 2) == 'mine'", (True,), ""),
        ("assert math.isclose(f(1), 1)", (True,), ""),
        ("assert g(1) == 2", (False,), "NameError: name 'g' is not defined"),
        ("e = Odd()\nassert f(e) == e", (False,), "of the class Odd, expected a plain value"),
        ("assert f(odd()) == 1", (False,), "f(odd())"),
        ("assert boom(1) == 1, 'wanted'", (False,), "ValueError: no 1"),
        ("assert f(1) == 2, 'wanted'", (False,), "`f(1)` failed. It is false."),
        ("assert f(max(1, 2)) == 1", (False,), "`f(2)`"),
        ("assert leave(3) == 1\nassert f(1) == 1", (False, False), "It ended with exit code 3"),
    ],
)
async def test_a_test_says_what_the_program_did(
    tests: str, passed: tuple[bool, ...], feedback: str
) -> None:
    program = """
import math, os
class Odd: pass
odd = lambda: Odd()
def f(x): return x
def sum(*a): return "mine"
def boom(x): raise ValueError(f"no {x}")
def leave(x): os._exit(x)
"""
    async with sandbox_of(SandboxChoice()) as sandbox:
        graded = await grade(sandbox, program, read_tests(tests, "f" if "check" in tests else ""))
    assert graded.passed == passed
    assert feedback in graded.feedback


@pytest.mark.parametrize(
    ("tests", "line"),
    [
        ("assert Vec(1, 2) + Vec(1, 1) == Vec(2, 3)", 1),
        ("x = 1\nassert f(x) == Point(1, 2)", 2),
        ("def test_x():\n    pass\n    assert color() is Color.RED", 3),
        ("for i in range(3):\n    if Point(i) != f(i):\n        raise ValueError", 2),
        ("x = 1\nassert np.allclose(f(1), 3)", 2),
        ("class A(Account): pass\nassert A(1).balance == 1", 1),
    ],
)
def test_what_only_the_program_could_decide_is_rejected_with_its_line(
    tests: str, line: int
) -> None:
    with pytest.raises(ValueError, match=f"line {line} of the tests, .* program; "):
        read_tests(tests)


@needs_sandbox
async def test_arrays_keep_their_shape_where_tests_import_numpy() -> None:
    pytest.importorskip("numpy")
    tests: Any = [
        "import numpy as np\nassert f(np.ones((2, 2))).shape == (2, 2)",
        "import numpy as np\nassert np.allclose(f(np.ones(2)), [2, 2]) and f(np.int64(1)) == 2",
        "assert f(array([1, 2])) == [2, 4]",
    ]
    program = "from numpy import array\ndef f(x): return array(x) * 2"
    async with sandbox_of(SandboxChoice(packages=True)) as sandbox:
        limits = SandboxLimits(memory=2048)
        graded = await grade(sandbox, program, read_tests(tests), limits=limits)
    assert graded.passed == (True, True, True)
