"""The environments `code` and `sql`, and the reward `code_tests`."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from environments.code import Code
from environments.echo import Echo
from environments.sql import Sql
from retrain import Action, ConfigError, Prompt, StepResult
from retrain.assembly import assemble
from retrain.assembly import rows as assembly_rows
from retrain.assembly.build import row_checks
from retrain.config import parse_config
from retrain.scoring import Scorer
from rewards.code_tests import CodeTests
from tests.reward_kit import rollout
from tests.sandbox_kit import needs_sandbox


def asking(answer: object, **metadata: Any) -> Prompt:
    return Prompt("0.0.0", [{"role": "user", "content": "?"}], answer, metadata)


async def played(environment: Any, prompt: Prompt, *replies: str) -> list[StepResult]:
    environment.prompt = prompt
    await environment.setup()
    try:
        await environment.reset(prompt)
        return [await environment.step(Action(reply)) for reply in replies]
    finally:
        await environment.close()


def values(results: list[StepResult]) -> list[tuple[float, bool]]:
    return [(result.reward, result.terminated) for result in results]


SQUARE = ["assert f(3) == 9", "assert f(0) == 0"]


@needs_sandbox
async def test_code_earns_the_fraction_of_tests_and_sees_its_failures() -> None:
    prompt = asking(None, tests=SQUARE)
    replies = "def f(x): 0", "def f(x): return x +", "Now:\n```\ndef f(x): return x*x\n```"
    results = await played(Code(attempts=3), prompt, *replies)
    assert values(results) == [(0.0, False), (0.0, False), (1.0, True)]
    assert results[0].observation == [{"role": "user", "content": "`f(3)` failed. It is false."}]
    assert "SyntaxError" in results[1].observation[0]["content"]
    assert results[2].info == {"tests_passed": 2, "tests": 2}
    for score, reward in (("fraction", 0.5), ("all", 0.0)):
        half = await played(Code(score=score), prompt, "def f(x): return 9")  # type: ignore[arg-type]
        assert values(half) == [(reward, True)]


@needs_sandbox
async def test_code_runs_other_languages_and_with_packages() -> None:
    double = [{"input": "4", "output": "8"}]
    shell = await played(Code(command=["sh"]), asking(double), "read x\necho $((x * 2))")
    assert values(shell) == [(1.0, True)]
    program = "import yaml\ndef f(text): return yaml.safe_load(text)"
    with_packages = await played(
        Code(packages=True), asking(["assert f('[1, 2]') == [1, 2]"]), program
    )
    assert values(with_packages) == [(1.0, True)]


@needs_sandbox
@pytest.mark.parametrize(("score", "value"), [("fraction", 0.5), ("all", 0.0)])
async def test_code_tests_scores_a_completion(score: Any, value: float) -> None:
    reward = CodeTests(score=score)
    await reward.setup()
    found = await reward.calculate(rollout("```\ndef f(x): return 9\n```", SQUARE))
    assert found.value == value
    await reward.close()


SOLUTION = "def f(x):\n    assert x\n    return x"
ROWS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"test": SQUARE, "answer": SOLUTION}, "no column `tests`, and its `answer` has no tests"),
    ({}, {"tests": f"{SOLUTION}\nassert f(3) == 9"}, "it defines all that it calls"),
    ({}, {"tests": "def check(f):\n    assert f(1)\ncheck(f)"}, "needs the column `entry_point`"),
    ({"column": "spec"}, {"tests": SQUARE}, "no column `spec`, .* its columns are tests;"),
    ({}, {"n": 3}, "no column `tests` and no `answer`, .* its columns are n;"),
    ({}, {"tests": "def x(:"}, "the tests are not valid Python: invalid syntax .*line 1"),
    ({}, {"tests": {"inputs": ["1"], "outputs": ["2", "3"]}}, "expected two equal-sized lists"),
    ({"type": "sql"}, {"answer": "SELEC 1"}, "'SELEC 1'"),
    ({"type": "sql"}, {"query": "SELECT 1"}, "the row has no `answer`, .* columns are query;"),
]


@needs_sandbox
@pytest.mark.parametrize(("keys", "row", "problem"), ROWS)
def test_all_rows_are_checked_before_the_run(
    keys: dict[str, Any], row: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    named = keys.get("column", "tests")
    good = {"prompt": "?", named: "for n in [1]:\n    assert f(n)", "answer": "SELECT 1"}
    rows = [good, {"prompt": "??", **row}, {**good, "prompt": "!"}]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    config: dict[str, Any] = {"prompts": str(path), "environment": {"type": "code", **keys}}
    message = rf"prompts: .*rows.jsonl, line 2: .*{problem}"
    with pytest.raises(ConfigError, match=message):
        assemble(parse_config(config))
    if "type" in keys:
        return
    rewards = [{"type": "code_tests", **keys}, {"type": "repetition"}]
    config.update(environment={"type": "single_turn"}, rewards=rewards)
    with pytest.raises(ConfigError, match=message):
        assemble(parse_config(config))
    rewards[0]["only_if"] = "repetition"  # the reward may not concern this row
    assemble(parse_config(config))


def test_checking_rows_ends_after_a_while_and_spares_environments_without_a_check(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(assembly_rows, "SECONDS", 0.0)
    prompts = [{"prompt": f"{n}?", "answer": "SELECT 1" if n < 2 else "SELEC"} for n in range(3)]
    config = parse_config({"prompts": prompts, "environment": {"type": "sql"}})
    assert any("only the first 1 of 3 rows" in text for text in assemble(config).warnings)
    assert row_checks(Echo(), Scorer([])) == ()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Code(attempts=0), "environment.attempts: got 0"),
        (lambda: Code(processes=0), "environment.processes: got 0"),
        (lambda: Code(limits={"memory": -1}), "environment.limits.memory: got -1"),
        (lambda: Code(limits={"memory": 0.5}), "environment.limits.memory: got 0.5"),
        (lambda: CodeTests(limits={"ram": 1}), "rewards.limits.ram:"),
        (lambda: Code(sandbox="own.py:Own"), r"environment.sandbox: .*own.py"),
        (lambda: CodeTests(sandbox="docker"), "rewards.sandbox: got 'docker'"),
        (lambda: Sql(seconds=0), "environment.seconds: got 0"),
        (lambda: Sql(database="nowhere.sql"), "environment.database:.*nowhere.sql"),
    ],
)
def test_a_wrong_key_is_an_error_at_the_start(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_a_file_that_is_no_database_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "x.sqlite").write_text("no database, but long enough" * 9)
    (tmp_path / "x.sql").write_text("CREATE nonsense")
    for name in ("x.sqlite", "x.sql"):
        with pytest.raises(ConfigError, match=r"environment.database: .*SQLite"):
            Sql(database=name, base_dir=tmp_path)


RIGHT = "SELECT name FROM products WHERE price > 20 ORDER BY price DESC"
PAIRS = "SELECT {} AS x, 'a' UNION ALL SELECT {}, 'b'"
MIXED = "SELECT 2 AS x UNION SELECT 'a' UNION SELECT NULL UNION SELECT 1.5 UNION SELECT x'61'"
QUERIES = [
    (RIGHT, "```sql\nselect name from products where price >= 24 order by -price;\n```", 1.0),
    (RIGHT, "SELECT name FROM products WHERE price > 20 ORDER BY price", 0.0),
    (RIGHT.split(" ORDER")[0], "SELECT name FROM products WHERE price > 20 ORDER BY price", 1.0),
    ("SELECT 0.1 + 0.2", "SELECT 0.3", 1.0),
    ("SELECT 1", "SELECT 1, 1", 0.0),
    ("SELECT 1", "SELECT 1 UNION ALL SELECT 1", 0.0),
    ("SELECT '1'", "SELECT 1", 0.0),
    ("SELECT 'a order by b' UNION SELECT 'c'", "SELECT 'c' UNION ALL SELECT 'a order by b'", 1.0),
    ("SELECT 12345678.91", "SELECT 12345678.94", 0.0),
    ("SELECT 1234567.891", "SELECT 1234567.894", 0.0),
    ("SELECT 1234567891", "SELECT 1234567891.0", 1.0),
    ("SELECT 1234567890123", "SELECT 1234567890124", 0.0),
    (PAIRS.format("0.1 + 0.2", 0.3), PAIRS.format(0.3, "0.1 + 0.2"), 1.0),
    (PAIRS.format(1234567890123, 1234567890124), PAIRS.format(1234567890124, 1234567890123), 0.0),
    (MIXED, f"SELECT * FROM ({MIXED}) ORDER BY x DESC", 1.0),
    (f"{MIXED} /* order by */", f"SELECT * FROM ({MIXED}) ORDER BY x DESC", 1.0),
    ("SELECT 1 AS [order by], 2 AS `order by`, 3 AS \"order by\" UNION SELECT 4, 5, 6",
     "SELECT 4, 5, 6 UNION ALL SELECT 1, 2, 3", 1.0),
    ("SELECT 1 AS x UNION SELECT 2 ORDER /* ( */ BY x", "SELECT 2 UNION ALL SELECT 1", 0.0),
    ("SELECT 1", "", 0.0),
    ("SELECT 1", "SELECT '\ud800'", 0.0),
]  # fmt: skip


async def test_a_query_is_right_if_its_result_is() -> None:
    given = [played(Sql(), asking(answer), query) for answer, query, _ in QUERIES]
    found = [values(results) for results in await asyncio.gather(*given)]
    assert found == [[(reward, True)] for *_, reward in QUERIES]


ENDLESS = "WITH RECURSIVE x(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM x)"
REJECTED = {
    "DELETE FROM products": "not authorized",
    "INSERT INTO products VALUES (9, 'x', 1)": "not authorized",
    "DROP TABLE products": "not authorized",
    "CREATE TEMP TABLE x (y)": "not authorized",
    "ATTACH '/tmp/x.sqlite' AS x": "not authorized",
    "PRAGMA writable_schema = 1": "not authorized",
    "VACUUM INTO '/tmp/x.sqlite'": "authorization denied",
    "SELECT load_extension('x')": "not authorized",
    "SELECT 1; DELETE FROM products": "one statement at a time",
    "SELECT length(zeroblob(1e9))": "too big",
    "SELECT x": "no such column",
    f"{ENDLESS} SELECT zeroblob(1e6) FROM x": "more than 16777216 bytes",
    f"{ENDLESS} SELECT sum(instr(zeroblob(2e5 + n), x'0001')) FROM x": "interrupted",
    f"{ENDLESS} SELECT sum(n) FROM x": "interrupted",
    f"{ENDLESS} SELECT n FROM x": "more than 99",
    "SELECT 2": "not the expected result:\n(2,)",
}


@pytest.mark.parametrize("file", [False, True])
async def test_a_query_only_reads_and_ends(tmp_path: Path, file: bool) -> None:
    path = tmp_path / "x #?.sqlite"
    connection = sqlite3.connect(path)
    connection.executescript("CREATE TABLE products (id, name, price);")
    connection.close()
    before = path.read_bytes()
    keys: dict[str, Any] = {"database": str(path)} if file else {}
    environment = Sql(attempts=99, seconds=0.2, rows=99, **keys)
    results = await played(environment, asking("SELECT 1"), *REJECTED, "SELECT 1")
    for (query, message), result in zip(REJECTED.items(), results, strict=False):
        assert message in result.observation[0]["content"], query
    assert values(results[-1:]) == [(1.0, True)]
    assert path.read_bytes() == before


BLOB = "replace(hex(zeroblob(6000)), '00', '{}')"
CALL = f"trim({BLOB.format('a')}, {BLOB.format('b')} || 'a')"
SLOW = f"SELECT {', '.join([CALL] * 2000)}"
"""Calls in one row, of which each takes a tenth of a second: minutes in total."""


async def test_a_query_that_looks_for_no_interruption_is_killed(monkeypatch: Any) -> None:
    monkeypatch.setattr("environments.sql.START_SECONDS", 0.8)
    [result] = await played(Sql(seconds=0.2, attempts=2), asking("SELECT 1"), SLOW)
    assert result.observation[0]["content"] == "error: interrupted"


async def test_a_query_whose_process_is_killed_is_no_wrong_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a process that leads its own group may kill that here."""
    killed = tmp_path / "killed.py"
    killed.write_text(
        "import os\nassert os.getpgid(0) == os.getpid()\nos.killpg(0, 9)\n", encoding="utf-8"
    )
    monkeypatch.setattr("environments._queries.__file__", str(killed))
    with pytest.raises(RuntimeError, match="signal 9 ended the process of the query"):
        await played(Sql(attempts=2), asking("SELECT 1"), "SELECT 1")


async def test_the_model_sees_the_tables_and_a_wrong_answer_is_an_error() -> None:
    environment = Sql()
    [system, user] = await environment.reset(asking("SELECT 1"))
    assert "CREATE TABLE customers" in system["content"]
    assert user["content"] == "?"
    with pytest.raises(ValueError, match=r"'SELEC 1'"):
        await environment.reset(asking("SELEC 1"))
