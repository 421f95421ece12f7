"""The older retrain's page: its trainer is made of parts and trains what they played and scored.

The page has no code; each test completes one of its sentences with the least code that says it.
"""

import json
from pathlib import Path

import pytest

import retrain.trainer.grpo.trl as page
from retrain import Action, Environment, RewardCalculator, StepResult, Trajectory
from retrain.errors import ConfigError
from retrain.prompts import ListPrompts
from retrain.trainer import BaseTrainer
from retrain.trainer.grpo.trl import GRPOTrainer, GRPOTrainerAdapter

pytestmark = pytest.mark.usefixtures("own_folder")
SMALL = {
    "sampling": {"max_tokens": 4},
    "train": {"groups_per_step": 2, "total_train_steps": 2},
    "staleness": {"target": 0},
}


class TwoTurns(Environment):
    """Asks once more, then ends."""

    async def reset(self, prompt):
        self.turns = 0
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        again = [{"role": "user", "content": "again"}]
        return StepResult(again if self.turns < 2 else [], 0.0, self.turns == 2, False, {})


class Variety(RewardCalculator):
    async def calculate(self, trajectory: Trajectory) -> float:
        return len(set(trajectory.completion)) / 4


def trainer_of(**changes) -> GRPOTrainer:
    parts = {
        "model": "tiny",
        "algorithm": {"group_size": 2},
        "environment": TwoTurns,
        "reward_calculator": Variety(),
        "prompts": ListPrompts(["a=", "b="]),
    }
    return GRPOTrainer(**{**parts, **SMALL, **changes})


def test_both_of_the_page_s_names_are_there() -> None:
    assert page.GRPOTrainer is page.GRPOTrainerAdapter
    assert issubclass(GRPOTrainerAdapter, BaseTrainer)


async def test_train_trains_the_rollouts_that_the_environment_played_and_the_calculator_scored():
    result = await trainer_of().train()
    rows = (result.run_dir / "rollouts.jsonl").read_text().splitlines()
    rollouts = [json.loads(row) for row in rows]
    assert result.total_steps == 2
    assert len(rollouts) == 8
    assert all(row["rewards"].keys() == {"environment", "Variety"} for row in rollouts)
    assert all([m["content"] for m in row["messages"]][2::2] == ["again"] for row in rollouts)


async def test_step_is_one_cycle_of_rollouts_rewards_and_an_update():
    trainer = trainer_of()
    first = await trainer.step()
    assert (first["step"], trainer.current_step) == (1, 1)
    second = await trainer.step()
    assert (second["step"], trainer.current_step) == (2, 2)
    with pytest.raises(RuntimeError, match=r"ended after 2 steps \(completed\)"):
        await trainer.step()


async def test_train_goes_on_where_step_was_closed():
    trainer = trainer_of()
    await trainer.step()
    closed = await trainer.close()
    assert closed is not None
    assert (closed.status, closed.total_steps) == ("completed", 1)
    result = await trainer.train(total_steps=3)
    assert (result.total_steps, len(result.history)) == (3, 2)


def test_the_backend_s_keys_need_no_type_since_it_can_only_be_trl():
    backend = trainer_of(backend={"learning_rate": 3e-3}).config["backend"]
    assert backend == {"type": "trl", "learning_rate": 3e-3}


def test_fit_is_train_without_a_loop():
    assert trainer_of().fit(total_steps=1).total_steps == 1


async def test_the_tokenizer_may_be_given_when_it_is_the_model_s_own():
    from retrain.engine.models import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model("tiny", Path()))
    result = await trainer_of(tokenizer=tokenizer).train(total_steps=1)
    assert result.total_steps == 1


async def test_another_model_s_tokenizer_is_refused():
    class Bytes:
        def encode(self, text: str, **_) -> list[int]:
            return list(text.encode())

    with pytest.raises(ConfigError, match="encodes differently from the model's own") as raised:
        await trainer_of(tokenizer=Bytes()).train()
    assert not hasattr(raised.value, "__notes__")  # no callback raised it


def test_what_is_no_part_is_refused_before_anything_loads():
    with pytest.raises(TypeError, match=r"missing .* argument: 'prompts'"):
        GRPOTrainer("tiny")
    with pytest.raises(TypeError, match="save_pretrained"):
        GRPOTrainer(object(), prompts=["a="])
    with pytest.raises(ConfigError, match="rloo"):
        GRPOTrainer("tiny", {"type": "rloo"}, prompts=["a="])
    for calculator in (3, Variety):
        with pytest.raises(TypeError, match=r"reward_calculator.*RewardCalc"):
            trainer_of(reward_calculator=calculator).fit()
