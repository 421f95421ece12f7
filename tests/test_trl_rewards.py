"""Reward functions written for TRL: they get what TRL's trainer gives them, and count as there."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerState
from trl import GRPOTrainer

from retrain.assembly import assemble
from retrain.check import tried_rewards
from retrain.config import DeadlinesConfig, PromptsConfig, RewardConfig, RunConfig, parse_config
from retrain.errors import ConfigError, PluginError
from retrain.prompts import ListPrompts
from retrain.prompts.preparing import prepared
from retrain.scoring.building import weighted_reward
from retrain.types import Completion, Group, Prompt, Ticket, Trajectory, Turn
from tests.reward_kit import scored

TEXTS = (
    "<think>\nhalf\n</think>\nIt is \\boxed{\\frac{1}{2}}",
    "<think>half</think> \\boxed{\\frac{1}{3}}",
    "\\boxed{\\frac{2}{4}}",
    "",
)
ROW = {"solution": "$\\frac{1}{2}$", "level": 3}
FUNCTIONS = """
import threading

calls = []


def right(prompts, completions, completion_ids, level, trainer_state, **kwargs):
    calls.append((prompts, completions, completion_ids, level, trainer_state.global_step, kwargs))
    return [float(len(ids)) for ids in completion_ids]


def some(completions: list[str], level, bonus=1.0, log_metric=None, log_extra=None):
    log_metric("share", 0.25)
    log_extra("size", [len(c) for c in completions])
    return [None if "3" in c else bonus for c in completions]


async def later(completions: list[list[dict[str, str]]], answer):
    return [float(answer == c[0]["content"]) for c, answer in zip(completions, answer)]


def short(completions, **kwargs):
    return [1.0]


def number(completions, **kwargs):
    return 1.0


def content(completions, **kwargs):
    return [len(c[0]["content"]) for c in completions]


def main_thread(completions, **kwargs):
    return [float(threading.current_thread() is threading.main_thread()) for _ in completions]


def none(completions, **kwargs):
    return [None] * len(completions)


def made(size):
    def by_size(completion_ids, **kwargs):
        return [len(ids) / size for ids in completion_ids]

    return by_size


class Made:
    def __call__(self, completions, **kwargs):
        return [0.5] * len(completions)


an_object = Made()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    return tmp_path


def played(*texts: str, system: str | None = "Be brief.", answer: Any = None, **row: Any) -> Group:
    """Rollouts of one turn; a prompt with a system message is conversational."""
    messages = [{"role": "user", "content": "What is half?"}]
    if system:
        messages.insert(0, {"role": "system", "content": system})
    prompt = Prompt("0.0.0", messages, answer, row, plain=not system)
    group = Group(prompt, [])
    for text in texts:
        ids = [ord(character) for character in text]
        turn = Turn([1, 2], Completion(ids, [0.0] * len(ids), text, "stop", 4))
        said = [*messages, {"role": "assistant", "content": text}]
        group.trajectories.append(Trajectory(prompt, [turn], messages=said))
    return group


def of_trl(function: Any, group: Group, conversational: bool) -> list[float]:
    """What the function gives in TRL's own trainer: NaN for None."""
    logged: dict[str, Any] = {}
    trainer = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu", is_main_process=False),
        reward_funcs=[function],
        reward_processing_classes=[None],
        reward_func_names=["f"],
        state=TrainerState(global_step=4),
        environments=None,
        args=SimpleNamespace(report_to=[]),
        _log_completion_extra=logged.__setitem__,
        _log_metric=logged.__setitem__,
        _metrics={},
    )
    texts = [t.completion for t in group.trajectories]
    prompt = group.prompt
    prompts = [list(prompt.messages) if conversational else prompt.text for _ in texts]
    said = [[{"role": "assistant", "content": t}] if conversational else t for t in texts]
    row = {**prompt.metadata, **({} if prompt.answer is None else {"answer": prompt.answer})}
    inputs = [{"prompt": p, **row} for p in prompts]
    ids = [list(t.turns[-1].completion.token_ids) for t in group.trajectories]
    values = GRPOTrainer._calculate_rewards(trainer, inputs, prompts, said, ids)
    assert isinstance(values, torch.Tensor)
    return [float(value) for value in values[:, 0]]


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("think_format_reward", {}),
        ("accuracy_reward", {}),
        ("reasoning_accuracy_reward", {}),
        ("get_soft_overlong_punishment", {"max_completion_len": 40, "soft_punish_cache": 30}),
        ("get_repetition_penalty_reward", {"ngram_size": 2}),
        ("get_cosine_scaled_reward", {"max_len": 50}),
    ],
)
async def test_trls_own_functions_give_what_they_give_in_trl(
    name: str, keys: dict[str, Any], folder: Path
) -> None:
    import trl.rewards

    function = getattr(trl.rewards, name)
    function = function(**keys) if keys else function
    for solution in (ROW["solution"], "no mathematics"):
        group = played(*TEXTS, **{**ROW, "solution": solution})
        expected = of_trl(function, group, conversational=True)
        ours = await scored(group, folder, {"type": f"trl.rewards:{name}", **keys})
        for trajectory, value in zip(ours, expected, strict=True):
            assert trajectory.outcome == ("invalid" if math.isnan(value) else "ok")
            assert trajectory.reward == pytest.approx(0.0 if math.isnan(value) else value)


@pytest.mark.parametrize("conversational", [True, False])
async def test_a_function_gets_what_trl_gives_it(conversational: bool, folder: Path) -> None:
    group = played("a", "bcd", system="S" if conversational else None, answer=7, level=3, x="y")
    ours = await scored(group, folder, {"type": "mine.py:right"})
    assert [t.rewards["right"] for t in ours] == [1.0, 3.0]
    part = weighted_reward(RewardConfig(type="mine.py:right"), "r", folder, DeadlinesConfig())
    function = part.calculator.function
    of_trl(function, group, conversational)
    ours_got, trl_got = function.__globals__["calls"]
    assert ours_got[:5] == trl_got[:5]
    extras = {"log_extra", "log_metric"}
    assert set(ours_got[5]) == set(trl_got[5]) == {"answer", "x", *extras}
    assert {k: v for k, v in ours_got[5].items() if k not in extras} == {
        k: v for k, v in trl_got[5].items() if k not in extras
    }


async def test_none_leaves_a_function_out_and_logs_become_components(folder: Path) -> None:
    group = played("23", "4", level=1, answer="4")
    without, beside = await scored(
        group,
        folder,
        {"type": "mine.py:some", "bonus": 2.0, "weight": 0.5},
        {"type": "mine.py:later"},
    )
    assert without.rewards == {"later": 0.0}
    assert beside.rewards == {"some": 2.0, "some.share": 0.25, "later": 1.0}
    assert (without.reward, beside.reward, beside.info["size"]) == (0.0, 2.0, 1)
    [alone] = await scored(played("23", level=1), folder, {"type": "mine.py:none"})
    assert (alone.outcome, alone.info["error"]) == ("invalid", "no reward applies to this rollout")
    trl = of_trl(lambda completions, **_: [None, 1.0], group, conversational=False)
    assert math.isnan(trl[0])


@pytest.mark.parametrize(
    ("row", "keys", "form"),
    [
        ("half?", {}, str),
        ({"prompt": "half?"}, {}, str),
        ({"question": "half?"}, {"map": {"prompt": "{question}"}}, str),
        ({"prompt": [{"role": "user", "content": "half?"}]}, {}, list),
        ({"messages": [{"role": "user", "content": "half?"}]}, {}, list),
        ({"prompt": "half?"}, {"system": "Be brief."}, list),
    ],
)
def test_the_form_is_that_of_the_rows_prompt_as_in_trl(
    row: Any, keys: dict[str, Any], form: type, folder: Path
) -> None:
    source = prepared(ListPrompts([row]), PromptsConfig(type="list", **keys))
    trajectory = Trajectory(source.prompt(Ticket(0, 0)), played("x").trajectories[0].turns)
    part = weighted_reward(RewardConfig(type="mine.py:short"), "r", folder, DeadlinesConfig())
    arguments, _ = part.calculator._arguments([trajectory])
    assert type(arguments["completions"][0]) is type(arguments["prompts"][0]) is form


async def test_all_turns_are_one_completion_with_the_reasoning(folder: Path) -> None:
    [trajectory] = played("x", level=3).trajectories
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    tool, reply = {"role": "tool", "content": "5"}, {"role": "assistant", "content": "5"}
    first = Turn([1], Completion([2], [0.0], "<call>", "stop", 0), [tool])
    last = Turn([1, 2, 3], Completion([4, 5], [0.0] * 2, "<think>so</think>5", "stop", 1))
    trajectory.turns = [first, last]
    trajectory.messages = [*trajectory.prompt.messages, call, tool, reply]
    part = weighted_reward(RewardConfig(type="mine.py:right"), "r", folder, DeadlinesConfig())
    arguments, _ = part.calculator._arguments([trajectory])
    assert arguments["completions"] == [[call, tool, {**reply, "content": "<think>so</think>5"}]]
    assert arguments["completion_ids"] == [[2, 3, 4, 5]]
    assert arguments["trainer_state"].global_step == 1


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"type": "mine.py:short"}, "'short' raised ValueError"),
        ({"type": "mine.py:number"}, "it returned 1.0, expected a list of 2"),
        ({"type": "mine.py:some"}, "some requires the column level, but the row has answer"),
        ({"type": "mine.py:content"}, "`completions: messages`"),
    ],
)
async def test_a_wrong_call_is_named(keys: dict[str, Any], problem: str, folder: Path) -> None:
    for trajectory in await scored(played("a", "b", system=None, answer=1), folder, keys):
        assert trajectory.outcome == "infra_error"
        assert problem in trajectory.info["error"]


async def test_functions_run_in_processes_and_are_made_of_keys(folder: Path) -> None:
    sections = [
        {"type": "mine.py:main_thread", "processes": 1},
        {"type": "mine.py:later", "processes": 1},
        {"type": "mine.py:made", "size": 2, "processes": 1},
        {"type": "mine.py:an_object"},
        {"type": "mine.py:content", "completions": "messages"},
    ]
    [trajectory] = await scored(played("abc", system=None, answer="abc"), folder, *sections)
    expected = {"main_thread": 1.0, "later": 1.0, "by_size": 1.5, "Made": 0.5, "content": 3.0}
    assert trajectory.rewards == expected


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"type": "mine.py:short", "completions": "lists"}, "expected text or messages"),
        ({"type": "mine.py:some", "bonous": 2.0}, "bonous: .*rewards.0.bo"),
        ({"type": "mine.py:right", "wieght": 2}, "wieght: .*rewards.0.w"),
        ({"type": "mine.py:made"}, "size: "),
        ({"type": "mine.py:short", "prompts": []}, "prompts: "),
    ],
)
def test_a_wrong_key_is_an_error_at_once(keys: dict[str, Any], problem: str, folder: Path) -> None:
    with pytest.raises(PluginError, match=problem):
        weighted_reward(RewardConfig(**keys), "rewards.0", folder, DeadlinesConfig())


async def test_check_tries_a_function_of_trl_whose_columns_all_rows_have(folder: Path) -> None:
    def config(*rows: dict[str, Any]) -> RunConfig:
        rewards = [{"type": "mine.py:later"}, {"type": "mine.py:content"}]
        return parse_config({"prompts": list(rows), "rewards": rewards}, base_dir=folder)

    missing = "row 1: later requires the column answer, but the row has level"
    with pytest.raises(ConfigError, match=missing):
        assemble(config({"prompt": "a=", "answer": "a"}, {"prompt": "b=", "level": 2}))
    parts = assemble(config({"prompt": "a=", "answer": "a"}))
    trials = await tried_rewards(parts, [parts.prompts.prompt(Ticket(0, 0))])
    assert [trial.good for trial in trials] == [True, True, False]
    assert parts.scorer.rewards[0].calculator.needs_answer
