"""Splits a test into what calls the program and what judges the result, by its syntax tree.

    assert math.isclose(area(2), 12.57, rel_tol=0.01)

becomes the expression `area(2)` for the program's process, and
`math.isclose(_value0, 12.57, rel_tol=0.01)` for the judge's. A name that the test doesn't import or
assign itself, and that is no built-in, is one of the program.

An assertion that can't be split is computed in the program's process as a whole, so that a program
can forge it: assertions in loops, functions, `with` and `try`, and those whose calls depend on a
variable of a comprehension or a lambda.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

_VALUES = (
    "str repr list tuple set frozenset sorted dict len sum int float bool type next iter max min "
    "round bytes reversed enumerate zip map filter hash ord chr"
)
CONVERSIONS = frozenset(_VALUES.split())
"""Built-ins that belong to the value: `sorted(f(x)) == [1, 2]` compares the sorted list."""
JUDGES = frozenset(dir(builtins)) - CONVERSIONS
JOINTS = (
    *(ast.BoolOp, ast.Compare, ast.UnaryOp, ast.BinOp, ast.IfExp),
    *(ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Starred, ast.keyword),
)
"""Parts of an assertion whose parts are split in turn."""
BINDING = (ast.GeneratorExp, ast.ListComp, ast.SetComp, ast.DictComp, ast.Lambda)
"""What may call the program with variables of its own: it belongs to the value."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: statements, of which at least one is an assertion or calls the program."""

    body: tuple[ast.stmt, ...]
    name: str = ""
    """Of a function; empty for a single assertion."""


@dataclass(frozen=True, slots=True)
class Split:
    """The two parts of a test, for the scripts `subject` and `judge`."""

    steps: list[tuple[str, str]]
    """What the program's process does in this order: "exec" a statement, or "eval" a value."""
    before: str
    """The statements of the judge: imports, and values without the program."""
    assertions: list[str]
    """What must be true, of the names `_value0`, `_value1`, ..."""

    @property
    def values(self) -> list[str]:
        return [text for kind, text in self.steps if kind == "eval"]

    @property
    def shown(self) -> str:
        """The calls of the program, without what is expected of them."""
        whole = any(isinstance(n, ast.Compare) for v in self.values for n in ast.walk(ast.parse(v)))
        return "An assertion" if whole or not self.values else f"`{', '.join(self.values)}`"


def code_tests(text: str, entry_point: str = "") -> list[CodeTest]:
    """The tests of a text: each function `test_...`, or each assertion outside of functions.

    `check(candidate)` is called with the program's function `entry_point`. Raises ValueError if
    there is no test, or the text is no Python.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" in line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise ValueError(
            f"the tests are not valid Python: {getattr(error, 'msg', error)}{line}"
        ) from None
    found: list[CodeTest] = []
    before: list[ast.stmt] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            found.append(CodeTest((*before, *node.body), node.name))
        elif isinstance(node, ast.FunctionDef) and node.name == "check" and entry_point:
            named = [_named(node, entry_point)]
            found += _each_assertion([*before, *named, *node.body])
        elif isinstance(node, ast.Assert):
            found.append(CodeTest((*before, node)))
        elif not _calls_check(node):
            before.append(node)
    if not found and _judging(before):
        found = [CodeTest(tuple(before))]
    if why := _no_test(tree, found, entry_point):
        raise ValueError(f"there is no test in {text[:80]!r}: {why}")
    return found


def _no_test(tree: ast.Module, found: Sequence[CodeTest], entry_point: str) -> str:
    """Why every program would pass; empty if not so."""
    if found and not entry_point and not _names_program(tree):
        return "it defines all that it calls, so every program passes; call the program"
    if found:
        return ""
    why = "expected an assertion outside of functions, or a function test_..."
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        why += "; `check` needs the column `entry_point`, the name of the program's function"
    return why


def _names_program(tree: ast.Module) -> bool:
    """Whether there is a name that the tests don't bind: else they are a program themselves."""
    nodes = list(ast.walk(tree))
    bound = _names(tree, ast.Store) | {node.arg for node in nodes if isinstance(node, ast.arg)}
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom | ast.FunctionDef):
            bound |= _bound(node)
        elif isinstance(node, ast.ClassDef):
            bound.add(node.name)
    indirect = {"eval", "exec", "globals", "vars", "__import__"}
    return bool(_names(tree, ast.Load) - bound - (JUDGES | CONVERSIONS) | _names(tree) & indirect)


def _named(check: ast.FunctionDef, entry_point: str) -> ast.stmt:
    """Gives the parameter of `check(candidate)` its value."""
    names = [argument.arg for argument in check.args.args]
    if len(names) != 1 or not entry_point.isidentifier():
        raise ValueError(
            f"got check({', '.join(names)}) and the entry_point {entry_point!r}, expected "
            "check(candidate) and the name of a function"
        )
    return ast.parse(f"{names[0]} = {entry_point}").body[0]


def _judging(body: Sequence[ast.stmt]) -> bool:
    """Whether statements judge the program, by themselves or by calling a function of theirs.

    Else every program passes them, such as a reference solution in the column of the tests.
    """
    defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    judges = {node.name for node in defined if _judges(node)}
    return any(_judges(n) or _names(n) & judges for n in body if n not in defined)


def _judges(node: ast.stmt) -> bool:
    """Whether it has an assertion, raises an error, or calls a function such as assert_equal."""
    called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    names = [getattr(f, "attr", "") or getattr(f, "id", "") for f in called]
    raising = any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(node))
    return raising or any(name.startswith("assert") for name in names)


def _each_assertion(body: Sequence[ast.stmt]) -> Iterator[CodeTest]:
    before = [node for node in body if not isinstance(node, ast.Assert)]
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    if len(before) + len(asserts) == len(body) and asserts and not _nested(before):
        yield from (CodeTest((*before, node)) for node in asserts)
    else:
        yield CodeTest(tuple(body))


def _nested(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Assert) for stmt in body for node in ast.walk(stmt))


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    )


def split(test: CodeTest) -> Split:
    """The parts of a test."""
    own: set[str] = set()
    shared: list[ast.stmt] = []
    steps: list[tuple[str, ast.AST]] = []
    assertions: list[str] = []
    count = 0
    for node in test.body:
        if isinstance(node, ast.Assert):
            splitter = _Splitter(own, count)
            assertions.append(ast.unparse(splitter.visit(deepcopy(node.test))))
            steps += [("eval", value) for value in splitter.values]
            count += len(splitter.values)
            continue
        if _is_own(node, own):
            own |= _bound(node)
            shared.append(node)
        steps.append(("exec", node))
    # A value of the test that the program's process doesn't need may be the expected result.
    used = set().union(*(_names(node) for _, node in steps if node not in shared))
    steps = [
        (kind, node)
        for kind, node in steps
        if node not in shared or _is_import(node) or _bound(node) & used
    ]
    sources = [(kind, ast.unparse(node)) for kind, node in steps]
    return Split(sources, "\n".join(map(ast.unparse, shared)), assertions)


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _is_own(node: ast.stmt, own: set[str]) -> bool:
    """Whether a statement is one of the test: an import, or what doesn't call the program."""
    if _is_import(node):
        return True
    if isinstance(node, ast.FunctionDef):
        inner = {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)} | {node.name}
        return _names(node) - _names(node, ast.Store) - inner <= own | JUDGES | CONVERSIONS
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    return _names(node.value) <= own | JUDGES | CONVERSIONS


def _bound(node: ast.stmt) -> set[str]:
    """The names that an import, a function or an assignment binds."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    return {node.name} if isinstance(node, ast.FunctionDef) else _names(node, ast.Store)


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The names in a tree, or those that it stores."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, context)}


class _Splitter(ast.NodeTransformer):
    """Replaces what calls the program by `_value0`, `_value1`, ..., from the number `first` on."""

    def __init__(self, own: set[str], first: int = 0) -> None:
        self.own, self.first = own, first
        self.values: list[ast.expr] = []

    def visit(self, node: ast.AST) -> Any:
        if not isinstance(node, ast.expr | ast.keyword) or not self._calls_program(node):
            return node
        bound = any(isinstance(inner, BINDING) for inner in ast.iter_child_nodes(node))
        if isinstance(node, ast.Call) and self._is_judge(node.func) and not bound:
            return self.generic_visit(node)
        if isinstance(node, JOINTS):
            return self.generic_visit(node)
        self.values.append(node)
        return ast.Name(f"_value{self.first + len(self.values) - 1}", ast.Load())

    def _is_judge(self, function: ast.expr) -> bool:
        """Whether a function is one of the test or a built-in that judges."""
        while isinstance(function, ast.Attribute):
            function = function.value
        return isinstance(function, ast.Name) and function.id in self.own | JUDGES

    def _calls_program(self, node: ast.AST) -> bool:
        bound = _names(node, ast.Store) | {a.arg for a in ast.walk(node) if isinstance(a, ast.arg)}
        return bool(_names(node) - bound - self.own - JUDGES - CONVERSIONS)
