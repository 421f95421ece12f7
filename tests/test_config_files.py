"""Config files: numbers, broken YAML, overrides and variables."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.assembly import assemble
from retrain.config import load_config, parse_config
from retrain.config.yaml_text import parse_yaml
from retrain.errors import ConfigError
from retrain.observe.run_dir import as_yaml, resolved
from tests.config_kit import PROMPTS, refused, steady, write


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
        ("prompts: [a]\ntrain: {seed: 1, seed: 2}", "task.yaml: line 2: duplicate key train.seed"),
        ("prompts: !!python/object:os.system x", "YAML"),
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
    with pytest.raises(ConfigError, match=r"tsk\.yaml.*task\.yaml"):
        load_config(tmp_path / "tsk.yaml")
    for number in range(8):
        (tmp_path / f"a{number}.yaml").touch()
    with pytest.raises(ConfigError, match=r"a0\.yaml, .*, a7\.yaml, .*1 "):
        load_config(tmp_path / "tsk.yaml")
    (tmp_path / "link.yaml").symlink_to("gone.yaml")
    with pytest.raises(ConfigError, match=r"link\.yaml is a link to gone\.yaml"):
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
        ("train.seed", "argument 'train.seed'"),
        ("=3", "dotted.key=value"),
        ("train..seed=3", "dotted.key=value"),
        ("train.seed.x=3", "train.seed is a value"),
        ("rewards.5.weight=1", "rewards is a list of 1; expected an index from 0 to 1,"),
        ("rewards.weight=1", "such as rewards.0"),
        ("train.seed=[1", "argument train.seed=...:"),
        ("train.sed=1", "train.sed: "),
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


def test_a_variable_in_the_keys_of_a_backend_keeps_its_text(monkeypatch: Any) -> None:
    monkeypatch.setenv("PROJECT", "s3cret")
    backend = {"type": "tinker", "url": "local", "project": "${PROJECT}", "tags": ["${PROJECT}"]}
    parts = assemble(parse_config({"prompts": PROMPTS, "rewards": [steady], "backend": backend}))
    assert parts.options.project == "s3cret"  # type: ignore[attr-defined]
    written = as_yaml(parts.resolved())
    assert "s3cret" not in written
    assert "project: ${PROJECT}" in written


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
    keys = config.train
    assert (keys.total_train_steps, keys.shuffle, keys.seed) == (7, False, 7)
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
    message = refused(tmp_path, f"{text}train: {{seed: '${{UNSET}}', x: 1}}\nname: ${{a.b\n")
    paths = [line.split(": ")[1] for line in message.splitlines()[1:]]
    assert paths == ["model", "loggers.0.project", "train.seed", "name", "train.x"]
    config = load_config(write(tmp_path, text), ["model=tiny", "loggers=[]"])
    assert config.model == "tiny"
