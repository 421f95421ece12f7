"""Reading a config: every problem at once, with its path, and nothing silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from retrain import Environment
from retrain.adapters.trl.options import TrlOptions
from retrain.assembly import assemble
from retrain.assembly.sections import options_of
from retrain.config import RunConfig, load_config, parse_config
from retrain.config.hints import HOMES, PATHS, WRAPPERS
from retrain.config.problems import keys_of
from retrain.errors import ConfigError, PluginError
from retrain.observe.run_dir import as_yaml
from tests.config_kit import PROMPTS, refused, steady, write

TYPE_HINT = "expected a built-in name, module:Class or path/file.py:Class"


def problems(mapping: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({"prompts": PROMPTS, **mapping})
    return list(caught.value.problems)


def problem(mapping: Mapping[str, Any]) -> str:
    (only,) = problems(mapping)
    return only


def test_every_problem_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    text = """\
prompts: [a]
train:
  total_train_stepz: 3
  groups_per_step: 0
sampling: {temperature: hot, top_p: 2}
rewards: [{weight: 1}]
"""
    assert refused(tmp_path, text).splitlines()[1:] == [
        f"  rewards.0.type: missing; {TYPE_HINT}",
        "  line 5: sampling.temperature: got 'hot', expected a number",
        "  line 5: sampling.top_p: got 2, expected a number <= 1",
        "  line 4: train.groups_per_step: got 0, expected an integer >= 1",
        "  line 3: train.total_train_stepz: unknown key; did you mean train.total_train_steps?",
    ]


@pytest.mark.parametrize(
    ("mapping", "message"),
    [
        ({"modle": "x"}, "modle: "),
        ({"train": {"seed": True}}, "train.seed: got true"),
        ({"train": {"seed": "1"}}, "train.seed: got '1'"),
        ({"train": {"seed": None}}, "train.seed: got null"),
        ({"train": 5}, "train: got 5"),
        ({"train": {"order": "up"}}, "train.order: got 'up'"),
        ({"staleness": {"target": 3, "max": 1}}, "max is 1, expected at least target (3)"),
        ({"rewards": 5}, "rewards: got 5"),
        ({"base_dir": "x"}, "base_dir: "),
        ({"sampling": {"stop": [1]}}, "sampling.stop.0: got 1"),
        ({"model": ["x"]}, "model: got ['x']"),
    ],
)
def test_a_wrong_value_says_what_was_got_and_expected(
    mapping: dict[str, Any], message: str
) -> None:
    assert message in problem(mapping)


@pytest.mark.parametrize(
    ("path", "home"),
    [
        ("trainer.total_train_steps", "train.total_train_steps"),
        ("trainer.train_service.backend", "backend.type"),
        ("trainer.train_service.config.loss_fn", "algorithm.loss"),
        ("trainer.algorithm.my_param", "algorithm.my_param"),
        ("policy.learning_rate", "backend.learning_rate"),
        ("grpo.num_prompts_per_step", "train.groups_per_step"),
        ("grpo.use_leave_one_out_baseline", "algorithm.baseline: leave_one_out"),
        ("temperature", "sampling.temperature"),
        ("prompt_source.source_config.file_path", "prompts.path"),
        ("staleness.order", "train.order"),
        ("loss_fn.truncated_importance_sampling_ratio", "algorithm.mismatch.high"),
    ],
)
def test_a_key_of_another_system_is_told_its_home(path: str, home: str) -> None:
    mapping: dict[str, Any] = {}
    inner = mapping
    *sections, name = path.split(".")
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[name] = "x"
    assert f"{path}: unknown key; use {home}" in problems(mapping)


@pytest.mark.parametrize(
    ("section", "key", "advice"),
    [
        ("policy", "tensor_parallel_size", "a run is one process, or those of backend.processes"),
        ("trainer", "custom_trainer_module_path", "`python -m retrain.trainer.nexrl -c FILE`"),
    ],
)
def test_a_key_without_a_home_says_what_to_do(section: str, key: str, advice: str) -> None:
    found = problem({section: {key: "x"}})
    assert found.startswith(f"{section}.{key}: unknown key; ")
    assert advice in found


@pytest.mark.parametrize("backend", ["trl", "tinker", "weaver"])
def test_the_rank_of_lora_has_one_name_on_every_backend(backend: str) -> None:
    both = {"r": 5, "rank": 6}
    for name in both:
        config = parse_config({"prompts": PROMPTS, "backend": {"type": backend, "lora": {name: 5}}})
        assert options_of(config).model_dump()["lora"]["r"] == 5
    config = parse_config({"prompts": PROMPTS, "backend": {"type": backend, "lora": {"rnak": 5}}})
    with pytest.raises(PluginError, match="unknown key") as caught:
        options_of(config)
    assert "train" not in str(caught.value).replace("train_", "")
    config = parse_config({"prompts": PROMPTS, "backend": {"type": backend, "lora": both}})
    with pytest.raises(PluginError) as caught:
        options_of(config)
    assert str(caught.value).startswith("backend.lora.rank: another name of backend.lora.r")


def test_every_home_in_the_tables_is_a_key() -> None:
    keys = set(keys_of(RunConfig).values()) | set(keys_of(TrlOptions, "backend").values())
    paths = {path for joined in keys for path in joined.split(" or ")}
    plugins = {"algorithm.baseline", "algorithm.gamma", "algorithm.scale", "backend.url"}
    plugins |= {"prompts.path", "prompts.system", "prompts.type", "environment.type"}
    plugins |= {"backend.type", "algorithm.type"}
    for home in (*HOMES.values(), *PATHS.values()):
        path = home.split(":")[0].split(",")[0].split(" ")[0]
        known = path in paths | plugins or path.startswith("algorithm.loss_config.")
        assert known or home == "the argument --resume", home
    assert {section for _, section in WRAPPERS} <= set(RunConfig.model_fields)


@pytest.mark.parametrize(
    "mapping",
    [
        {"backend": {"type": "tinker", "api_key": "s3cret-value"}},
        {"backend": {"type": "tinker", "headers": {"hf_token": "s3cret-value"}}},
        {"trainer": {"train_service": {"api_key": "s3cret-value"}}},
        {"backend": {"type": "tinker", "url": "https://user:s3cret-value@host/"}},
        {"loggers": [{"type": "wandb", "WANDB_API_KEY": "s3cret-value"}]},
        {"environment": {"type": "echo", "password": ["s3cret-value"]}},
    ],
)
def test_a_secret_is_refused_and_never_shown(mapping: dict[str, Any]) -> None:
    found = " ".join(problems(mapping))
    assert "set the environment variable" in found
    assert "s3cret-value" not in found


@pytest.mark.parametrize("name", ["max_tokens", "tokenizer", "stop_token_ids", "api_key_env"])
def test_a_key_that_only_resembles_a_secret_is_taken(name: str) -> None:
    config = parse_config({"prompts": PROMPTS, "environment": {"type": "echo", name: "x"}})
    assert config.environment.arguments == {name: "x"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("rows.tsv", "file"),
        ("data/rows", "file"),
        ("hf", "hf"),
        ("mine.py", "mine.py"),
        ("data/mine.py:Rows", "data/mine.py:Rows"),
        ("package.mine.Rows", "package.mine.Rows"),
    ],
)
def test_a_path_for_prompts_is_a_file_of_rows_and_a_plug_in_is_not(text: str, kind: str) -> None:
    assert parse_config({"prompts": text}).prompts.type == kind


def test_short_forms_are_spelt_out() -> None:
    config = parse_config(
        {
            "prompts": "data/x.jsonl",
            "environment": "echo",
            "rewards": ["exact_match", {"type": "slot_match", "weight": 2}],
            "chat": "none",
            "backend": "trl",
            "loggers": "wandb",
            "sampling": {"stop": "\n"},
        }
    )
    assert config.prompts.arguments == {"path": "data/x.jsonl"}
    assert config.environment.type == "echo"
    assert [(r.type, r.weight) for r in config.rewards] == [("exact_match", 1), ("slot_match", 2)]
    assert config.chat.template == "none"
    assert config.loggers[0].type == "wandb"
    assert config.sampling.stop == ("\n",)
    assert parse_config({"prompts": ["a"], "rewards": "x"}).rewards[0].type == "x"


def test_any_mapping_will_do() -> None:
    inner = MappingProxyType({"type": "list", "rows": ("a", "b")})
    config = parse_config(MappingProxyType({"prompts": inner}))
    assert config.prompts.arguments == {"rows": ["a", "b"]}
    with pytest.raises(ConfigError, match="expected a mapping"):
        parse_config([1])  # type: ignore[arg-type]  # what a user might pass


def test_values_may_be_classes_and_functions(tmp_path: Path) -> None:
    class Mine(Environment):
        def __init__(self, goal: Any = None) -> None:
            self.goal = goal

    def judge(completion: str) -> float:
        return 1.0

    mapping = {
        "prompts": PROMPTS,
        "environment": {"type": Mine, "goal": judge},
        "rewards": [
            judge,
            lambda completion: 0.0,
            {"type": lambda completion: 1.0, "name": "two"},
            steady,
        ],
    }
    parts = assemble(parse_config(mapping))
    assert isinstance(parts.environment(), Mine)
    assert parts.environment().goal is judge
    place = f"{__name__}:test_values_may_be_classes_and_functions.<locals>."
    assert [reward.name for reward in parts.scorer.rewards] == [
        "judge", "<lambda>", "two", "steady",
    ]  # fmt: skip
    types = [reward.type for reward in parts.config.rewards]
    assert types[0] == f"{place}judge"
    assert types[3] == f"{steady.__module__}:steady", "what can be imported has its plain name"
    again = load_config(write(tmp_path, as_yaml(parts.config)))
    assert again.rewards == parts.config.rewards
    with pytest.raises(ConfigError, match="object of the Python program"):
        assemble(again)
    with pytest.raises(ConfigError, match=r"^environment\.type: .*judge"):
        assemble(parse_config({"prompts": PROMPTS, "environment": judge}))
    elsewhere = {"prompts": PROMPTS, "environment": "__main__:Other"}
    with pytest.raises(ConfigError, match="object of the Python program"):
        assemble(parse_config(elsewhere))


def test_configs_of_one_program_keep_their_own_functions() -> None:
    def scaled(factor: float) -> Any:
        return lambda completion: factor

    configs = [parse_config({"prompts": PROMPTS, "rewards": [scaled(f)]}) for f in (1.0, 5.0)]
    functions = [assemble(config).scorer.rewards[0].calculator.function for config in configs]
    assert [function("") for function in functions] == [1.0, 5.0]


def test_a_backend_without_a_type_is_the_default_one(tmp_path: Path) -> None:
    file = tmp_path / "task.yaml"
    file.write_text("prompts: [a]\n")
    for overrides in ([], ["backend.learning_rate=0.1"], ["backend={}"]):
        assert load_config(file, overrides).backend.type == "trl"
    chosen = load_config(
        file, ["backend=tinker", "backend.url=local", "rewards=a", "rewards.0.weight=2"]
    )
    assert chosen.backend.model_dump() == {"type": "tinker", "url": "local"}
    assert [(r.type, r.weight) for r in chosen.rewards] == [("a", 2)]
