"""The built-in environments, turn by turn, and the data that goes with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from environments.guess_number import GuessNumber
from retrain import Action, Prompt, StepResult
from retrain.check import check_subject

ROOT = Path(__file__).resolve().parent.parent


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
        environment, guess = GuessNumber(), 4
        await environment.reset(asking("1-7?", secret))
        for step in (2, 1, 0):
            result = await environment.step(Action(str(guess)))
            if result.terminated:
                break
            guess += -step if hint(result) == "<" else step
        assert result.reward == 1.0


@pytest.mark.parametrize("secret", [0, 8, None, "aaaa"])
async def test_a_secret_out_of_range_is_an_error_that_names_it(secret: object) -> None:
    with pytest.raises(ValueError, match=rf"answer is {secret!r}, expected a number from 1 to 7"):
        await guessing(secret)


@pytest.mark.parametrize("keys", [{"low": 7}, {"guesses": 0}])
def test_a_game_that_cannot_be_played_is_refused(keys: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="expected high > low"):
        GuessNumber(**keys)


@pytest.mark.parametrize("name", ["configs/quickstart.yaml", "configs/guess_number.yaml"])
async def test_the_environments_of_the_configs_keep_what_an_environment_promises(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    findings = await check_subject(name)
    assert [str(finding) for finding in findings if not finding.good] == []
