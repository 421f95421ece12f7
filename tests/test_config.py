"""Reading a config: every problem at once, with its path, and nothing silent."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import yaml

from retrain import Environment
from retrain.adapters.trl.options import TrlOptions
from retrain.assembly import assemble
from retrain.assembly.sections import options_of
from retrain.config import RunConfig, load_config, parse_config
from retrain.config.hints import HOMES, PATHS, WRAPPERS
from retrain.config.problems import keys_of
from retrain.config.yaml_text import parse_yaml
from retrain.errors import ConfigError, PluginError
from retrain.observe.run_dir import as_yaml, resolved

TYPE_HINT = "expected a built-in name, module:Class or path/file.py:Class"
PROMPTS = {"type": "list", "rows": ["a"]}


def problems(mapping: Mapping[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config({"prompts": PROMPTS, **mapping})
    return list(caught.value.problems)


def problem(mapping: Mapping[str, Any]) -> str:
    (only,) = problems(mapping)
    return only


def write(folder: Path, text: str) -> Path:
    path = folder / "task.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def refused(folder: Path, text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(write(folder, text), overrides)
    return str(caught.value)


def test_the_smallest_config_has_vetted_defaults(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "prompts: {type: file, path: x.jsonl}"))
    assert (config.name, config.model, config.base_dir) == ("task", "tiny", tmp_path)
    assert config.algorithm.type == "grpo"
    assert config.staleness.bound == 3


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
        ({"modle": "x"}, "modle: unknown key; did you mean model?"),
        ({"train": {"seed": True}}, "train.seed: got true, expected an integer"),
        ({"train": {"seed": "1"}}, "train.seed: got '1', expected an integer"),
        ({"train": {"seed": None}}, "train.seed: got null, expected an integer"),
        ({"train": 5}, "train: got 5, expected a mapping"),
        ({"train": {"order": "up"}}, "train.order: got 'up', expected 'ready' or 'in_order'"),
        (
            {"staleness": {"target": 3, "max": 1}},
            "max is 1, expected at least target (3)",
        ),
        ({"rewards": 5}, "rewards: got 5, expected a list"),
        (
            {"base_dir": "x"},
            "base_dir: unknown key; remove it: it is always the config file's folder",
        ),
        ({"sampling": {"stop": [1]}}, "sampling.stop.0: got 1, expected a string"),
        ({"model": ["x"]}, "model: got ['x'], expected a string"),
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
        ("trainer.train_service.url", "backend.url"),
        ("trainer.train_service.config.loss_fn", "algorithm.loss"),
        ("trainer.train_service.config.learning_rate", "backend.learning_rate"),
        ("trainer.algorithm.my_param", "algorithm.my_param"),
        ("policy.model_name", "model"),
        ("policy.learning_rate", "backend.learning_rate"),
        ("grpo.num_prompts_per_step", "train.groups_per_step"),
        ("grpo.num_generations_per_prompt", "algorithm.group_size"),
        ("grpo.use_leave_one_out_baseline", "algorithm.baseline: leave_one_out"),
        ("loss_fn.ratio_clip_max", "algorithm.loss_config.epsilon_high"),
        ("learning_rate", "backend.learning_rate"),
        ("num_generations", "algorithm.group_size"),
        ("max_steps", "train.total_train_steps"),
        ("max_completion_length", "sampling.max_tokens"),
        ("temperature", "sampling.temperature"),
        ("experiment_name", "name"),
        ("prompt_source.type", "prompts.type"),
        ("prompt_source.source_config.file_path", "prompts.path"),
        ("model.name_or_path", "model"),
        ("staleness.order", "train.order"),
        ("loss_fn.truncated_importance_sampling_type", "algorithm.mismatch.type"),
        ("loss_fn.truncated_importance_sampling_ratio", "algorithm.mismatch.high"),
        ("vllm_importance_sampling_correction", "algorithm.mismatch"),
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


def test_what_has_no_home_says_so() -> None:
    found = problem({"policy": {"dtensor_cfg": {"tensor_parallel_size": 2}}})
    assert found.endswith(
        "unknown key; remove it: a run is one process, or those of backend.processes"
    )


@pytest.mark.parametrize("key", ["custom_trainer_module_path", "custom_trainer_class_name"])
def test_a_recipe_with_its_own_trainer_is_sent_to_the_command_that_takes_it(key: str) -> None:
    found = problem({"trainer": {key: "recipe/mine.py"}})
    assert found.startswith(f"trainer.{key}: unknown key; ")
    assert "`python -m retrain.trainer.nexrl -c FILE`" in found


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


def test_a_secret_in_an_argument_is_never_shown(tmp_path: Path) -> None:
    message = refused(tmp_path, "prompts: [a]", "backend.api_key=s3cret-value")
    assert "environment variable" in message
    assert "s3cret" not in message


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


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("2.0e-3", 2e-3), ("1E5", 1e5), (".5e1", 5.0), ("3", 3), ("1_0", 10)],
)
def test_numbers_are_read_as_people_write_them(tmp_path: Path, text: str, value: float) -> None:
    path = write(tmp_path, f"prompts: [a]\nbackend: {{type: trl, learning_rate: {text}}}")
    found = load_config(path).backend.arguments["learning_rate"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the file is empty"),
        ("# only a comment", "the file is empty"),
        ("- a\n- b", "contains a list, expected a mapping"),
        ("hello", "contains a string, expected a mapping"),
        ("prompts: [a\ntrain: 3", "line 2, column 6: invalid YAML"),
        ("prompts: [a]\n\tx: 1", "line 2, column 1: invalid YAML"),
        (
            "prompts: [a]\ntrain: {seed: 1, seed: 2}",
            "task.yaml: line 2: duplicate key train.seed, first in line 2",
        ),
        ("prompts: !!python/object:os.system x", "invalid YAML: could not determine a constructor"),
        ("prompts: &a [*a]", "invalid YAML"),
        ("prompts: [2024-99-99]", "invalid YAML"),
    ],
)
def test_a_broken_file_says_where(tmp_path: Path, text: str, message: str) -> None:
    found = refused(tmp_path, text)
    assert message in found
    assert str(tmp_path / "task.yaml") in found


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    write(tmp_path, "")
    with pytest.raises(
        ConfigError, match=r"file not found: .*tsk\.yaml; the folder contains task\.yaml"
    ):
        load_config(tmp_path / "tsk.yaml")
    for number in range(8):
        (tmp_path / f"a{number}.yaml").touch()
    with pytest.raises(ConfigError, match=r"contains a0\.yaml, .*, a7\.yaml, and 1 more$"):
        load_config(tmp_path / "tsk.yaml")
    (tmp_path / "link.yaml").symlink_to("gone.yaml")
    with pytest.raises(
        ConfigError, match=r"link\.yaml is a link to gone\.yaml, which does not exist$"
    ):
        load_config(tmp_path / "link.yaml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8"):
        load_config(tmp_path / "binary.yaml")


def test_overrides_set_keys_make_sections_and_index_lists(tmp_path: Path) -> None:
    text = "prompts: [a]\nenvironment: echo\nrewards: [exact_match]"
    config = load_config(
        write(tmp_path, text),
        [
            "train.seed=7",
            "rewards.0.weight=2",
            "rewards.1={type: slot_match, weight: 0.5}",
            "environment.limit=3",
            "sampling.stop=[a, b]",
            "algorithm.loss_config.epsilon=2e-1",
            "name=other",
        ],
    )
    assert config.train.seed == 7
    assert [(r.type, r.weight) for r in config.rewards] == [("exact_match", 2), ("slot_match", 0.5)]
    assert config.environment.arguments == {"limit": 3}
    assert config.sampling.stop == ("a", "b")
    assert config.algorithm.loss_config == {"epsilon": 0.2}
    assert config.name == "other"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.seed", "argument 'train.seed': expected dotted.key=value"),
        ("=3", "expected dotted.key=value"),
        ("train..seed=3", "expected dotted.key=value"),
        ("train.seed.x=3", "train.seed is a value, expected a section"),
        ("rewards.5.weight=1", "rewards is a list of 1; expected an index from 0 to 1"),
        ("rewards.weight=1", "rewards is a list of 1; expected an index, such as rewards.0.weight"),
        ("train.seed=[1", "argument train.seed=...:"),
        ("train.sed=1", "train.sed: unknown key; did you mean train.seed?"),
    ],
)
def test_a_wrong_override_is_told(tmp_path: Path, override: str, message: str) -> None:
    text = "prompts: [a]\ntrain: {seed: 1}\nrewards: [x]"
    assert message in refused(tmp_path, text, override)


@pytest.mark.parametrize(
    ("line", "where"),
    [
        ("system: Think, then #### and the number.", "prompts.system"),
        ("system: Be kind # or not", "prompts.system"),
        ("marker: ####", "prompts.marker"),
        ("rows: [a ## b\n  ]", "prompts.rows.0"),
        ("system: 'Think, then #### and the number.'", ""),
        ("name: short # a comment", ""),
        ("limit: 3 ## a comment", ""),
    ],
)
def test_a_text_that_a_comment_ends_is_warned_of(
    caplog: pytest.LogCaptureFixture, line: str, where: str
) -> None:
    parse_yaml(f"prompts:\n  {line}", source="x.yaml")
    expected = [f"x.yaml: line 2: {where} ends before the #, which starts a comment"] * bool(where)
    assert [record.getMessage()[: len(expected[0])] for record in caplog.records] == expected


def test_a_changed_backend_keeps_its_other_keys_unless_replaced_whole(tmp_path: Path) -> None:
    path = write(tmp_path, "prompts: [a]\nbackend: {type: trl, lora: {r: 4}}")
    assert load_config(path, ["backend.type=tinker"]).backend.arguments == {"lora": {"r": 4}}
    assert load_config(path, ["backend={type: tinker}"]).backend.arguments == {}


def test_any_mapping_will_do() -> None:
    inner = MappingProxyType({"type": "list", "rows": ("a", "b")})
    config = parse_config(MappingProxyType({"prompts": inner}))
    assert config.prompts.arguments == {"rows": ["a", "b"]}
    with pytest.raises(ConfigError, match="expected a mapping"):
        parse_config([1])  # type: ignore[arg-type]  # what a user might pass


def steady(completion: str) -> float:
    return 1.0


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
    assert types[3] == f"{__name__}:steady", "what can be imported has its plain name"
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


def test_a_variable_in_the_keys_of_a_backend_keeps_its_text(monkeypatch: Any) -> None:
    monkeypatch.setenv("PROJECT", "s3cret")
    backend = {"type": "tinker", "url": "local", "project": "${PROJECT}", "tags": ["${PROJECT}"]}
    parts = assemble(parse_config({"prompts": PROMPTS, "rewards": [steady], "backend": backend}))
    assert parts.options.project == "s3cret"  # type: ignore[attr-defined]
    written = as_yaml(parts.resolved())
    assert "s3cret" not in written
    assert "project: ${PROJECT}" in written


def test_a_config_is_frozen() -> None:
    config = parse_config({"prompts": PROMPTS})
    with pytest.raises(ValueError, match="frozen"):
        config.model = "other"  # type: ignore[misc]  # the point of the test


def test_the_resolved_config_is_a_config_that_says_the_same(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, "prompts: [a]\nrewards: [x]\nchat: none"))
    again = load_config(write(tmp_path, yaml.safe_dump(resolved(config))))
    assert again == config


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


def test_a_variable_is_filled_in_everywhere_but_in_rows(tmp_path: Path, monkeypatch: Any) -> None:
    for name, value in {"MODEL": "tiny", "N": "7", "KEY": "s3cret", "EMPTY": ""}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("UNSET", raising=False)
    text = """\
model: ${MODEL}
name: a-${UNSET:-b}-${EMPTY:-c}-$${N}
prompts: [{prompt: "echo ${UNSET}"}]
environment:
  {type: mine, api_key: "${KEY}", steps: "${N}", urls: ["http://me:${KEY}@host"],
  headers: {A: "Bearer ${KEY}", B: "${N}"}, shell: "echo $${KEY}"}
train: {total_train_steps: "${N}", shuffle: "${UNSET:-false}"}
"""
    config = load_config(write(tmp_path, text), ["train.seed=${N}"])
    assert (config.model, config.name) == ("tiny", "a-b-c-${N}")
    assert (config.train.total_train_steps, config.train.shuffle, config.train.seed) == (
        7,
        False,
        7,
    )
    assert config.prompts.arguments["rows"] == [{"prompt": "echo ${UNSET}"}]
    keys = config.environment.arguments
    assert keys == {
        "api_key": "s3cret",
        "steps": 7,
        "urls": ["http://me:s3cret@host"],
        "headers": {"A": "Bearer s3cret", "B": "7"},
        "shell": "echo ${KEY}",
    }
    written = as_yaml(config)
    assert "s3cret" not in f"{written}{config!r}{resolved(config)}"
    again = load_config(write(tmp_path, written))
    assert again.environment == config.environment
    assert again.prompts == config.prompts
    monkeypatch.delenv("KEY")
    assert load_config(write(tmp_path, written), fill=False).name == config.name.replace("$", "$$")


def test_all_unset_variables_are_told_with_their_keys(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.delenv("UNSET", raising=False)
    text = "model: ${UNSET}\nprompts: [a]\nloggers: [{type: wandb, project: 'x${UNSET}'}]\n"
    told = refused(tmp_path, f"{text}train: {{seed: '${{UNSET}}', x: 1}}\nname: ${{a.b\n")
    paths = [line.split(": ")[1] for line in told.splitlines()[1:]]
    assert paths == ["model", "loggers.0.project", "train.seed", "name", "train.x"]
    config = load_config(write(tmp_path, text), ["model=tiny", "loggers=[]"])
    assert config.model == "tiny"
