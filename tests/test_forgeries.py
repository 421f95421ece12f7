"""Programs are judged by the tests that they pass, and none fakes a result."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from retrain.sandbox import Sandbox, SandboxChoice, grade, program_in, read_tests, sandbox_of
from tests.sandbox_kit import LIMITS, WORKING


@pytest.fixture(params=WORKING or [pytest.param("", marks=pytest.mark.skip("no namespaces here"))])
async def sandbox(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    async with sandbox_of(SandboxChoice(request.param, processes=4)) as made:
        yield made


FORGERIES = {
    "exit with code 0": "import os; os._exit(0)",
    "sys.exit": "import sys; sys.exit(0)",
    "printing results": "print('pass\\n{\"values\": [true]}\\n' * 9)\nimport os; os._exit(0)",
    "results in every descriptor": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"values": [true]}\\n' * 9)
    except OSError: pass
os._exit(0)
""",
    "equal to everything": """
class Equal:
    __eq__ = __lt__ = __contains__ = lambda *a: True
    __hash__ = None
def f(x): return Equal()
""",
    "an equal int": """
class Equal(int):
    __eq__ = __ne__ = lambda *a: True
    __hash__ = None
def f(x): return Equal()
""",
    "patched builtins": """
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.AssertionError = KeyError
def f(x): return 0
""",
    "patched codec": """
import sys
sys.modules['peer'].Peer.encode = lambda *a: True
def f(x): return 0
""",
    "writing to the judge": """
import os
for fd in range(3, 20):
    try: os.write(fd, b'{"value": true}\\n' * 99)
    except OSError: pass
def f(x): return 0
""",
    "a number of its own": """
class Own(int):
    for name in dir(int):
        if name[:2] == '__' and name[2:-2] in 'add radd sub rsub abs round lt le gt ge eq ne':
            locals()[name] = lambda *a: Own()
    __bool__ = lambda s: True
    startswith = count = isdigit = check = lambda *a: 1
def f(x): return Own()
""",
    "an object of its own": """
class Own:
    calls = 'eq ne lt le gt ge sub rsub abs round len contains bool int float index getitem'
    for name in calls.split(): locals()[f'__{name}__'] = lambda *a: True
    __sub__ = __rsub__ = __abs__ = __round__ = lambda s, *a: 0
    startswith = count = lambda *a: 1
    __enter__ = lambda s: s
    __exit__ = lambda *a: True
    __iter__ = lambda s: iter([s, s, s])
    __len__ = lambda s: 3
    __hash__ = lambda s: 0
def f(x): return Own()
words = items = made = f
Box = lambda x: Own()
""",
    "a class for a function": """
class f:
    def __init__(self, x): pass
    __eq__ = __lt__ = lambda *a: True
    __sub__ = __abs__ = __round__ = lambda *a: 0
    __len__ = lambda s: 3
    startswith = count = lambda *a: 1
words = items = made = f
""",
    "returning itself": """
class Box:
    def __init__(self, x): pass
    def get(self): return self
    __eq__ = lambda *a: True
    startswith = lambda *a: True
    __exit__ = lambda *a: True
    __enter__ = lambda s: s
def f(x): return Box(x)
made = words = items = f
""",
    "ending the loops": "def f(x): raise StopIteration\nwords = items = made = f",
    "ending the iteration": "def f(x): raise GeneratorExit\nwords = items = made = f",
    "ending by an attribute": """
class Box:
    def __init__(self, x): pass
    def __getattr__(self, name): raise StopIteration
f = words = items = made = Box
""",
    "the memory of the judge": """
class Own:
    __array_interface__ = {'shape': (1,), 'typestr': '|u1', 'version': 3, 'data': (4096, False)}
    __array__ = lambda s, *a: 1
def f(x): return Own()
words = items = made = Box = f
""",
    "its own all": """
all = any = abs = round = isinstance = len = max = sorted = math = lambda *a, **k: True
def f(x): return True
words = items = made = f
""",
    "catching what tests raise": """
def f(x):
    try: x(0)
    except BaseException: pass
    return 'x'
""",
    "trace": """
import sys
sys.settrace(lambda frame, *a: frame.f_globals.update(all=lambda *a: True))
def f(x): return 0
""",
    "atexit": "import atexit, os\natexit.register(lambda: os._exit(0))\ndef f(x): return 0",
    "editing the tests": "open('tests', 'w').write('[]')\ndef f(x): return 0",
    "a module of its own": "open('json.py', 'w')\nopen('codec.py', 'w')\ndef f(x): return 0",
    "a second process": "import os\nos.fork()\ndef f(x): return 0",
    "killing the parent": "import os\nos.kill(os.getppid(), 9)\ndef f(x): return 0",
    "searching the answer": """
import gc, glob, os, re, sys
fds = lambda: [f'/proc/{pid}/fd/{n}' for pid in (os.getpid(), os.getppid()) for n in range(9)]
def f(x):
    frame = sys._getframe(1)
    texts = [repr(gc.get_objects()), repr(frame.f_locals), repr(frame.f_globals)]
    for path in glob.glob('/tmp/**', recursive=True) + glob.glob('/proc/*/*') + fds():
        try: texts.append(str(os.read(os.open(path, os.O_NONBLOCK), 2**20)))
        except OSError: pass
    found = [match for text in texts for match in re.findall(r'31415\\d+', text)]
    return int(found[0]) if found else 0
""",
    "not equal to itself": "def f(x): return float('nan')",
    "deep value": "def f(x):\n    v = []\n    for i in range(9999): v = [v]\n    return v",
    "syntax error": "def f(x: return",
    "nothing": "",
}
HONEST = """
def f(x):
    return x(3141591) if callable(x) else 3141591 + x
def words(x):
    return f"{f(x)} is it"
def items(x):
    return [f(x)] * 3
def made(x):
    yield from items(x)
class Box:
    def __init__(self, x):
        self.value = f(x)
    def get(self):
        return self.value
"""
STRICT = [
    "assert f(1) == 3141592",
    "wanted = 3141593\nassert f(2) == wanted",
    "import math\nassert math.isclose(f(3), 3141594.0)",
    "assert math.isclose(f(3), 3141594.0)",
    "assert abs(f(4) - 3141595) < 1",
    "assert f(5) in (3141596, 3141597)",
    "def near(a, b):\n    return abs(a - b) < 1\nassert near(f(6), 3141597)",
    "def test_all():\n    x = f(7)\n    assert isinstance(x, int)\n    assert x == 3141598",
    "def test_return():\n    if f(7) == 3141598:\n        return\n    assert False",
    "cases = [(1, 3141592), (2, 5)]\nassert f(cases[0][0]) == cases[0][1]",
    "cases = [(1, 3141592), (2, 3141593)]\nfor i, o in cases:\n    assert f(i) == o",
    "inp, out = 1, 3141592\nassert f(inp) == out",
    "data = {'in': 1, 'out': 3141592}\nres = f(data['in'])\nassert res == data['out']",
    "result, wanted = f(1), 3141592\nprint(result, wanted)\nassert result == wanted",
    "class E: v = 3141592\nassert f(1) == E.v",
    "assert max(f(1), 3141592) == 3141592 == f(1)",
    "ok = f(1) == 3141592\nassert ok",
    "assert all(x == 3141592 for x in items(1)) and len(items(1)) == 3",
    "assert all(f(i) == 3141591 + i for i in range(5))",
    "assert all(map(lambda i: f(i) == 3141591 + i, range(5)))",
    "assert all(map(lambda i: Box(i).value == 3141591 + i, range(5)))",
    "assert all(map(lambda i: Box(i).get() == 3141591 + i, range(5)))",
    "assert [f(i) for i in (1, 2)] == [3141592, 3141593]",
    "for i in range(3):\n    assert f(i) == 3141591 + i",
    "i = 0\nwhile i < 3:\n    assert f(i) == 3141591 + i\n    i += 1",
    "import io\nwith io.StringIO() as file:\n    assert f(2) == 3141593",
    "try:\n    assert f(2) == 3141593\nexcept ValueError:\n    assert False",
    "try:\n    ok = f(2) == 3141593\nexcept TypeError:\n    ok = True\nassert ok",
    "if f(1) != 3141592:\n    raise ValueError('3141592')",
    "close = lambda a, b: abs(a-b) < 1e-6\nassert close(f(1), 3141592)",
    "assert round(f(1) - 3141592, 6) == 0",
    "assert not round(f(1) - 3141592)",
    "assert words(1).startswith('3141592')",
    "assert words(1).count('3141592') == 1",
    "assert '3141592 is' in words(1)",
    "assert f'{words(1)}' == '3141592 is it'",
    "assert len(items(1)) == 3 and items(1)[0] == 3141592",
    "assert type(f(1)) == int and f(1) > 3141591 and f(1) < 3141593",
    "assert list(made(1)) == [3141592] * 3",
    "assert next(made(1)) == 3141592",
    "assert sorted(items(1)) == sorted([3141592] * 3)",
    "assert {f(1): 1} == {3141592: 1}",
    "assert Box(1).get() == 3141592 == Box(1).value",
    "with Box(1).get() if False else open('/dev/null'):\n    assert Box(1).get() == 3141592",
    "def wanted(x):\n    assert x == 3141591\n    return 'x'\nassert f(wanted) == 'x'",
    "import unittest\nunittest.TestCase().assertEqual(f(1), 3141592)",
]


@pytest.mark.slow(5)
async def test_no_program_passes_tests_without_their_results(sandbox: Sandbox) -> None:
    tests = read_tests(STRICT)
    graded = await asyncio.gather(
        *(
            grade(sandbox, program, tests, limits=LIMITS)
            for program in (HONEST, *FORGERIES.values())
        )
    )
    assert [t for t, good in zip(STRICT, graded[0].passed, strict=True) if not good] == []
    passed = {n: g.passed for n, g in zip(FORGERIES, graded[1:], strict=True)}
    forged = {n: [t for t, p in zip(STRICT, p, strict=True) if p] for n, p in passed.items()}
    assert {n: tests for n, tests in forged.items() if tests} == {}
    assert all("31415" not in result.feedback for result in graded)


ADD = "def add(a, b=1):\n    return a + b\n"
TWICE = "def test_a():\n    x = add(1)\n    assert x == 2\n    x = add(x)\n    assert x == 3"
CHECK = "def check(candidate):\n    assert candidate(1) == 2\n    assert candidate(2) == 2"
DOUBLE = "print(int(input()) * 2)"
CASES = [
    (ADD, "assert add(1) == 2\nassert add(1, 2) == 4", (True, False)),
    (ADD, "assert add(1) == 2 and not add(-1)", (True,)),
    (ADD, "assert add('a', 'b') == 'ab', 'a message'", (True,)),
    (ADD, "assert sorted([add(2), add(1)]) == [2, 3]\nassert str(add(1)) == '2'", (True, True)),
    (ADD, "assert add(0, 10**5000) == 10**5000", (True,)),
    (ADD, CHECK, (True, False)),
    (ADD, TWICE, (True,)),
    (ADD, '["assert add(1) == 2"]', (True,)),
    (DOUBLE, [{"input": "2", "output": "4\n"}, {"input": "x", "output": ""}], (True, False)),
    ("print(1); print('2 ')", {"inputs": [""], "outputs": [["1", "2"]]}, (True,)),
    ("while True: pass", [{"input": "", "output": ""}], (False,)),
]


@pytest.mark.slow(4)
async def test_programs_pass_the_tests_that_hold(sandbox: Sandbox) -> None:
    graded = await asyncio.gather(
        *(
            grade(sandbox, program, read_tests(tests, "add"), limits=LIMITS)
            for program, tests, _ in CASES
        )
    )
    assert [result.passed for result in graded] == [passed for _, _, passed in CASES]
    assert graded[0].feedback == "`add(1, 2)` failed. It is false."
    assert "1 CPU" in graded[-1].feedback


@pytest.mark.parametrize("tests", [None, [], "", [{"input": "1"}], [1]])
def test_wrong_tests_are_an_error(tests: object) -> None:
    with pytest.raises(ValueError, match=r"got .*tests are code"):
        read_tests(tests)


@pytest.mark.parametrize(
    ("reply", "program"),
    [
        ("x = 1", "x = 1"),
        ("Sure:\n```python\nx = 1\n```\nDone.", "x = 1\n"),
        ("```\na\n```\nbetter:\n```py\nb\n```", "b\n"),
        ("~~~~\n```\n~~~~", "```\n"),
        ("```python\nx = 1", "x = 1"),
    ],
)
def test_the_program_is_the_last_block_or_all_of_the_reply(reply: str, program: str) -> None:
    assert program_in(reply) == program
