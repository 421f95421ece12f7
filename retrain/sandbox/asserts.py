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

PACKAGES = {"np", "pd", "numpy", "pandas"}
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
        raise ValueError(f"the tests are not valid Python: {error}") from None
    program = _program_names(tree, entry_point)
    if wrong := next(_undecidable(tree, program), ""):
        raise ValueError(wrong)
    found: list[CodeTest] = []
    before: list[ast.stmt] = []
    seen = 0
    for node in tree.body:
        tests = [_test(body, program, name) for name, body in _bodies(node, before, entry_point)]
        if tests or (isinstance(node, ast.Expr) and _owner(node.value) == "check"):
            found, seen = found + tests, len(before)
        else:
            before.append(node)
    if _judging(before, before[seen:]):
        found.append(_test(before, program))
    if why := _no_test(tree, found, program):
        raise ValueError(f"there is no test in {text[:80]!r}: {why}")
    return found


def _bodies(
    node: ast.stmt, before: Sequence[ast.stmt], entry_point: str
) -> Iterator[tuple[str, Sequence[ast.stmt]]]:
    """The tests that a statement makes with those before it: their names and statements."""
    if isinstance(node, ast.Assert):
        yield "", [*before, node]
    elif isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
        yield node.name, [*before, node, *ast.parse(f"{node.name}()").body]
    elif isinstance(node, ast.FunctionDef) and node.name == "check" and entry_point:
        named = _named(node, entry_point)
        yield from (("", body) for body in _parts([*before, named, *node.body]))


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
    owners = {_owner(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    return (owners & program & sys.stdlib_module_names) - _called(tree)


def _called(tree: ast.AST) -> set[str]:
    return {_owner(n) for n in ast.walk(tree) if isinstance(n, ast.Call)}


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
    bound.update(name for node in ast.walk(tree) for name in _bound(node))
    free = _names(tree, ast.Load) - bound | ({entry_point} if entry_point else set())
    called = _called(tree) & free
    return frozenset(free - _BUILTINS or (called if len(called) == 1 else ()))


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that a node binds, other than by an assignment."""
    if isinstance(node, ast.arg):
        yield node.arg
    elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.ExceptHandler):
        yield node.name or ""
    elif isinstance(node, ast.Import | ast.ImportFrom):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in node.names)


def _undecidable(tree: ast.Module, program: frozenset[str]) -> Iterator[str]:
    """What only the program's own classes could decide, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare) and _compares_objects(node, program):
            why = "compares objects of the program; compare their attributes, or str() of them"
        elif isinstance(node, ast.ClassDef) and any(_names(b) & program for b in node.bases):
            why = "derives a class from one of the program; call the program's own class"
        elif isinstance(node, ast.Attribute) and _owner(node) in PACKAGES & program:
            why = "needs a module of the program; import it in the tests"
        else:
            continue
        yield f"line {node.lineno} of the tests, `{ast.unparse(node).splitlines()[0]}`, {why}"


def _compares_objects(node: ast.Compare, program: frozenset[str]) -> bool:
    values = [node.left, *node.comparators]
    objects = [value for value in values if _is_object(value, program)]
    others = [value for value in values if value not in objects[:1]]
    equal = isinstance(node.ops[0], ast.Eq | ast.NotEq | ast.Is | ast.IsNot)
    return equal and bool(objects) and any(_names(value) & program for value in others)


def _is_object(node: ast.expr, program: frozenset[str]) -> bool:
    """Whether it is, by its name, an instance or an attribute of a class of the program."""
    owner = _owner(node)
    return owner in program and owner.lstrip("_")[:1].isupper()


def _owner(node: ast.AST) -> str:
    """The name that is called, or whose attribute it is; empty for anything else."""
    if isinstance(node, ast.Call):
        return getattr(node.func, "id", "")
    return getattr(node.value, "id", "") if isinstance(node, ast.Attribute) else ""


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
    nested = any(isinstance(node, ast.Assert) for node in ast.walk(ast.Module(before, [])))
    if asserts and not nested:
        yield from ([*before, node] for node in asserts if not isinstance(node.test, ast.Constant))
    else:
        yield body


def _names(node: ast.AST, context: type[ast.expr_context] = ast.expr_context) -> set[str]:
    """The names in a tree, or those that it stores."""
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, context)}
