"""Tests as code: the functions and assertions of a text, by its syntax tree.

A name that the tests neither bind nor import, and that is not built in, belongs to the program. See
`scripts/judge.py` for how a test runs. What a program can't prove there is an error here: a
comparison of two objects of the program, whose class decides the result.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_BUILTINS = frozenset(dir(builtins))


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: statements, of which at least one is an assertion or calls the program."""

    source: str
    names: tuple[str, ...]
    """Those that it may mean of the program; its own statements bind the others."""
    name: str = ""
    """Of a function; empty for a single assertion."""


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
    program = _program_names(tree, entry_point)
    if wrong := next(_undecidable(tree, program), ""):
        raise ValueError(wrong)
    found: list[CodeTest] = []
    before: list[ast.stmt] = []
    seen = 0
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
            call = ast.parse(f"{node.name}()").body
            found.append(_test([*before, node, *call], program, node.name))
        elif isinstance(node, ast.FunctionDef) and node.name == "check" and entry_point:
            named = _named(node, entry_point)
            found += [_test(body, program) for body in _parts([*before, named, *node.body])]
        elif isinstance(node, ast.Assert):
            found.append(_test([*before, node], program))
        elif not _calls_check(node):
            before.append(node)
            continue
        seen = len(before)
    if _judging(before, before[seen:]):
        found.append(_test(before, program))
    if why := _no_test(tree, found, program):
        raise ValueError(f"there is no test in {text[:80]!r}: {why}")
    return found


def _test(body: Sequence[ast.stmt], program: frozenset[str], name: str = "") -> CodeTest:
    tree = ast.Module(list(body), [])
    names = _names(tree, ast.Load) - _BUILTINS | program
    modules = _modules(tree, program)
    imports = [f"import {name}\n" for name in sorted(modules)]
    return CodeTest("".join([*imports, ast.unparse(tree)]), tuple(sorted(names - modules)), name)


def _modules(tree: ast.AST, program: frozenset[str]) -> set[str]:
    """Modules of Python that a test uses without an import; a program can't define its own `math`.

    A name that is called, such as `array(...)`, is the program's.
    """
    owners = {getattr(n.value, "id", "") for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return (owners & program & sys.stdlib_module_names) - _called(tree)


def _called(tree: ast.AST) -> set[str]:
    return {getattr(n.func, "id", "") for n in ast.walk(tree) if isinstance(n, ast.Call)}


def _no_test(tree: ast.Module, found: Sequence[CodeTest], program: frozenset[str]) -> str:
    """Why every program would pass; empty if not so."""
    if found and not program:
        return "it defines all that it calls, so every program passes; call the program"
    if found:
        return ""
    why = "expected an assertion outside of functions, or a function test_..."
    if any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in tree.body):
        why += "; `check` needs the column `entry_point`, the name of the program's function"
    return why


def _program_names(tree: ast.Module, entry_point: str) -> frozenset[str]:
    """The names that the tests don't bind. A built-in one if they call nothing but that."""
    bound = _names(tree, ast.Store) | ({"check"} if entry_point else set())
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            bound.add(node.arg)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.ExceptHandler):
            bound.add(node.name or "")
        elif isinstance(node, ast.Import | ast.ImportFrom):
            bound |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
    free = _names(tree, ast.Load) - bound | ({entry_point} if entry_point else set())
    called = _called(tree) & free
    return frozenset(free - _BUILTINS or (called if len(called) == 1 else ()))


def _undecidable(tree: ast.Module, program: frozenset[str]) -> Iterator[str]:
    """What only the program's own classes could decide, with its line."""
    packages = {"np", "pd", "numpy", "pandas"} & program
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
            objects = [value for value in values if _is_object(value, program)]
            others = [value for value in values if value not in objects[:1]]
            equal = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
            if not (equal and objects and any(_names(value) & program for value in others)):
                continue
            why = "compares objects of the program; compare their attributes, or str() of them"
        elif isinstance(node, ast.ClassDef) and any(_names(b) & program for b in node.bases):
            why = "derives a class from one of the program; call the program's own class"
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") in packages:
            why = "needs a module of the program; import it in the tests"
        else:
            continue
        yield f"line {node.lineno} of the tests, `{ast.unparse(node).splitlines()[0]}`, {why}"


def _is_object(node: ast.expr, program: frozenset[str]) -> bool:
    """Whether it is, by its name, an instance or an attribute of a class of the program."""
    owner = getattr(node, "func" if isinstance(node, ast.Call) else "value", None)
    if not isinstance(node, ast.Call | ast.Attribute) or not isinstance(owner, ast.Name):
        return False
    return owner.id in program and owner.id.lstrip("_")[:1].isupper()


def _named(check: ast.FunctionDef, entry_point: str) -> ast.stmt:
    """Gives the parameter of `check(candidate)` its value."""
    names = [argument.arg for argument in check.args.args]
    if len(names) != 1 or not entry_point.isidentifier():
        raise ValueError(
            f"got check({', '.join(names)}) and the entry_point {entry_point!r}, expected "
            "check(candidate) and the name of a function"
        )
    return ast.parse(f"{names[0]} = {entry_point}").body[0]


def _judging(body: Sequence[ast.stmt], last: Sequence[ast.stmt]) -> bool:
    """Whether the last statements judge the program, by themselves or by functions of the body.

    Else every program passes them, such as a reference solution in the column of the tests.
    """
    defined = [n for n in body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    judges = {node.name for node in defined if _judges(node)}
    return any(_judges(n) or _names(n) & judges for n in last if n not in defined)


def _judges(node: ast.stmt) -> bool:
    """Whether it has an assertion, raises an error, or calls a function such as assert_equal."""
    called = (n.func for n in ast.walk(node) if isinstance(n, ast.Call))
    names = [getattr(f, "attr", "") or getattr(f, "id", "") for f in called]
    raising = any(isinstance(inner, ast.Assert | ast.Raise) for inner in ast.walk(node))
    return raising or any(name.startswith("assert") for name in names)


def _parts(body: Sequence[ast.stmt]) -> Iterator[Sequence[ast.stmt]]:
    """Each assertion with the other statements, or all together if others have assertions.

    `assert True`, which HumanEval has, is no test.
    """
    before = [node for node in body if not isinstance(node, ast.Assert)]
    asserts = [node for node in body if isinstance(node, ast.Assert)]
    if asserts and not _nested(before):
        yield from ([*before, node] for node in asserts if not isinstance(node.test, ast.Constant))
    else:
        yield body


def _nested(body: Sequence[ast.stmt]) -> bool:
    return any(isinstance(node, ast.Assert) for stmt in body for node in ast.walk(stmt))


def _calls_check(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    return (
        isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "check"
    )


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The names in a tree, or those that it stores."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, context)}
