"""An environment's own tasks, and the seed and the index of a rollout's prompt."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from retrain import Action, Environment, Prompt, PromptSource, Row, StepResult
from retrain.assembly import Given, assemble
from retrain.check import check_environment, check_subject
from retrain.cli.run import main
from retrain.config import parse_config
from retrain.errors import ConfigError
from retrain.prompts import ListPrompts
from retrain.types import Ticket


class Dice(Environment):
    """Tasks that only differ by their seed, and a die for each rollout."""

    tasks: Any = 3

    def prompts(self) -> Any:
        return self.tasks

    async def reset(self, prompt: Prompt) -> Any:
        self.sides = random.Random(prompt.seed).randint(4, 1000)
        self.die = random.Random(prompt.seed + prompt.index).randrange(10**6)
        return [{"role": "user", "content": "roll"}]

    async def step(self, action: Action) -> StepResult:
        return StepResult([], 0.0, True, False, {"sides": self.sides, "die": self.die})


USER = ({"role": "user", "content": "a"},)


class Generated(PromptSource):
    def __len__(self) -> int:
        return 2

    def row(self, index: int) -> Row:
        return Row((), index)


def prompts_of(tasks: Any, kind: type[Environment] = Dice) -> PromptSource:
    config = parse_config({"rewards": [{"type": "exact_match"}]})
    made = type("Own", (kind,), {"tasks": tasks})
    return assemble(config, Given(environment=made)).prompts


@pytest.mark.parametrize(
    ("tasks", "answers"),
    [
        (3, [None] * 3),
        ([{"answer": 1, "level": 2}, "text", Row(USER, 3)], [1, None, 3]),
        (range, [0, 1]),
        (Generated(), [0, 1]),
    ],
)
def test_an_environment_may_have_its_own_tasks(tasks: Any, answers: list[Any]) -> None:
    made = ({"answer": n} for n in tasks(2)) if tasks is range else tasks
    source = prompts_of(made)
    prompts = [source.prompt(Ticket(0, index)) for index in range(len(source))]
    assert [prompt.answer for prompt in prompts] == answers
    assert len({prompt.seed for prompt in prompts}) == len(prompts)


def test_tasks_that_differ_by_their_seed_are_no_repetition() -> None:
    given = Given(environment=type("Own", (Dice,), {"tasks": 9}))
    prompts = {"type": "environment", "held_out": 0.3}
    parts = assemble(parse_config({"prompts": prompts, "eval": {"prompts": "held_out"}}), given)
    assert not parts.warnings
    assert 0 < len(parts.prompts) < 9


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        (0, "is empty, expected at least one prompt"),
        (True, "prompts: Own.prompts()"),
        ("text", "'text'"),
        ([{"answer": 1}, 5], "prompts: Own.prompts(), row 1: got int"),
    ],
)
def test_wrong_tasks_are_a_problem_of_the_config(tasks: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts_of(tasks)
    assert message in str(caught.value)


class Shown(Environment):
    """Shows the prompt, so a row needs one."""

    tasks: Any = 3
    prompts = Dice.prompts


@pytest.mark.parametrize(
    ("kind", "tasks", "message"),
    [(Shown, 3, "prompts: Own.prompts(), row 0"), (Environment, 0, "prompts")],
)
def test_a_row_needs_a_prompt_and_a_run_needs_rows(
    kind: type[Environment], tasks: Any, message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        prompts_of(tasks, kind)
    assert message in str(caught.value)


def test_the_seed_of_a_prompt_is_that_of_its_task() -> None:
    source = ListPrompts(["a", "b"])
    first = source.prompt(Ticket(0, 1), 7)
    assert first.seed == source.prompt(Ticket(0, 1, attempt=3), 7).seed
    others = [(Ticket(1, 1), 7), (Ticket(0, 0), 7), (Ticket(0, 1), 8), (Ticket(-1, 1), 7)]
    seeds = {first.seed, *(source.prompt(*other).seed for other in others)}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert first.seed == 866579289  # a resume on another machine agrees


ENVIRONMENT = """
import sys
sys.path.insert(0, {folder!r})
from test_tasks import Dice

class Own(Dice):
    pass

def length(completion):
    return len(completion)
"""


def rolled(folder: Path, *arguments: str) -> dict[tuple[str, int], tuple[int, int]]:
    """What each rollout of a run rolled, by its ticket and index."""
    run = str(folder / "run")
    assert main([str(folder / "dice.yaml"), "--run-dir", run, *arguments]) == 0
    lines = (folder / "run" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return {(r["ticket"], r["index"]): (r["info"]["sides"], r["info"]["die"]) for r in rows}


def test_siblings_share_the_task_and_a_resumed_run_rolls_the_same(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(ENVIRONMENT.format(folder=str(Path(__file__).parent)))
    config = {
        "environment": "own.py:Own",
        "rewards": "own.py:length",
        "eval": {"prompts": {"type": "environment"}, "every": 1, "samples": 2},
        "algorithm": {"group_size": 2},
        "sampling": {"max_tokens": 2},
        "staleness": {"target": 0},
        "train": {"total_train_steps": 4, "groups_per_step": 2},
        "checkpoint": {"every": 2},
    }
    (tmp_path / "dice.yaml").write_text(json.dumps(config))
    whole = rolled(tmp_path)
    by_ticket: dict[str, list[tuple[int, int]]] = {}
    for (ticket, _), dice in whole.items():
        by_ticket.setdefault(ticket, []).append(dice)
    assert len(by_ticket) == 8 + 3
    assert all(len({sides for sides, _ in dice}) == 1 for dice in by_ticket.values())
    assert all(len({die for _, die in dice}) == 2 for dice in by_ticket.values())
    assert len({dice[0] for dice in by_ticket.values()}) == 11, "another game in each epoch"
    (tmp_path / "run").rename(tmp_path / "whole")
    rolled(tmp_path, "train.total_train_steps=2")
    assert rolled(tmp_path, "--resume", "train.total_train_steps=4") == whole


async def test_the_kit_plays_an_environment_that_rolls_a_die_for_each_rollout() -> None:
    findings = await check_environment(Dice)
    assert [str(finding) for finding in findings if not finding.good] == []


async def test_the_kit_plays_an_environments_own_tasks() -> None:
    findings = await check_subject("guess_number")  # the samples' answers are out of its range
    assert [str(finding) for finding in findings if not finding.good] == []
