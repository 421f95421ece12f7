"""The built-in environments, turn by turn, and the data that goes with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from environments.calculator import Calculator, calculate
from environments.guess_number import GuessNumber
from retrain import Action, Prompt, StepResult
from retrain.chat.formats.hermes import Hermes
from retrain.chat.tools import parse_reply
from retrain.check import check_subject

ROOT = Path(__file__).resolve().parent.parent
CALL = '<tool_call>{"name": "calc", "arguments": {"x": "1+2"}}</tool_call>'
WRONG_NAME = CALL.replace("calc", "cos")


def asking(text: str, answer: object = None) -> Prompt:
    return Prompt("0.0.0", [{"role": "user", "content": text}], answer)


async def guessing(secret: object, *guesses: str, **keys: int) -> list[StepResult]:
    """What the environment says to each guess."""
    environment = GuessNumber(**keys)
    await environment.reset(asking("1-7?", secret))
    return [await environment.step(Action(guess)) for guess in guesses]


def hint(result: StepResult) -> str:
    [message] = result.observation
    return message["content"]


async def test_a_guess_is_told_on_which_side_the_secret_is() -> None:
    results = await guessing(5, "4", " 6\n", "5")
    assert [hint(result) for result in results[:2]] == [">", "<"]
    assert results[2] == StepResult([], 1.0, True, False, {"guesses": 3})
    assert [result.reward for result in results[:2]] == [0.0, 0.0]


async def test_an_early_hit_ends_the_episode() -> None:
    assert await guessing("3", "3") == [StepResult([], 1.0, True, False, {"guesses": 1})]


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "8", "4.0", "4 4", "²", "9" * 5000])
async def test_what_is_no_number_of_the_range_costs_a_guess(text: str) -> None:
    results = await guessing(4, text, text, text)
    assert [hint(result) for result in results[:2]] == ["?", "?"]
    assert results[2] == StepResult([], 0.0, True, False, {})


@pytest.mark.parametrize(("last", "reward"), [("1", 0.0), ("4", 0.25), ("6", 0.5 * 5 / 6)])
async def test_out_of_guesses_the_last_one_earns_up_to_half_by_its_closeness(
    last: str, reward: float
) -> None:
    *_, result = await guessing(7, "1", "1", last)
    assert result.reward == pytest.approx(reward)
    assert result.terminated


async def test_halving_always_wins() -> None:
    for secret in range(1, 8):
        environment = GuessNumber()
        await environment.reset(asking("1-7?", secret))
        low, high, won = 1, 7, False
        while not won:
            guess = (low + high) // 2
            result = await environment.step(Action(str(guess)))
            won = result.reward == 1.0
            assert won or not result.terminated
            if not won:
                low, high = (low, guess - 1) if hint(result) == "<" else (guess + 1, high)


@pytest.mark.parametrize("secret", [0, 8, None, "aaaa"])
async def test_a_secret_out_of_range_is_an_error_that_names_it(secret: object) -> None:
    with pytest.raises(ValueError, match=rf"answer is {secret!r}, expected a number from 1 to 7"):
        await guessing(secret)


@pytest.mark.parametrize("keys", [{"low": 7}, {"guesses": 0}])
def test_a_game_that_cannot_be_played_is_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected high > low"):
        GuessNumber(**keys)


def said(text: str) -> Action:
    """The action of a reply, as the pipe makes it."""
    reply = parse_reply(text, Calculator.tools, Hermes())
    return Action(reply.text, reply.calls)


async def calculating(*replies: str, attempts: int = 3) -> list[StepResult]:
    environment = Calculator(attempts)
    await environment.reset(asking("1+2="))
    return [await environment.step(said(reply)) for reply in replies]


async def test_a_call_is_answered_and_an_answer_ends_the_episode() -> None:
    called, answered = await calculating(CALL, "3")
    assert called.observation == [{"role": "tool", "content": "3", "tool_call_id": "call00000"}]
    assert not called.terminated
    assert answered == StepResult([], 0.0, True, False, {"failed_calls": 0})


async def test_each_call_of_a_turn_gets_an_answer_of_its_own() -> None:
    [result] = await calculating(CALL + "and" + CALL.replace("1+2", "8/4") + WRONG_NAME)
    ids = [message["tool_call_id"] for message in result.observation]
    contents = [message["content"] for message in result.observation]
    assert ids == ["call00000", "call00001", "call00002"]
    assert contents == ["3", "2", "error: there is no tool 'cos': the tools are calc"]
    assert result.info == {"failed_calls": 1}


@pytest.mark.parametrize(
    ("reply", "complaint"),
    [
        ("<tool_call>", "error: <tool_call> without </tool_call>"),
        ("<tool_call>{1}</tool_call>", "error: the call is not valid JSON"),
        (CALL.replace('"x"', '"y"'), "error: arguments: 'x' is a required property"),
        (CALL.replace('"1+2"', "3"), "error: arguments.x: 3 is not of type 'string'"),
        (CALL.replace("1+2", "1/0"), "error: division by zero"),
        (CALL.replace("1+2", "1+"), "error: invalid syntax"),
        (CALL.replace("1+2", "print(1)"), "error: an expression is"),
        (WRONG_NAME, "error: there is no tool 'cos'"),
    ],
)
async def test_a_call_that_fails_is_explained_and_may_be_tried_again(
    reply: str, complaint: str
) -> None:
    failed, called = await calculating(reply, CALL)
    assert failed.observation[0]["role"] == "tool"
    assert hint(failed).startswith(complaint)
    assert not failed.terminated
    assert hint(called) == "3"


async def test_the_last_attempt_ends_the_episode_and_the_next_one_starts_afresh() -> None:
    assert [r.terminated for r in await calculating(WRONG_NAME, CALL, WRONG_NAME, attempts=2)] == [
        False, False, True,
    ]  # fmt: skip
    environment = Calculator(attempts=1)
    for _ in range(2):
        await environment.reset(asking("1+2="))
        assert not (await environment.step(said(CALL))).terminated
        assert (await environment.step(said(WRONG_NAME))).info == {"failed_calls": 1}
    with pytest.raises(ValueError, match="got attempts 0, expected at least 1"):
        Calculator(attempts=0)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("7", "7"), (" 2 + 3 * 4 ", "14"), ("(2+3)*4", "20"), ("-2--3", "1"), ("0.1+0.2", "3/10"),
        ("1/3/2", "1/6"), ("123456789*987654321", "121932631112635269"), ("1.50", "3/2"),
        ("(" * 90 + "1" + ")" * 90, "1"), ("-" * 199 + "1", "-1"),
    ],
)  # fmt: skip
def test_expressions_are_worked_out_exactly(expression: str, value: str) -> None:
    assert str(calculate(expression)) == value


@pytest.mark.parametrize(
    "expression",
    ["", "1 2", "2**9", "9" * 201, "7//2", "1,2", "()", "1(2)", "...", "1e9", "1_0", "x", "1\n+1",
     "\0", "(" * 200, "0.0.0"],
)  # fmt: skip
def test_anything_else_is_a_value_error_or_a_syntax_error(expression: str) -> None:
    with pytest.raises((ValueError, SyntaxError)):
        calculate(expression)


async def test_the_calculators_data_says_what_the_calculator_says() -> None:
    environment, offered = (
        Calculator(),
        [tool.as_template()["function"] for tool in Calculator.tools],
    )
    asked = {}
    for row in rows_of("calculator_demonstrations"):
        ask, call, heard, answer = row["messages"]
        assert row["tools"] == offered
        await environment.reset(asking(ask["content"]))
        assert hint(await environment.step(said(call["content"]))) == heard["content"]
        asked[ask["content"]] = answer["content"]
    assert asked == {row["prompt"]: row["answer"] for row in rows_of("calculator")}


def rows_of(name: str) -> list[dict[str, Any]]:
    text = (ROOT / "data" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "name", ["configs/quickstart.yaml", "configs/guess_number.yaml", "calculator"]
)
async def test_the_environments_of_the_configs_keep_what_an_environment_promises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    findings = await check_subject(name)
    assert [str(finding) for finding in findings if not finding.good] == []
