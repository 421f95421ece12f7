"""The built-in rewards: a table of cases for each, and their mistakes."""

from __future__ import annotations

import asyncio
import datetime
import json
import math
from pathlib import Path
from typing import Any

import pytest
from jsonschema.validators import validator_for
from trl.rewards import (
    accuracy_reward,
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)

from retrain.assembly import assemble
from retrain.config import DeadlinesConfig, RewardConfig, parse_config
from retrain.errors import ConfigError
from retrain.scoring.building import calculator_of, weighted_reward
from retrain.scoring.processes import ProcessReward
from retrain.types import Group, Row
from rewards.json_schema import CHECKING
from tests.reward_kit import built, rollout, scored

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
BOX = {"marker": "\\boxed"}
THINK = {"tags": ["think", "answer"]}
GOOD = "<think>so</think>\n<answer>4</answer>\n"
HALF = {"template": "Reason: ... Answer: ...", "partial": True}

CASES: dict[str, list[tuple[dict[str, Any], str, Any, float]]] = {
    "contains": [
        ({}, "it is Paris.", "Paris", 1),
        ({}, "it is paris.", "Paris", 0),
        ({"ignore_case": True}, "it is paris.", "Paris", 1),
        ({}, "14", 4, 1),
        ({"words": True}, "14", 4, 0),
        ({"words": True}, "so (4).", 4, 1),
        ({}, "a and b", ["b", "c"], 1),
        ({"match": "all"}, "a and b", ["b", "c"], 0),
        ({"strings": ["a", "b"], "match": "all"}, "b a", None, 1),
        ({"strings": "a.c"}, "abc", None, 0),
        ({"strings": "x"}, "", None, 0),
    ],
    "regex": [
        ({"pattern": r"\d+ km"}, "it is 42 km away", None, 1),
        ({"pattern": r"\d+ km"}, "it is far", None, 0),
        ({"pattern": r"\d+", "full": True}, " 42 ", None, 1),
        ({"pattern": r"\d+", "full": True}, "42 km", None, 0),
        ({"pattern": r"Answer: (\w+)", "group": 1}, "Answer: 3, no, Answer: 4", 4, 1),
        ({"pattern": r"Answer: (\w+)", "group": 1}, "Answer: 4, no, Answer: 3", 4, 0),
        ({"pattern": r"Answer: (?P<a>\w+)?", "group": "a"}, "Answer: ", "4", 0),
        ({"pattern": r"(\d)-(\d)", "group": 2, "full": True}, "3-4", "4", 1),
        ({"pattern": r"(?s)^a.b$"}, "a\nb", None, 1),
    ],
    "numeric": [
        ({}, "3 + 4 = 7", 7, 1),
        ({}, "7, no: 8.", 7, 0),
        ({}, "no number", 7, 0),
        ({}, "", "7", 0),
        ({}, "1,234,567.50", 1234567.5, 1),
        ({}, "1, 2, 3", 3, 1),
        ({}, "1,2,3", 3, 1),
        ({}, "it costs $-5", -5, 1),
        ({}, "it costs -$5", "-5", 1),
        ({}, "10-3", 3, 1),
        ({}, "10 - 3", 3, 1),
        ({}, "- 5 apples", 5, 1),
        ({}, "x = −3", -3, 1),
        ({}, "3/4", 0.75, 1),
        ({}, r"\frac{3}{4}", "0.75", 1),
        ({}, "0.75", "3/4", 1),
        ({}, "1/0", 1, 0),
        ({}, "50%", 50, 1),
        ({}, "50%", 0.5, 1),
        ({}, "0.5", "50%", 1),
        ({}, "50%", "5%", 0),
        ({}, "50%", 5, 0),
        ({}, "6.02e23", 6.02e23, 1),
        ({}, r"$6.02 \times 10^{23}$", 6.02e23, 1),
        ({}, "2 × 10^-3", 0.002, 1),
        ({}, "1e999", 1, 0),
        ({}, "9" * 5000, 9, 0),
        ({}, ".5", 0.5, 1),
        ({}, "It is 5.", 5, 1),
        ({}, r"10{,}000\,000", "10,000,000", 1),
        ({}, "1000001", 1000000, 0),
        ({}, "1000000007", 1000000008, 0),
        ({}, "1,000,000,007", "1000000008", 0),
        ({}, "1000000007.0", 1000000008, 0),
        ({}, "-2147483647", -2147483646, 0),
        ({}, "2147483647.00", 2147483647.0, 1),
        ({}, f"{2**60 + 1}", 2**60, 0),
        ({}, f"{2**60 + 1}", 2**60 + 1, 1),
        ({}, "1e9", 10**9, 1),
        ({"relative": 1e-9}, "1000000007", 1000000008, 1),
        ({"absolute": 1.0}, "1000000007", 1000000008, 1),
        ({}, "10^3", 3, 0),
        ({}, "10^3", 10, 0),
        ({}, "2^{10}", 10, 0),
        ({}, "2^{-10}", -10, 0),
        ({}, "2^{3 + 7}", 7, 0),
        ({}, "(10)^3", 10, 0),
        ({}, "2**10", 10, 0),
        ({}, r"\sqrt{2}", 2, 0),
        ({}, r"\sqrt[3]{2}", 2, 0),
        ({}, r"\sqrt{1 + 2}", 2, 0),
        ({}, r"3\sqrt{2}", 3, 0),
        ({}, "√2", 2, 0),
        ({}, "x_1", 1, 0),
        ({}, "x_{12}", 12, 0),
        ({}, "x^2 = 5", 5, 1),
        ({}, r"\sqrt{16 + 9} = 5", 5, 1),
        ({}, "25 m^2", 25, 1),
        ({}, r"$25\,\text{m/s}^{2}$", 25, 1),
        ({}, "25 apples for x_1", 25, 1),
        ({}, r"16 squares. The side is \sqrt{16}", 16, 0),
        ({}, "16 squares. The side is 2^{4}", 16, 0),
        ({}, "16 squares. The side is 1/0", 16, 0),
        ({"marker": "####"}, "#### 42\n\n**2 apples**", 42, 1),
        ({}, "42\n\n____", 42, 1),
        ({}, "**72**", 72, 1),
        ({}, "_72_", 72, 1),
        ({}, "_The final answer is 42_", 42, 1),
        ({}, "12 apples.\n\n__The answer is 42__", 42, 1),
        ({}, "_42 apples_", 42, 1),
        ({}, r"45^\circ", 45, 1),
        ({}, "it is _72_.", 72, 1),
        ({"relative": 0.01}, "1000001", 1000000, 1),
        ({"absolute": 0.5}, "3.4", 3, 1),
        ({"absolute": 0.5}, "3.6", 3, 0),
        ({}, "so 72", "She sold 48/2 = <<48/2=24>>24. 48+24 = 72\n#### 72", 1),
        ({"marker": "####"}, "1 2\n#### 72 apples, 3 left", "#### 72", 1),
        ({"marker": "####"}, "72", 72, 0),
        ({"marker": "####"}, "#### none", 72, 0),
        ({"marker": "Answer:"}, "Answer: 1. Answer: 2 of 9", 2, 1),
        (BOX, r"\boxed{5} so \boxed{x = \frac{1}{2}} and 7", 0.5, 1),
        (BOX, r"\boxed{5", 5, 0),
        (BOX, r"\boxed{} 5", 5, 0),
    ],
    "math": [
        ({}, "The answer is $\\frac{1}{2}$.", "1/2", 1),
        ({}, "so 0.5", r"\frac{1}{2}", 1),
        ({}, r"\boxed{\frac{2}{4}}", r"$\frac{1}{2}$", 1),
        ({}, r"\boxed{3}", 4, 0),
        ({"boxed": True}, r"so \boxed{\frac{1}{2}} it is", r"\frac{1}{2}", 1),
        ({"boxed": True}, r"\boxed{\left\{1, 2\right\}}", r"\{1,2\}", 1),
        ({"boxed": True}, r"\boxed{3}, no: \boxed{4 or", 4, 0),
        ({"boxed": True}, r"\boxed 4", 4, 1),
        ({"boxed": True}, r"\boxed{4 \\} x", r"4 \\", 1),
        ({}, r"\boxed{\$18.90}", r"\$18.90", 1),
        ({}, r"\boxed{32348}", r"\$32,\!348", 1),
        ({}, r"\boxed{5}", r"$\$5$", 1),
        ({}, r"$\begin{pmatrix}1\\2\end{pmatrix}$", r"\begin{pmatrix}1\\[2mm]2\end{pmatrix}", 0),
        ({"boxed": True}, "4 {} is it", 4, 0),
        ({}, "I don't know", 4, 0),
        ({}, "", 4, 0),
        ({}, "1,234", 1234, 1),
        ({}, "$x^2+2x+1$", "(x+1)^2", 1),
        ({}, "$x^2+2x$", "(x+1)^2", 0),
        ({}, r"$[0, 1)$", "[0,1)", 1),
        ({}, r"$(0, 1)$", "[0,1)", 0),
        ({}, r"$\{2, 1\}$", r"\{1,2\}", 1),
        ({}, r"$\sqrt{8}$", r"2\sqrt{2}", 1),
        ({}, "72", "#### 72", 1),
        ({"boxed": True}, "it is 4", 4, 0),
        ({"boxed": True}, r"3, so \boxed{4}", 4, 1),
    ],
    "json_schema": [
        ({"schema": SCHEMA}, '{"n": 1}', None, 1),
        ({"schema": SCHEMA}, ' {"n": 1}\n', None, 1),
        ({"schema": SCHEMA}, '{"n": "1"}', None, 0),
        ({"schema": SCHEMA}, '{"n": 1, "m": 2}', None, 0),
        ({"schema": SCHEMA}, '{"n": 1} done', None, 0),
        ({"schema": SCHEMA}, "", None, 0),
        ({"schema": {}}, "NaN", None, 0),
        ({"schema": {}}, "[" * 100_000, None, 0),
        ({"schema": {"multipleOf": 0.01}}, "1e400", None, 0),
        ({"schema": SCHEMA}, '```json\n{"n": 1}\n```', None, 0),
        ({"schema": SCHEMA, "fenced": True}, 'so\n```json\n{"n": 1}\n```\ndone', None, 1),
        ({"schema": SCHEMA, "fenced": True}, '```\n{}\n```\n```{"n":\n1}```', None, 1),
        ({"schema": SCHEMA, "fenced": True}, '```\n{"n": 1}\n``` and ```\n{}', None, 1),
        ({"schema": SCHEMA, "fenced": True}, '{"n": 1}', None, 1),
        ({"column": "schema"}, '"a"', None, 1),
        ({"column": "schema"}, "1", None, 0),
    ],
    "format": [
        (THINK, GOOD, None, 1),
        (THINK, f"So: {GOOD}", None, 0),
        (THINK, f"{GOOD}!", None, 0),
        (THINK, "<think></think><answer>4</answer>", None, 0),
        (THINK, "<answer>4</answer><think>so</think>", None, 0),
        (THINK, "<think>so</think> <think>so</think><answer>4</answer>", None, 0),
        (THINK, "<think>so</think> then <answer>4</answer>", None, 0),
        (THINK, "", None, 0),
        (THINK | {"partial": True}, GOOD, None, 1),
        (THINK | {"partial": True}, f"So: {GOOD}", None, 0.8),
        (THINK | {"partial": True}, "<think>so</think>4", None, 0.4),
        (THINK | {"partial": True}, "4", None, 0),
        (THINK | {"opened": True}, GOOD.removeprefix("<think>"), None, 1),
        (THINK | {"opened": True}, GOOD, None, 0),
        ({"template": "<think>...</think>..."}, "<think>so</think>4", None, 1),
        ({"template": "<think>...</think>..."}, "<think>so</think> ", None, 0),
        ({"tags": ["think"]}, "<think>so</think>4", None, 1),
        ({"tags": ["think"]}, "<think>so</think>", None, 0),
        ({"tags": ["think"], "opened": True}, "so</think>4", None, 1),
        ({"tags": ["think"], "opened": True}, "so</think> ", None, 0),
        ({"tags": ["think"], "opened": True}, "so", None, 0),
        ({"tags": ["answer"]}, "<answer>4</answer>4", None, 0),
        (HALF, "Reason: so\nAnswer: 4", None, 1),
        (HALF, "Answer: 4", None, 1 / 3),
    ],
    "length": [
        ({"target": 4, "unit": "words"}, "a b c d", None, 1),
        ({"target": 4, "unit": "words"}, "a b c", None, 0.75),
        ({"target": 4, "unit": "words"}, "a " * 99, None, 0),
        ({"target": 4, "unit": "characters"}, "", None, 0),
        ({"target": 4}, "abcde", None, 0.75),
    ],
    "length_overlong": [
        ({"max": 10, "cache": 4}, "x" * 6, None, 0),
        ({"max": 10, "cache": 4}, "x" * 7, None, -0.25),
        ({"max": 10, "cache": 4}, "x" * 10, None, -1),
        ({"max": 10, "cache": 4}, "x" * 99, None, -1),
        ({"max": 4, "cache": 4, "unit": "words"}, "a b", None, -0.5),
    ],
    "repetition": [
        ({}, "abcdef", None, 0),
        ({}, "ab", None, 0),
        ({"ngram": 1}, "aaaa", None, -0.75),
        ({"ngram": 2}, "abab", None, -1 / 3),
        ({"ngram": 2, "unit": "words"}, "so it is so It", None, -0.25),
        ({"unit": "words"}, "", None, 0),
    ],
}


async def value(name: str, keys: dict[str, Any], text: str, answer: Any) -> Any:
    calculator = built(name, **keys)
    await calculator.setup()
    return await calculator.calculate(rollout(text, answer, schema={"type": "string"}))


@pytest.mark.parametrize("name", CASES)
async def test_each_case_of_a_reward(name: str) -> None:
    got = [await value(name, keys, text, answer) for keys, text, answer, _ in CASES[name]]
    wrong = [
        (case, given)
        for case, given in zip(CASES[name], got, strict=True)
        if not math.isclose(given, case[3], abs_tol=1e-9)
    ]
    assert not wrong


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"type": "contains", "strings": []}, "at least one"),
        ({"type": "regex", "pattern": "("}, r"pattern: got '\('"),
        ({"type": "regex", "pattern": "a", "group": "b"}, "group is b"),
        ({"type": "regex", "pattern": "a", "timeout": 0.0}, "> 0"),
        ({"type": "numeric", "absolute": -1.0}, "tolerances >= 0"),
        ({"type": "math", "timeout": 0}, ">= 1"),
        ({"type": "json_schema"}, "either schema or column"),
        ({"type": "json_schema", "schema": "none.json"}, "none.json"),
        ({"type": "json_schema", "schema": {"type": "text"}}, "the schema is invalid at"),
        ({"type": "format"}, "either tags or template"),
        ({"type": "format", "template": "Answer:"}, "expected a template such as"),
        ({"type": "length", "target": 0}, ">= 1"),
        ({"type": "length_overlong", "max": 4, "cache": 8}, "0 < cache <= max"),
        ({"type": "length_cosine", "max": 4}, "correct_if"),
        ({"type": "repetition", "ngram": 0}, ">= 1"),
        ({"type": "repetition", "n": 4}, "n"),
    ],
)
def test_a_wrong_key_is_an_error_at_once(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        built(**keys)


@pytest.mark.parametrize(
    ("name", "package", "command"),
    [("math", "math_verify", r"\[math\]"), ("regex", "regex", r"\[remote\]")],
)
def test_a_missing_package_is_an_error_with_the_install_command(
    name: str, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    keys = {"pattern": "a"} if name == "regex" else {}
    with pytest.raises(ConfigError, match=rf"is not installed .*: pip install .*{command}"):
        built(name, **keys)


@pytest.mark.parametrize("name", ["contains", "numeric", "math"])
async def test_a_row_without_an_answer_is_an_error(name: str) -> None:
    assert built(name).needs_answer
    assert not built("contains", strings="a").needs_answer
    with pytest.raises(ValueError, match="answer"):
        await value(name, {}, "4", None)


def test_an_answer_without_a_number_is_found_before_the_run() -> None:
    numeric, user = built("numeric", marker="####"), {"role": "user", "content": "2+2="}
    for answer in (4, "#### 4", "4", None):
        numeric.check_row(Row((user,), answer))
    with pytest.raises(ValueError, match="'four'"):
        numeric.check_row(Row((user,), "four"))


@pytest.mark.parametrize(
    ("keys", "row", "problem"),
    [
        ({"type": "contains"}, {"answer": []}, "got the strings [], expected at least one"),
        ({"type": "json_schema", "column": "schema"}, {}, "column `schema` is missing"),
        (
            {"type": "json_schema", "column": "schema"},
            {"schema": "{'type': 'object'}"},
            """the schema "{'type': 'object'}" is not valid JSON: Expecting property name""",
        ),
        (
            {"type": "json_schema", "column": "schema"},
            {"schema": {"type": "text"}},
            "the schema is invalid at $.type: 'text' is not valid under any",
        ),
        (
            {"type": "json_schema", "column": "schema"},
            {"schema": 5},
            "the schema is '5', expected a m",
        ),
    ],
)
def test_a_row_that_can_t_be_scored_is_found_before_the_run(
    keys: dict[str, Any], row: dict[str, Any], problem: str
) -> None:
    good = {"prompt": "1", "answer": "$\\frac{1}{2}$", "schema": '{"type": "string"}'}
    rows = [good, {**good, "answer": 5}, {**good, "answer": None}, {"prompt": "2", **row}]
    with pytest.raises(ConfigError) as caught:
        assemble(parse_config({"prompts": rows, "rewards": [keys]}))
    [text] = caught.value.problems
    assert text.startswith(f"prompts: the list, row 3: {problem}")
    assemble(parse_config({"prompts": rows[:3], "rewards": [keys]}))


def test_a_few_answers_that_math_can_t_read_are_listed_and_many_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = ["", "\\boxed{72"]
    ordinary = ["72", r"\$5", r"\$32,\!348", r"\begin{pmatrix}1\\[2mm]2\end{pmatrix}", "$x$"]

    def checked(answers: list[str]) -> list[str]:
        caplog.clear()
        rows = [{"prompt": "1", "answer": answer} for answer in answers]
        assemble(parse_config({"prompts": rows, "rewards": ["math"]}))
        return caplog.messages

    assert checked(ordinary) == []
    assert checked([*ordinary, *broken]) == [
        f"reward 'math': the prompt's answer {answer!r} can't be read as a mathematical "
        "expression, so its rollouts will fail"
        for answer in broken
    ]
    warned = checked([*ordinary * 4, *broken * 6])
    assert len(warned) == 5
    assert warned[-1].endswith("rollouts will fail. No further answers are listed")
    assert len(checked([*[""] * 100, *ordinary])) == 5  # sorted
    with pytest.raises(ConfigError) as caught:
        checked([*ordinary, *[""] * 140])
    [text] = caught.value.problems
    assert text.startswith("prompts: the list, row 105, ")
    assert text.endswith("the prompt's answer '' can't be read as a mathematical expression")


def test_checking_schemas_is_quick_and_does_not_delay_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nested: dict[str, Any] = {"type": "object", "properties": {f"p{n}": SCHEMA for n in range(8)}}
    calculator = built("json_schema", column="schema")
    made: list[Any] = []
    monkeypatch.setitem(
        type(calculator).of_row.__globals__["_validator"].__globals__,
        "validator_for",
        lambda schema: made.append(schema) or validator_for(schema),
    )
    user = {"role": "user", "content": "?"}
    for _ in range(50):
        calculator.check_row(Row((user,), metadata={"schema": nested}))
        nested = dict(reversed(nested.items()))
    assert len(made) == 1
    date = {"const": datetime.date(2020, 1, 1)}  # as in YAML; it can't be a key of the cache
    calculator.check_row(Row((user,), metadata={"schema": date}))
    assert len(made) == 2
    assert 0 < CHECKING - calculator.checking < CHECKING
    calculator.checking = -1.0
    calculator.check_row(Row((user,), metadata={"schema": {"type": "text"}}))
    assert len(made) == 2


async def test_a_pattern_that_backtracks_forever_is_late_and_blocks_nothing() -> None:
    pattern = built("regex", pattern="(a|aa)+$", timeout=0.3)
    task = asyncio.create_task(pattern.calculate(rollout("a" * 60 + "b")))
    ticks = 0
    while not task.done():
        await asyncio.sleep(0)
        ticks += 1
    assert (await task).outcome == "timeout"
    assert ticks > 10  # the event loop ran meanwhile


async def test_math_runs_in_processes_of_its_own_and_agrees_with_trl() -> None:
    texts = [text for _, text, _, _ in CASES["math"]] + [r"\boxed{50\%}", r"\boxed{1,234}"]
    boxed = [rf"I say \boxed{{{text}}}" for text in ("1/2", r"\frac{2}{4}", "3", "x", "")]
    answer = r"\frac{1}{2}"
    group = Group(rollout("", answer).prompt, [rollout(t, answer) for t in [*texts, *boxed]])
    said = [[{"role": "assistant", "content": t.completion}] for t in group.trajectories]
    theirs = accuracy_reward(said, [f"${answer}$"] * len(said))
    ours = await scored(group, Path(), {"type": "math", "processes": 1})
    # TRL reads LaTeX only: "so 0.5" is not read
    differ = [t.completion for t, other in zip(ours, theirs, strict=True) if t.reward != other]
    assert differ == ["so 0.5"]
    part = weighted_reward(RewardConfig(type="math"), "rewards", Path(), DeadlinesConfig())
    assert isinstance(part.calculator, ProcessReward)  # without the key too


async def test_a_schema_can_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "n.json").write_text(json.dumps(SCHEMA))
    section = RewardConfig(type="json_schema", schema="n.json")
    calculator = calculator_of(section, "rewards", tmp_path)
    assert await calculator.calculate(rollout('{"n": 1}')) == 1.0


async def test_a_comparison_that_takes_too_long_is_no_reward() -> None:
    hard = r"\boxed{\int_0^1 e^{\sin(x^{17}) + \cos(x^{x})} dx}"
    calculator = built("math", timeout=1)
    await calculator.setup()
    assert (
        await calculator.calculate(rollout(hard, hard.replace("17", "19")))
    ).outcome == "timeout"


async def test_cosine_overlong_and_repetition_agree_with_trl() -> None:
    texts = ["x" * n + r"\boxed{4}" for n in (0, 1, 5, 20, 50)] + ["x" * n for n in (0, 9, 30, 99)]
    ids = [list(text) for text in texts]
    said = [[{"role": "assistant", "content": text}] for text in texts]
    theirs = [
        get_cosine_scaled_reward(max_len=40)(said, ["$4$"] * len(texts), ids),
        get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=30)(ids),
        get_repetition_penalty_reward(ngram_size=2)(ids),
    ]
    group = Group(rollout("", 4).prompt, [rollout(text, 4) for text in texts])
    ours = await scored(
        group,
        Path(),
        {"type": "length_cosine", "max": 40, "correct_if": "numeric"},
        {"type": "numeric", "marker": "\\boxed"},
        {"type": "length_overlong", "max": 40, "cache": 30},
        {"type": "repetition", "ngram": 2},
    )
    for name, expected in zip(
        ("length_cosine", "length_overlong", "repetition"), theirs, strict=True
    ):
        assert [t.rewards[name] for t in ours] == pytest.approx(expected)
    assert ours[0].reward == pytest.approx(sum(ours[0].rewards.values()))


async def test_cosine_has_a_reward_for_the_limit_and_needs_the_other_reward() -> None:
    [late] = await scored(
        Group(rollout("", 4).prompt, [rollout("4" * 9, 4)]),
        Path(),
        {"type": "numeric"},
        {"type": "length_cosine", "max": 9, "correct_if": "numeric", "exceeded": -10},
    )
    assert late.rewards["length_cosine"] == -10
    with pytest.raises(ConfigError, match="'numeric'"):
        await scored(
            Group(rollout("").prompt, []),
            Path(),
            {"type": "length_cosine", "max": 9, "correct_if": "numeric"},
        )


async def test_format_and_regex_read_the_whole_reply() -> None:
    said = rollout("<think>so</think>4")
    said.result = "4"  # what `completion` is, with the reasoning split off
    assert await built("format", template="<think>...</think>...").calculate(said) == 1.0
    assert await built("regex", pattern="think", reasoning=True).calculate(said) == 1.0
    assert await built("regex", pattern="think").calculate(said) == 0.0
