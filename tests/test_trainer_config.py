"""The trainers' arguments: what is taken, what is refused early, and the registry."""

import json
import math
import types

import pytest

from retrain import Environment
from retrain.errors import ConfigError
from retrain.trainer import (
    BaseTrainer,
    GRPOTrainer,
    SFTTrainer,
    create_trainer,
    get_algorithm,
    list_algorithms,
    register_algorithm,
)
from tests.trainer_kit import ROWS, grpo, variety

pytestmark = pytest.mark.usefixtures("own_folder")


# --- making one


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        ({"learnin_rate": 3.0}, TypeError, "'learnin_rate'"),
        ({"num_prompts_per_step": 0}, ConfigError, "_step: got 0"),
        ({"num_prompts_per_step": True}, ConfigError, "got true"),
        ({"num_generations_per_prompt": 1}, ConfigError, "got 1"),
        ({"learning_rate": 0.0}, ConfigError, "got 0.0"),
        ({"learning_rate": math.inf}, ConfigError, "learning_rate: got inf"),
        ({"tensor_parallel_size": 2}, ConfigError, "got 2"),
        ({"seed": "1"}, ConfigError, "grpo.seed: got '1'"),
        ({"train": {"seed": 1}}, ConfigError, "train.seed.*grpo.seed"),
        ({"staleness": {"targt": 1}}, ConfigError, "staleness.targt"),
        (
            {"learning_rate": 1e-3, "backend": {"type": "trl", "learning_rate": 1e-4}},
            ConfigError,
            "backend.learning_rate.*policy.learning_rate",
        ),
    ],
)
def test_a_bad_argument_is_told_when_the_trainer_is_made(keys, kind, text):
    with pytest.raises(kind, match=text):
        grpo(**keys)


def test_a_missing_model_folder_is_not_looked_for_on_the_hub():
    with pytest.raises(FileNotFoundError, match="folder not found"):
        GRPOTrainer.from_pretrained("./no/such/model")
    with pytest.raises(ValueError, match="folder not found"):
        SFTTrainer.from_pretrained("/no/such/model")


def test_an_unknown_key_of_the_nested_config_is_told_by_its_path():
    config = {"policy": {"model_name": "tiny", "learnin_rate": 1.0}, "grpo": {"num_prompts": 2}}
    with pytest.raises(ConfigError) as error:
        GRPOTrainer(config)
    first, second = error.value.problems
    assert "policy.learnin_rate" in first
    assert "grpo.num_prompts_per_step" in second


def policy(learning_rate: float | None = None, **kwargs: float) -> dict:
    rate = {} if learning_rate is None else {"learning_rate": learning_rate}
    return {"policy": {"model_name": "tiny", **rate, "optimizer": {"kwargs": kwargs}}}


@pytest.mark.parametrize("config", [policy(lr=1e-5), policy(1e-5, lr=1e-5)])
def test_the_optimizer_s_learning_rate_is_the_policy_s(config):
    trainer = GRPOTrainer(config)
    assert trainer.config["policy"]["learning_rate"] == 1e-5
    assert trainer._run_config().backend.arguments["learning_rate"] == 1e-5
    assert GRPOTrainer(trainer.config).config == trainer.config
    with pytest.raises(ConfigError, match=r"1e-06 .*optimizer\.kwargs\.lr is 1e-05"):
        GRPOTrainer(policy(1e-6, lr=1e-5))


def test_the_optimizer_s_weight_decay_reaches_the_backend():
    config = policy(weight_decay=0.25)
    assert GRPOTrainer(config)._run_config().backend.arguments["weight_decay"] == 0.25
    with pytest.raises(ConfigError, match=r"backend\.weight_decay"):
        GRPOTrainer({**config, "backend": {"weight_decay": 0.5}})
    with pytest.raises(ConfigError, match=r"policy\.optimizer\.kwargs\.weight_decay: got -1"):
        GRPOTrainer(policy(weight_decay=-1.0))


def test_any_mapping_is_a_config_and_is_copied():
    section = {"num_prompts_per_step": 3}
    config = types.MappingProxyType(
        {"policy": types.MappingProxyType({"model_name": "tiny"}), "grpo": section}
    )
    trainer = GRPOTrainer(config)
    section["num_prompts_per_step"] = 99
    assert trainer.config["grpo"]["num_prompts_per_step"] == 3


def test_a_name_where_the_config_belongs_is_explained():
    with pytest.raises(TypeError, match="from_pretrained"):
        GRPOTrainer("tiny")


def test_the_config_is_a_json_copy_of_which_another_trainer_can_be_made():
    trainer = grpo(seed=7)
    config = json.loads(json.dumps(trainer.config))
    assert GRPOTrainer(config).config == config
    trainer.config["grpo"]["seed"] = 8
    assert trainer.config["grpo"]["seed"] == 7
    with pytest.raises(AttributeError):
        trainer.config = {}
    with pytest.raises(AttributeError):
        trainer.current_step = 3


def test_the_keys_reach_the_pipe():
    config = grpo(use_leave_one_out_baseline=False, normalize_rewards=False)._run_config()
    assert config.algorithm.arguments == {"baseline": "mean", "scale": "none"}
    config = grpo()._run_config()
    assert config.algorithm.arguments == {"baseline": "leave_one_out", "scale": "group"}
    assert config.algorithm.group_size == config.train.groups_per_step == 2
    assert config.rollout.max_sequence_length == 512


# --- by name


def test_algorithms_are_found_in_any_case_and_told_apart():
    assert get_algorithm("GRPO") is GRPOTrainer
    with pytest.raises(ValueError, match="got 'grp'"):
        get_algorithm("grp")
    with pytest.raises(ValueError, match="got None"):
        get_algorithm(None)
    with pytest.raises(ValueError, match="model: got ''"):
        create_trainer("sft", "")


def test_a_trainer_class_of_one_s_own_is_registered_once(monkeypatch):
    known = {name: get_algorithm(name) for name in list_algorithms()}
    monkeypatch.setattr("retrain.trainer.registry.TRAINERS", known)

    class Mine(GRPOTrainer):
        pass

    register_algorithm("Mine", Mine)
    assert list_algorithms() == ["dpo", "grpo", "mine", "rloo", "sft"]
    assert get_algorithm("MINE") is Mine
    assert isinstance(create_trainer("mine", "tiny", seed=3), Mine)
    with pytest.raises(ValueError, match="mine"):
        register_algorithm("mine", Mine)
    register_algorithm("grpo", Mine, override=True)
    assert get_algorithm("grpo") is Mine
    for other in (dict, GRPOTrainer.from_pretrained("tiny")):
        with pytest.raises(TypeError, match=r"other.*BaseTrainer"):
            register_algorithm("other", other)
    with pytest.raises(TypeError, match=r"BaseTrainer.*from_pretrained"):
        register_algorithm("other", BaseTrainer)


async def test_step_too_takes_either_a_reward_function_or_an_environment(nothing_loads):
    with pytest.raises(ValueError, match="reward_fn"):
        await grpo().step(ROWS, variety, environment=Environment)
