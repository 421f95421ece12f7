"""Tests of a program, of which it sees the inputs and never the expected results.

- `{"input": ..., "output": ...}`: the program is run with the input, and what it prints is
  compared outside the sandbox.
- Code: the tests run in a process of their own, and call the program in another one. They get plain
  values and compare them themselves. So nothing that the program does, such as an `__eq__` that is
  always true or an early exit with code 0, makes a test pass. See `scripts/judge.py`.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.sandbox.asserts import CodeTest, code_tests
from retrain.sandbox.base import Sandbox, SandboxLimits, SandboxResult
from retrain.types import Prompt, Row

SHOWN = 1000
"""Characters of a failure that are shown to the model."""
ENDED = "It ended."
"""What `judge` says of a program that ended; also if the judge ended with it."""
_FENCE = re.compile(r"^(`{3,}|~{3,})[^\n]*\n(.*?)(?:^\1[`~]*\s*$|\Z)", re.MULTILINE | re.DOTALL)
_HERE = Path(__file__).resolve().parent


@dataclass(frozen=True, slots=True)
class IOTest:
    """What a program reads from its standard input, and what it must print."""

    input: str
    output: str


Tests = Sequence[IOTest] | Sequence[CodeTest]


@dataclass(frozen=True, slots=True)
class Graded:
    """Which tests a program passed, and what it sees of its failures."""

    passed: tuple[bool, ...]
    feedback: str = ""
    """The first failure without the expected result, empty if all tests passed."""

    @property
    def fraction(self) -> float:
        return sum(self.passed) / len(self.passed)


def program_in(reply: str) -> str:
    """The last fenced block of code of a reply, or the whole reply if it has none."""
    blocks = _FENCE.findall(reply)
    return str(blocks[-1][1]) if blocks else reply


def tests_of(row: Row | Prompt, column: str | None) -> Tests:
    """The tests of a row in a column, by default in `tests` or else the `answer`.

    The column `entry_point` names the function that `check(candidate)` gets. Raises ValueError if
    there are none.
    """
    columns = row.metadata
    entry_point = str(columns.get("entry_point") or "")
    if (column or "tests") in columns:
        return read_tests(columns[column or "tests"], entry_point)
    names = [*map(str, columns)] + ["answer"] * (row.answer is not None)
    known = f"its columns are {', '.join(names) or 'none'}; set `column` to the right one"
    if column or row.answer is None:
        wanted = f"`{column}`" if column else "`tests` and no `answer`"
        raise ValueError(f"the row has no column {wanted}, expected its tests; {known}; {FORMS}")
    try:
        return read_tests(row.answer, entry_point)
    except ValueError as error:
        what = "the row has no column `tests`, and its `answer` has no tests"
        raise ValueError(f"{what}: {error}; {known}") from None


def read_tests(tests: Any, entry_point: str = "") -> Tests:
    """The tests of a row, see docs/sandbox.md for their forms; raises ValueError for others.

    `entry_point` is the function that a test file's `check(candidate)` gets.
    """
    if isinstance(tests, str) and tests.lstrip()[:1] in ("[", "{"):
        with suppress(ValueError):  # it is code
            tests = json.loads(tests)  # parquet files often have lists as JSON
    given = _listed(tests)
    if not isinstance(given, Sequence) or not given:
        raise ValueError(f"got the tests {str(tests)[:80]!r}, expected a list or code; {FORMS}")
    if all(isinstance(test, str) for test in given):
        return [test for text in given for test in code_tests(text, entry_point)]
    return [_io_test(test) for test in given]


def _listed(tests: Any) -> Any:
    """As a list: a text of code, or `inputs` and `outputs`."""
    if isinstance(tests, Mapping) and {"inputs", "outputs"} <= tests.keys():
        inputs, outputs = tests["inputs"], tests["outputs"]
        lists = all(isinstance(values, list | tuple) for values in (inputs, outputs))
        if not lists or len(inputs) != len(outputs):
            raise ValueError(
                "the tests have `inputs` and `outputs`, expected two equal-sized lists"
            )
        return [{"input": i, "output": o} for i, o in zip(inputs, outputs, strict=True)]
    if isinstance(tests, str):
        return [tests] if tests.strip() else []
    return tests


def _io_test(test: Any) -> IOTest:
    if isinstance(test, Mapping) and {"input", "output"} <= test.keys():
        return IOTest(_text(test["input"]), _text(test["output"]))
    raise ValueError(f"got tests such as {str(test)[:80]!r}; {FORMS}")


FORMS = 'tests are code ("assert f(1) == 2"), or {"input": ..., "output": ...}'


def _text(value: Any) -> str:
    """A column of lines may be a list."""
    return "\n".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


async def grade(
    sandbox: Sandbox,
    program: str,
    tests: Tests,
    *,
    limits: SandboxLimits | None = None,
    command: Sequence[str] = ("python",),
) -> Graded:
    """Run a program against tests. Raises SandboxError if the sandbox fails."""
    limits = limits or SandboxLimits()
    pairs = [test for test in tests if isinstance(test, IOTest)]
    if pairs:
        return await _by_output(sandbox, program, pairs, limits, command)
    if command[0] != "python":
        raise ValueError(f"got tests as code for {command[0]!r}; only Python programs have those")
    code = [test for test in tests if isinstance(test, CodeTest)]
    return await _by_code(sandbox, program, code, limits)


async def _by_output(
    sandbox: Sandbox,
    program: str,
    tests: Sequence[IOTest],
    limits: SandboxLimits,
    command: Sequence[str],
) -> Graded:
    files, argv = {"program": program}, [*command, "program"]
    runs = [sandbox.run(argv, files, stdin=test.input, limits=limits) for test in tests]
    results: list[SandboxResult] = []
    for result in await asyncio.gather(*runs, return_exceptions=True):  # so none goes on
        if isinstance(result, BaseException):
            raise result
        results.append(result)
    passed = tuple(
        result.exit_code == 0 and _lines(result.stdout) == _lines(test.output)
        for result, test in zip(results, tests, strict=True)
    )
    if all(passed):
        return Graded(passed)
    result, given = results[passed.index(False)], tests[passed.index(False)].input
    printed = f"printed {_cut(result.stdout)!r}" if result.stdout else "printed nothing"
    why = _ending(result, limits)
    return Graded(passed, f"With the input {_cut(given)!r}, it {printed}. {why}".strip())


async def _by_code(
    sandbox: Sandbox, program: str, tests: Sequence[CodeTest], limits: SandboxLimits
) -> Graded:
    files = {"program": program, **{f"{n}.py": _script(n) for n in ("peer", "subject")}}
    given = [{"source": test.source, "names": test.names} for test in tests]
    secret = secrets.token_hex()
    argv, stdin = ["python", "-c", _script("judge")], f"{secret}\n{json.dumps(given)}"
    ran = await sandbox.run(argv, files, stdin=stdin, limits=limits)
    verdicts = _marked(ran.stdout, secret)
    if len(verdicts) > len(tests):  # it got to the end; the last line is the program's exit code
        code = verdicts.pop()
        ran = replace(ran, exit_code=code, limit="cpu" if code == -signal.SIGXCPU else "")
    verdicts += [{"call": "", "wrong": ENDED}] * (len(tests) - len(verdicts))
    passed = tuple(verdict["wrong"] == "" for verdict in verdicts)
    failed = (pair for pair in zip(tests, verdicts, strict=True) if pair[1]["wrong"])
    return Graded(passed, next((_failure(*pair, _ending(ran, limits)) for pair in failed), ""))


def _marked(printed: str, secret: str) -> list[Any]:
    """The lines of the judge, which begin with the secret."""
    lines = (line.partition(" ") for line in printed.splitlines())
    return [json.loads(text) for key, _, text in lines if key == secret]


def _failure(test: CodeTest, verdict: Mapping[str, str], ending: str) -> str:
    call = f"`{verdict['call']}`" if verdict["call"] else "An assertion"
    why = (verdict["wrong"] == ENDED and ending) or verdict["wrong"]
    return f"{f'The test {test.name}' if test.name else call} failed. {_cut(why)}"


def _script(name: str) -> str:
    return (_HERE / "scripts" / f"{name}.py").read_text(encoding="utf-8")


def _lines(text: str) -> list[str]:
    """The lines without white space at their ends, and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _ending(result: SandboxResult, limits: SandboxLimits) -> str:
    """Why it ended, if it didn't end well."""
    if result.limit:
        limit = {"time": f"{limits.seconds:g} seconds", "cpu": f"{limits.cpu_seconds} CPU seconds"}
        return f"It exceeded the limit of {limit.get(result.limit, result.limit)}."
    last = result.stderr.strip()[-SHOWN:]
    return f"It ended with exit code {result.exit_code}: {last}" if result.exit_code else ""


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
