"""The built-in plug-ins, the schema of the config, and what a plug-in imports."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

import retrain
from retrain.adapters.losses import LossFunction
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import KINDS
from retrain.assembly.schema import run_schema, with_variables
from retrain.config.binding import bind, key_schema
from retrain.config.plugins import Kind, built_in_names, find_plugin
from retrain.config.yaml_text import parse_yaml
from retrain.environment import Environment
from retrain.errors import PluginError
from retrain.scoring import FunctionReward
from tests.plugin_kit import found, problems, refusal, written

ROOT = Path(retrain.__file__).resolve().parent.parent


pytestmark = pytest.mark.usefixtures("clean_imports")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


def test_built_in_names_are_files() -> None:
    assert built_in_names("algorithm") == ["dpo", "grpo", "reinforce", "rloo", "sft"]
    assert built_in_names("backend") == ["tinker", "trl", "weaver"]
    assert built_in_names("logger") == ["tensorboard", "trackio", "wandb"]
    assert built_in_names("prompts") == ["environment", "file", "held_out", "hf", "list", "mixture"]
    assert {"echo", "single_turn"} <= set(built_in_names("environment"))
    assert {"exact_match", "slot_match"} <= set(built_in_names("reward"))
    for kind, kind_of in KINDS.items():
        if kind == "backend":
            continue  # those whose parts are installed are tried by their own tests
        for name in built_in_names(kind):
            assert kind_of.fits(find_plugin(kind_of, name, kind, Path.cwd())), name


def test_listing_names_imports_no_plug_in() -> None:
    script = (
        "import sys; from retrain.config.plugins import FILES, built_in_names as names; "
        "found = [names(kind) for kind in FILES]; rooms = ('algorithms', 'adapters', 'prompts', "
        "'observe'); print([m for m in sys.modules if m.startswith('retrain.') "
        "and m.split('.')[1] in rooms])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


NEW = {
    "retrain/algorithms/signs.py": """
from retrain import Algorithm
class Signs(Algorithm):
    def advantages(self, groups):
        return [[1.0 if t.reward > 0.5 else -1.0 for t in g.trajectories] for g in groups]
""",
    "retrain/adapters/mine/options.py": """
from benchmarks.mock_engine import MockOptions
class MineOptions(MockOptions):
    speed: int = 1
""",
    "retrain/prompts/sources/counted.py": """
from retrain.prompts import PromptSource, Row
class Counted(PromptSource):
    def __init__(self, count: int = 3):
        self.count = count
    def __len__(self):
        return self.count
    def row(self, index):
        return Row([{"role": "user", "content": str(index)}], str(index))
""",
    "retrain/observe/loggers/quiet.py": """
from retrain import Logger
class Quiet(Logger):
    def open(self, trainer): ...
    def log(self, step, metrics): ...
""",
    "environments/twice.py": """
from retrain import Environment
class Twice(Environment):
    pass
""",
    "rewards/short.py": "def short(completion):\n    return 1.0 / (1 + len(completion))\n",
}
USES = """
prompts: {type: counted, count: 4}
environment: twice
rewards: short
algorithm: {type: signs, group_size: 2}
backend: {type: mine, learning_rate: 1.0e-3, speed: 2}
chat: none
loggers: quiet
sampling: {max_tokens: 2}
train: {total_train_steps: 2, groups_per_step: 2}
"""


def test_a_new_plug_in_of_each_kind_is_one_new_file(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for folder in ("retrain", "environments", "rewards"):
        shutil.copytree(ROOT / folder, copy / folder)  # with its bytecode
    for name, source in NEW.items():
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(source)
    (tmp_path / "task.yaml").write_text(USES)
    done = subprocess.run(
        [sys.executable, "-m", "retrain.run", "task.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": f"{copy}{os.pathsep}{ROOT}"},  # ROOT for benchmarks
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "completed" in done.stdout


def test_the_schema_has_the_built_ins_keys() -> None:
    schema = run_schema()
    assert "base_dir" not in schema["properties"]
    cases = schema["properties"]["backend"]["allOf"]
    by_name = {case["if"]["properties"]["type"]["const"]: case["then"] for case in cases}
    assert by_name["trl"]["properties"]["learning_rate"]["default"] == 1e-5
    files = schema["properties"]["prompts"]["allOf"][1]
    assert files["if"]["properties"]["type"]["const"] == "file"
    assert files["then"]["required"] == ["path"]
    assert "base_dir" not in files["then"]["properties"]
    rewards = schema["$defs"]["RewardConfig"]
    assert {"type", "weight", "name", "processes", "clip", "only_if", "of"} == set(
        rewards["properties"]
    )


def test_the_schema_is_valid_and_takes_the_repository_s_configs() -> None:
    schema = with_variables(run_schema())
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    assert schema["$schema"] == validator.META_SCHEMA["$id"]
    for file in (ROOT / "configs").glob("*.yaml"):
        assert not list(validator.iter_errors(parse_yaml(file.read_text())[0])), file
    assert list(validator.iter_errors({"prompts": ["a"], "train": {"seed": "x"}}))
    short = {"train": {"seed": "${SEED}"}, "sampling": {"stop": "x", "temperature": "${HEAT:-1}"}}
    assert not list(validator.iter_errors({"prompts": ["a"], **short}))


@pytest.mark.parametrize(
    ("section", "right", "wrong"),
    [
        ("backend", {"type": "trl", "learning_rate": 1.0}, "learnin_rate"),
        ("backend", {"lora": {"r": 4}}, "loar"),
        ("backend", {"type": "tinker", "lora": {"rank": 4}}, "learnin_rate"),
        ("environment", {"type": "gymnasium", "id": "x"}, "kwarg"),
        ("rewards", {"type": "numeric", "weight": 2}, "markr"),
        ("algorithm", {"group_size": 2}, "groupsize"),
        ("prompts", {"type": "file", "path": "x"}, "pth"),
    ],
)
def test_the_schema_rejects_a_misspelt_key_of_a_built_in_plug_in(
    section: str, right: dict[str, Any], wrong: str
) -> None:
    validator = jsonschema.Draft202012Validator(run_schema())

    def errors(keys: dict[str, Any]) -> list[Any]:
        return list(validator.iter_errors({"prompts": ["a"], section: keys}))

    assert not errors(right)
    [error] = errors({**right, wrong: 1})
    assert (error.validator, list(error.path)) == ("additionalProperties", [section])
    assert not errors({"type": "own.py:Mine", wrong: 1})


def test_every_key_has_a_description() -> None:
    def lacking(value: Any, path: str) -> Iterator[str]:
        for key, entry in value.get("properties", {}).items() if isinstance(value, dict) else ():
            if entry is not True and not entry.get("description") and "const" not in entry:
                yield f"{path}.{key}"
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(inner, dict | list):
                yield from lacking(inner, f"{path}.{key}")

    assert not list(lacking(run_schema(), ""))


def test_arguments_are_described_by_the_docstrings_of_the_class_and_its_bases() -> None:
    class Base:
        """A base.

        Args:
            size: How
                big.
            other: Not a parameter here.
        """

    class Derived(Base):
        """Derived.

        Args:
            mode: Which one: a or b.

        Raises nothing.
        """

        def __init__(self, size: int, mode: str = "a", plain: int = 1) -> None: ...

    keys = key_schema(Derived)["properties"]
    assert keys["size"]["description"] == "How big."
    assert keys["mode"]["description"] == "Which one: a or b."
    assert "description" not in keys["plain"]


def test_a_user_s_folder_offers_every_public_name(folder: Path) -> None:
    (folder / "environments").mkdir()
    for name in ("remote", "base", "_hidden"):
        (folder / "environments" / f"{name}.py").write_text(
            "from retrain import Environment\nclass Mine(Environment): ..."
        )
    assert found("environment", "remote", folder).__name__ == "Mine"
    assert found("environment", "base", folder).__name__ == "Mine"
    assert "'_hidden'" in refusal("environment", "_hidden", folder)
    assert "remote" in refusal("environment", "remot", folder)
    for kind, name in (("algorithm", "functional"), ("backend", "remote"), ("logger", "base")):
        assert f"there is no {kind} {name!r}" in refusal(kind, name, folder)


def test_a_subclass_of_environment_defined_elsewhere_is_no_candidate(folder: Path) -> None:
    (folder / "base.py").write_text(
        "from retrain import Environment\nclass Base(Environment): pass"
    )
    (folder / "child.py").write_text("from .base import Base\nclass Child(Base): pass")
    child = found("environment", "child.py", folder)
    assert child.__name__ == "Child"
    assert issubclass(child, Environment)


def test_function_rewards_stay_callable(folder: Path) -> None:
    slot = found("reward", "slot_match", folder)
    assert isinstance(slot, FunctionReward)
    assert slot("ab", "abcd") == 0.5


@pytest.mark.parametrize("name", ["exact_match", "slot_match"])
def test_the_built_in_rewards_take_any_answer_but_none(folder: Path, name: str) -> None:
    match = found("reward", name, folder)
    assert match("12", 12) == 1.0
    with pytest.raises(ValueError, match="`answer`"):
        match("None", None)


def test_a_key_cant_replace_what_a_reward_is_called_with():
    def score(completion, **further):
        return float(len(completion))

    assert bind(score, {"size": 2}, "rewards.0", provided=["completion"]) == {"size": 2}
    with pytest.raises(PluginError, match=r"rewards\.0\.completion"):
        bind(score, {"completion": "x"}, "rewards.0", provided=["completion"])


def test_annotations_that_cant_be_resolved_are_no_error():
    def make(model: Unknown | None = None, n: int = 1):  # type: ignore[name-defined]  # noqa: F821
        return n

    assert bind(make, {"n": 3}, "x") == {"n": 3}


NEIGHBOURS = {
    "environment": "class Mine(Environment): pass",
    "reward": "def mine(completion): import lazily_beside; return 1.0",
    "algorithm": "class Mine(Algorithm):\n    def advantages(self, groups): return []",
    "prompts": "class Mine(PromptSource):\n    def __len__(self): return 1\n"
    "    def row(self, index): return {'prompt': 'a'}",
    "logger": "class Mine(Callback): pass",
    "backend": "class Mine(AdapterOptions): pass",
    "loss": "def mine(logprobs, old_logprobs, advantages, mask): return 0",
}


@pytest.mark.parametrize("kind", NEIGHBOURS)
def test_any_plug_in_imports_its_neighbours_when_it_is_loaded_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    (tmp_path / "inner").mkdir()
    (tmp_path / f"of_the_config_{kind}.py").write_text("")
    (tmp_path / "inner" / f"beside_{kind}.py").write_text("")
    code = f"from retrain import *\nimport of_the_config_{kind}, beside_{kind}\n"
    (tmp_path / "inner" / "mine.py").write_text(code + NEIGHBOURS[kind])
    kind_of = KINDS.get(kind) or Kind("loss", LossFunction, callable)
    assert find_plugin(kind_of, "inner/mine.py", f"{kind}.type", tmp_path).__name__ in (
        "Mine",
        "mine",
    )


def test_a_files_own_folder_hides_no_installed_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config's folder and the working folder come first, whatever is loaded first."""
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    config, working, inner = tmp_path / "config", tmp_path / "working", tmp_path / "config/inner"
    for folder in (working, inner):
        folder.mkdir(parents=True)
    (inner / "colorsys.py").write_text(
        "import colorsys\ndef score(completion): return colorsys.rgb_to_hls(1, 1, 1)[1]"
    )
    monkeypatch.chdir(working)
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert found("reward", "inner/colorsys.py", config)("") == 1.0
    assert sys.path[:2] == [str(config), str(working)]
    assert sys.path[-1] == str(inner)


def test_a_built_in_puts_its_folder_on_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = [*sys.path]
    found("environment", "echo", tmp_path)
    assert sys.path == before


@pytest.mark.parametrize(
    ("hidden", "sections", "message"),
    [
        (["torch"], {}, "backend.type"),
        (["trl", "peft"], {}, "trl needs packages that are not installed (trl, peft): pip install"),
        (["aiohttp"], {"backend": {"type": "tinker", "url": "http://localhost:1"}}, "backend.type"),
        (["google", "google.protobuf"], {"backend": "tinker"}, "(google.protobuf)"),
        (
            ["httpx"],
            {"backend": {"sampler": {"type": "vllm", "url": "http://localhost:1"}}},
            "backend.sampler",
        ),
        (["httpx"], {"backend": "weaver"}, "weaver needs packages that are not installed (httpx)"),
    ],
)
def test_missing_packages_are_reported_with_the_other_problems(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    hidden: list[str],
    sections: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-x")
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    text = problems(folder, **sections, environment="nothing")
    assert message in text
    assert "'nothing'" in text
    assert len(text.splitlines()) == 3


def test_needed_packages_are_those_that_the_extra_installs() -> None:
    distributions = {"google.protobuf": "protobuf"}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    for options in (TrlOptions(), TinkerOptions(url="http://x"), WeaverOptions(url="http://x")):
        for extra, modules in options.needs().items():
            installs = {re.split(r"[<>=]", line)[0] for line in extras[extra]}
            assert {distributions.get(name, name) for name in modules} <= installs


def test_the_extras_agree_on_the_lowest_version_of_a_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors: dict[str, set[str]] = {}
    for line in itertools.chain(*project["optional-dependencies"].values()):
        name, _, version = line.partition(">=")
        floors.setdefault(name, set()).add(version)
    assert floors["transformers"] == {"5.16.1"}
    assert not {name: found for name, found in floors.items() if len(found) > 1}
