"""The everyday forms of tests: a right program passes them, with the tests in another process."""

from __future__ import annotations

from retrain.sandbox import SandboxChoice, grade, read_tests, sandbox_of
from tests.sandbox_kit import needs_sandbox

PROGRAM = """
import dataclasses, datetime, functools, inspect, io, json, sys, threading
sys.stdout = io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", write_through=True)
from collections import Counter, deque, namedtuple
from enum import Enum, IntEnum
class InsufficientFunds(ValueError):
    def __init__(self, need):
        super().__init__(f"need {need}")
        self.need = need
class Account:
    count = 0
    def __init__(self, balance=0): self.balance = balance; Account.count += 1
    def withdraw(self, n):
        if n > self.balance: raise InsufficientFunds(n - self.balance)
        self.balance -= n; return self
    @classmethod
    def of(cls, n): return cls(n)
    def __enter__(self): return self
    def __exit__(self, kind, *a): self.balance = -1; self.failed = kind is ValueError; return True
    def __str__(self): return f"Account({self.balance})"
    def __eq__(self, o): return self.balance == o.balance
class Stack(list):
    def push(self, x): self.append(x); return x
class Bag:
    def __init__(self): self.d=[]
    def append(self, x): self.d.append(x)
    def __len__(self): return len(self.d)
    def __contains__(self, x): return x in self.d
    def __getitem__(self, i): return self.d[i]
    def __setitem__(self, i, v): self.d[i]=v
    def __iter__(self): return iter(self.d)
    def pop(self): return self.d.pop()
class Vec:
    def __init__(self,x,y): self.x,self.y=x,y
    def __add__(self,o): return Vec(self.x+o.x,self.y+o.y)
    def __mul__(self,k): return Vec(self.x*k,self.y*k)
    def __rmul__(self,k): return self*k
    def __repr__(self): return f"Vec({self.x}, {self.y})"
    def __lt__(self,o): return self.x<o.x
    def __neg__(self): return Vec(-self.x,-self.y)
    def __bool__(self): return bool(self.x)
    def __call__(self, k): return self.x+k
Point = namedtuple("Point","x y")
class Color(Enum):
    RED=1; BLUE=2
class Level(IntEnum):
    LOW=1; HIGH=2
def color(): return Color.RED
def level(): return Level.HIGH
def point(): return Point(1,2)
def area(p): return p.x*p.y
def counter():
    n=0
    def c():
        nonlocal n; n+=1; return n
    return c
def gen(n):
    for i in range(n): yield i
def inf():
    i=0
    while True: yield i; i+=1
def sort(a): a.sort()
def addkey(d): d['k']=1
def rot(m):
    for r in m: r.reverse()
def apply(fn, *a, **k): return fn(*a, **k)
def each(fn, xs): return [fn(x) for x in xs]
def reverse(node):
    prev=None
    while node: node.next, prev, node = prev, node, node.next
    return prev
def has_cycle(n):
    s=f=n
    while f and f.next:
        s=s.next; f=f.next.next
        if s is f: return True
    return False
def hello(): print("hello")
def memo(fn):
    c={}
    def w(x):
        if x not in c: c[x]=fn(x)
        return c[x]
    return w
def count(xs): return Counter(xs)
def neg(x):
    if x<0: raise ValueError("negative")
    return x
def ident(x): return x
LIMIT=5
TABLE={'a':[1]}
def rng(n): return range(n)
def keys(d): return d.keys()
def mk(n): return [Account(i) for i in range(n)]
def total(accs): return sum(a.balance for a in accs)
def conv(t, x): return t(x)
def isstr(x): return isinstance(x, str)
def var(*a, **k): return a, k
def quit_(): raise SystemExit(3)
def rd(): return input()
async def co(x): return x+1
def mutate_nested(d): d['a'].append(1)
def node(v): return {'v': v, 'next': None}
def annotation(x: int): return annotation.__annotations__["x"] is int
def loud(fn):
    @functools.wraps(fn)
    def w(*a): return fn.__name__, fn(*a), len(inspect.signature(fn).parameters)
    return w
@functools.lru_cache
def cached(x): return x
def change(fn):
    a = [2, 1]
    fn(a)
    return a
def together(fn):
    found = []
    threads = [threading.Thread(target=lambda i=i: found.append(fn(i))) for i in range(8)]
    for t in threads: t.start()
    for t in threads: t.join()
    return sorted(found)
class Coded(Exception):
    def __init__(self, code): self.code, self.me, self.also = code, self, self
    def __str__(self): return f"code {self.code}"
def fail(code): raise Coded(code)
def load(s): return json.loads(s)
def group(): raise ExceptionGroup("both", [ValueError(1), Coded(2)])
@dataclasses.dataclass(frozen=True)
class Frozen:
    x: int
def times(x, k): return x * k
def year(d): return d.year
def last(q): q.append(3); return q[-1], q
async def after(x): return await co(x) + 1
def combine(a, b): return (a + b).v, len(a), a[0], a < b, bool(a), 1 in a
def of_class(o, kind): return isinstance(o, kind)
"""
FORMS = r"""
a = Account(5)
a.withdraw(2)
assert a.balance == 3
---
assert Account(5).withdraw(2).withdraw(1).balance == 2
---
try:
    Account(1).withdraw(3)
    assert False
except InsufficientFunds as e:
    assert e.need == 2 and str(e) == "need 2"
---
try:
    Account(1).withdraw(3)
except ValueError as e:
    assert type(e).__name__ == "InsufficientFunds"
else:
    assert False
---
with Account(3) as a:
    assert a.balance == 3
assert a.balance == -1
---
assert str(Account(2)) == "Account(2)" and f"{Account(2)}" == "Account(2)"
---
s = Stack()
s.push(1)
assert s == [1] and len(s) == 1 and isinstance(s, list) and isinstance(s, Stack)
---
b = Bag()
b.append(1); b.append(2)
assert len(b) == 2 and 2 in b and 3 not in b and b[0] == 1 and list(b) == [1, 2]
---
b = Bag()
b.append(2)
b[0] = 9
assert b[0] == 9 and [x for x in b] == [9]
---
v = Vec(1, 2) + Vec(3, 4)
assert v.x == 4 and v.y == 6 and repr(v) == "Vec(4, 6)"
---
assert str(Vec(1, 2) * 2 + Vec(1, 1)) == "Vec(3, 5)"
assert (2 * Vec(1, 2)).y == 4 and (-Vec(1,2)).x == -1
---
assert Vec(1, 2) < Vec(2, 0) and not Vec(2, 0) < Vec(1, 0) and Vec(1, 1) and not Vec(0, 1)
---
assert sorted([Vec(2, 0), Vec(1, 0)])[0].x == 1 and Vec(1, 2)(4) == 5
---
assert point() == (1, 2) and point().x == 1 and area(point()) == 2 and area(Point(3, 4)) == 12
---
assert Point(1, 2) == (1, 2) and Point(x=1, y=2).y == 2
---
assert color().name == "RED" and level() == 2 and level().name == "HIGH" and Color.BLUE.value == 2
---
c = counter()
c()
assert c() == 2
---
assert list(gen(3)) == [0, 1, 2] and sum(gen(3)) == 3
---
from itertools import islice
g = inf()
assert next(g) == 0 and list(islice(g, 3)) == [1, 2, 3]
---
a = [3, 1]
sort(a)
assert a == [1, 3]
---
d = {}
addkey(d)
assert d == {'k': 1}
---
m = [[1, 2], [3]]
rot(m)
assert m == [[2, 1], [3]]
---
assert apply(lambda x: x + 1, 3) == 4 and apply(max, 3, 4) == 4
assert apply(sorted, [2, 1], reverse=True) == [2, 1]
---
import math, operator
assert apply(math.sqrt, 4) == 2 and apply(operator.add, 1, 2) == 3
assert each(str, [1]) == ['1'] and apply(neg, 3) == 3
---
class Node:
    def __init__(self, v, next=None):
        self.val, self.next = v, next
n = reverse(Node(1, Node(2, Node(3))))
assert n.val == 3 and n.next.next.val == 1 and n.next.next.next is None
assert not has_cycle(n)
n.next.next.next = n
assert has_cycle(n)
---
import io, contextlib
out = io.StringIO()
with contextlib.redirect_stdout(out):
    hello()
assert out.getvalue() == "hello\n"
---
calls = []
def slow(x):
    calls.append(x)
    return x * 2
m = memo(slow)
assert m(2) == 4 and m(2) == 4 and calls == [2]
---
@memo
def fast(x):
    return x + 1
assert fast(1) == 2
---
assert count("aab") == {'a': 2, 'b': 1}
---
try:
    neg(-1)
    assert False
except ValueError as e:
    assert str(e) == "negative"
---
import unittest
class T(unittest.TestCase): pass
with T().assertRaises(ValueError):
    neg(-1)
assert neg(1) == 1
---
assert LIMIT == 5 and TABLE['a'] == [1]
---
assert len(rng(3)) == 3 and list(rng(3)) == [0, 1, 2] and rng(3) == range(3)
---
assert sorted(keys({'b': 1, 'a': 2})) == ['a', 'b']
assert set(keys({1: 2})) == {1} and list(keys({1:1})) == [1]
---
assert [a.balance for a in mk(2)] == [0, 1] and total(mk(3)) == 3
assert total([Account(1), Account(2)]) == 3
---
assert conv(int, '3') == 3 and conv(str, 3) == '3' and isstr('a')
assert conv(ValueError, 'x') is not None
---
assert var(1, [2], a=3) == ((1, [2]), {'a': 3})
---
values = [None, True, 1.5, {1, 2}, b'x', (1,), 10**30, -5, '\ud800é', frozenset([1]), 1j, {}, []]
values += [bytearray(b'a'), float('-inf'), {1: {(2, 'a'): [3]}}, range(3), 2**63, '', 0]
for value in values:
    assert ident(value) == value and type(ident(value)) is type(value)
assert math.isnan(ident(float('nan')))
---
try:
    quit_()
except SystemExit as e:
    assert e.code == 3
else:
    assert False
---
def helper(f, x, y):
    return abs(f(x) - y) < 1e-6
assert helper(ident, 1.5, 1.5)
---
cases = {1: 1, 2: 2}
assert all(ident(k) == v for k, v in cases.items())
---
assert isinstance(color(), Color) and isinstance(Account(1), Account) and not isinstance(3, Account)
---
assert hasattr(Account(1), 'balance') and not hasattr(Account(1), 'nothing') and callable(ident)
---
x = Account(1)
x.balance = 7
assert x.balance == 7 and Account.of(3).balance == 3
---
d = {'a': []}
mutate_nested(d)
assert d == {'a': [1]}
---
assert ident.__name__ == 'ident'
---
def test_loop():
    for i in range(3):
        with __import__('contextlib').suppress(KeyError):
            assert ident(i) == i
---
it = iter([1, 2])
assert each(lambda x: x * 2, it) == [2, 4] and each(ident, (i for i in (1, 2))) == [1, 2]
---
import random
random.seed(0)
for _ in range(20):
    xs = [random.randint(0, 9) for _ in range(5)]
    ys = list(xs)
    sort(ys)
    assert ys == sorted(xs)
---
s = Stack([1, 2])
s.push(3)
assert s[2] == 3 and s[1:] == [2, 3] and sum(s) == 6 and s.pop() == 3
---
assert Account(1) is not None and bool(Stack([1]))
---
assert annotation(1)
---
@loud
def named(*a):
    "doc"
    return a[0]
assert named(1)[:2] == ("named", 1) and named.__name__ == "named" and named.__doc__ == "doc"
---
assert count("aab").most_common(1) == [("a", 2)] and cached(1) == 1
assert cached.cache_info().hits == 0 and cached.cache_info() == (0, 1, 128, 1)
---
class Stop(Exception): pass
def stop(x): raise Stop(x)
try:
    apply(stop, 3)
except Stop as e:
    seen = e.args
assert seen == (3,)
---
import dataclasses, json
seen = []
for call in (lambda: fail(4), lambda: load("{"), lambda: setattr(Frozen(1), "x", 2)):
    try:
        call()
    except (Coded, json.JSONDecodeError, dataclasses.FrozenInstanceError) as e:
        seen.append(str(e))
assert seen[0] == "code 4" and seen[1].startswith("Expecting") and "'x'" in seen[2]
---
try:
    group()
except* ValueError as e:
    assert str(e.exceptions[0]) == "1"
except* Coded as e:
    seen = e.exceptions[0]
assert seen.code == 2 and str(seen) == "code 2"
---
assert change(lambda a: a.sort()) == [1, 2]
---
assert together(lambda i: i * 2) == [0, 2, 4, 6, 8, 10, 12, 14]
---
a = Account(1)
try:
    with a:
        raise ValueError("mine")
except ValueError:
    suppressed = False
assert not suppressed and a.failed
---
from datetime import date, datetime, timedelta, time
from decimal import Decimal
from fractions import Fraction
from collections import Counter, deque
for value in (date(2020, 1, 2), datetime(2020, 1, 1, 2, 3), time(1, 2), timedelta(2, 3),
              Decimal("1.50"), Fraction(1, 3), deque([1, (2,)], maxlen=3), Counter("aab")):
    assert ident(value) == value and type(ident(value)) is type(value)
q = deque([1])
assert times(Decimal("1.5"), 2) == 3 and year(date(2020, 1, 1)) == 2020
assert last(q) == (3, deque([1, 3])) and q == deque([1, 3]) and count("aab") == Counter("aab")
---
import asyncio
async def both():
    return await after(1), *await asyncio.gather(after(2), co(3))
assert asyncio.run(after(1)) == 3 and asyncio.run(both()) == (3, 4, 4)
---
class Bag2:
    def __init__(self, v): self.v = v
    def __add__(self, o): return Bag2(self.v + o.v)
    def __len__(self): return 2
    def __getitem__(self, i): return [7, 8][i]
    def __lt__(self, o): return self.v < o.v
    def __contains__(self, x): return x == 1
assert combine(Bag2(1), Bag2(2)) == (3, 2, 7, True, True, True)
assert of_class(Bag2(1), Bag2) is True and of_class(3, Bag2) is False
---
import copy
a = [[1]]
b = copy.deepcopy(ident(a))
assert b == a
---
try:
    rd()
except EOFError:
    ok = True
assert ok
"""


@needs_sandbox
async def test_a_right_program_passes_every_form_of_test() -> None:
    tests = read_tests(FORMS.split("\n---\n"))
    async with sandbox_of(SandboxChoice()) as sandbox:
        graded = await grade(sandbox, PROGRAM, tests)
    failed = [t for t, good in zip(tests, graded.passed, strict=True) if not good]
    assert (failed, graded.feedback) == ([], "")
