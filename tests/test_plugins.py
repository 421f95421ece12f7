"""Finding plug-ins, checking their keys, and putting a run together from them."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

import retrain
from retrain.adapters.losses import LossFunction
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.weaver.options import WeaverOptions
from retrain.algorithms.grpo import GRPO
from retrain.assembly import KINDS, Parts, assemble
from retrain.assembly.schema import run_schema, with_variables
from retrain.config import parse_config
from retrain.config.binding import bind, key_schema
from retrain.config.plugins import Kind, built_in_names, find_plugin
from retrain.config.yaml_text import parse_yaml
from retrain.environment import Environment
from retrain.errors import ConfigError, PluginError, place_of
from retrain.scoring import FunctionReward
from retrain.types import Completion, Group, Prompt, Trajectory, Turn

ROOT = Path(retrain.__file__).resolve().parent.parent
ENVIRONMENT = """
from retrain import Environment
from .constants import WORD

class Mine(Environment):
    word = WORD
    def __init__(self, size: int, mode: str = "easy"):
        self.size = size
"""


@pytest.fixture(autouse=True)
def _clean_imports(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """The modules of a test's own folders are forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    temporary = str(tmp_path_factory.getbasetemp())
    for name, module in list(sys.modules.items()):
        folders = getattr(module, "__path__", ())
        if not isinstance(module, ModuleType) or not isinstance(folders, Iterable):
            continue  # torch puts objects of its own among the modules
        places = [getattr(module, "__file__", None) or ""]
        with suppress(AttributeError):  # a namespace package whose parent the test has hidden
            places += folders
        if any(str(place).startswith(temporary) for place in places):
            del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    (tmp_path / "constants.py").write_text("WORD = 'hello'")
    return tmp_path


def found(kind: str, text: str, folder: Path) -> Any:
    return find_plugin(KINDS[kind], text, f"{kind}.type", folder)


def refusal(kind: str, text: str, folder: Path) -> str:
    with pytest.raises(PluginError) as caught:
        found(kind, text, folder)
    return str(caught.value)


def make(folder: Path, **sections: Any) -> Parts:
    rows = [{"prompt": "a", "answer": "a"}]
    base = {"prompts": rows, "environment": "echo", "rewards": "exact_match"}
    return assemble(parse_config({**base, **sections}, folder))


def problems(folder: Path, **sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        make(folder, **sections)
    return str(caught.value)


@pytest.mark.parametrize("text", ["mine.py:Mine", "mine:Mine", "mine.py"])
def test_an_environment_is_found_beside_the_config(folder: Path, text: str) -> None:
    if text.startswith("mine:"):  # a module is no member of a package: it has absolute imports
        (folder / "mine.py").write_text(ENVIRONMENT.replace("from .", "from "))
    assert found("environment", text, folder).word == "hello"


def test_the_configs_folder_comes_before_the_working_folder(
    folder: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    working = tmp_path_factory.mktemp("working")
    (working / "mine.py").write_text(ENVIRONMENT)
    (working / "constants.py").write_text("WORD = 'from the working folder'")
    (working / "other.py").write_text(ENVIRONMENT)
    monkeypatch.chdir(working)
    assert found("environment", "mine.py", folder).word == "hello"
    assert found("environment", "other.py", folder).word == "from the working folder"


def test_a_file_is_executed_once_whatever_names_it(folder: Path) -> None:
    assert found("environment", "mine.py:Mine", folder) is found("environment", "mine.py", folder)


def test_a_folder_with_an_init_is_its_package(folder: Path) -> None:
    (folder / "__init__.py").write_text("SHARED = 3")
    (folder / "uses.py").write_text(
        "from retrain import Environment\nfrom . import SHARED\n"
        "class Uses(Environment):\n    shared = SHARED\n"
    )
    assert found("environment", "uses.py", folder).shared == 3


def test_a_users_package_hides_no_built_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = folder / "environments"
    package.mkdir()
    (package / "echo.py").write_text(ENVIRONMENT.replace("from .constants import WORD", "WORD=1"))
    for module in ("environments", "environments.echo"):  # another test may have imported ours
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    assert found("environment", "echo", folder).__name__ == "Echo"
    assert found("environment", "environments.echo:Mine", folder).__name__ == "Mine"


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("environment", "ech", "there is no environment 'ech'; did you mean echo? (available: "),
        ("algorithm", "gpro", "did you mean grpo? (available: dpo, grpo, "),
        ("environment", "a.b.Mine", "a.b:Mine"),
        ("environment", "mime.py:Mine", "mine.py"),
        ("environment", "mine.py:Mime", "there is no Mime in "),
        ("environment", "constants.py:WORD", "not a subclass of Environment; it defines no"),
        ("reward", "mine.py:Mine", "RewardCalculator"),
        ("environment", "constants.py", "must define one Environment, found none"),
        ("environment", "nowhere:X", "there is no module nowhere: install it, or put it into "),
        ("environment", "two.py", "two.py:A"),
        ("environment", "raises.py", "raises.py:2: RuntimeError"),
        ("environment", "raises:X", "raises.py:2: RuntimeError"),
        ("environment", "syntax.py", "syntax.py:1: SyntaxError:"),
        ("environment", "leaves.py", "leaves.py:1: SystemExit: 3"),
        ("environment", "lacks.py", "'surely_not_there'"),
        ("environment", "lacks:X", "'surely_not_there'"),
        ("algorithm", "abstract.py:Half", "Half in "),
    ],
)
def test_what_cannot_be_found_says_what_to_do(
    folder: Path, kind: str, text: str, message: str
) -> None:
    header = "from retrain import Environment, Algorithm\n"
    sources = {
        "two": header + "class A(Environment): pass\nclass B(Environment): pass",
        "raises": "x = 1\nraise RuntimeError('no database')",
        "syntax": "def f(:",
        "leaves": "raise SystemExit(3)",
        "lacks": "import surely_not_there",
        "abstract": header + "class Half(Algorithm): pass",
    }
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    refused = refusal(kind, text, folder)
    assert refused.startswith(f"{kind}.type: ")
    assert message in refused


def test_a_missing_file_lists_where_it_was_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    working = tmp_path_factory.mktemp("working")
    monkeypatch.chdir(working)
    message = refusal("environment", "gone.py:X", folder)
    assert f"file not found: {folder / 'gone.py'} or {working / 'gone.py'}" in message


def test_an_abstract_class_names_what_it_lacks(folder: Path) -> None:
    (folder / "half.py").write_text("from retrain import Algorithm\nclass Half(Algorithm): pass")
    assert "advantages" in refusal("algorithm", "half.py:Half", folder)


class Server(BaseModel, extra="forbid"):
    """A nested mapping."""

    url: str


def wanted(
    size: int,
    rate: float = 1.0,
    mode: Literal["a", "b"] = "a",
    names: tuple[str, ...] = (),
    server: Server | None = None,
    shares: dict[str, float] | None = None,
) -> None:
    """What the signature tests bind."""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"size": 1, "raet": 2}, "x.raet: unknown key; did you mean x.rate?"),
        ({}, f"x.size: missing; wanted{place_of(wanted)} needs it"),
        ({"size": True}, "x.size: got true, expected an integer"),
        ({"size": "1"}, "x.size: got '1', expected an integer"),
        ({"size": 1, "rate": "fast"}, "x.rate: got 'fast', expected a number"),
        ({"size": 1, "mode": "c"}, "x.mode: got 'c', expected 'a' or 'b'"),
        ({"size": 1, "names": [1]}, "x.names.0: got 1, expected a string"),
        (
            {"size": 1, "server": {"url": "a", "name": 1}},
            "x.server.name: unknown key; expected one of url",
        ),
        ({"size": 1, "server": {}}, f"x.server.url: missing; wanted{place_of(wanted)} needs it"),
        ({"size": 1, "shares": {"a": "b"}}, "x.shares.a: got 'b', expected a number"),
    ],
)
def test_the_signature_is_the_schema(keys: Mapping[str, Any], message: str) -> None:
    with pytest.raises(PluginError) as caught:
        bind(wanted, keys, "x")
    assert caught.value.problems == (message,)


def test_all_wrong_keys_are_told_at_once() -> None:
    with pytest.raises(PluginError) as caught:
        bind(wanted, {"sizes": 1, "rate": [], "mode": 3}, "x")
    assert len(caught.value.problems) == 4


def test_keys_are_converted_as_annotated() -> None:
    assert bind(wanted, {"size": 1, "rate": 2, "names": ["n"]}, "x") == {
        "size": 1,
        "rate": 2.0,
        "names": ("n",),
    }


def test_an_unresolved_annotation_checks_nothing() -> None:
    def loose(size: Missing) -> None: ...  # type: ignore[name-defined]  # noqa: F821 - on purpose

    assert bind(loose, {"size": object}, "x") == {"size": object}


def test_a_constructor_may_ask_for_the_configs_folder() -> None:
    def asks(name: str, base_dir: Path) -> None: ...

    assert bind(asks, {"name": "n"}, "x", given={"base_dir": Path("/c")})["base_dir"] == Path("/c")
    assert bind(wanted, {"size": 1}, "x", given={"base_dir": Path("/c")}) == {"size": 1}


def test_a_run_is_put_together(folder: Path) -> None:
    parts = make(
        folder,
        environment={"type": "mine.py:Mine", "size": 3},
        algorithm={"type": "grpo", "baseline": "leave_one_out", "loss_config": {"epsilon": 0.1}},
        eval={"prompts": ["b", {"prompt": "c", "answer": "c"}]},
    )
    assert len(parts.prompts) == 1
    assert parts.eval_prompts is not None
    assert len(parts.eval_prompts) == 2
    assert parts.environment() is not parts.environment()
    assert isinstance(parts.algorithm, GRPO)
    assert (parts.loss, parts.normalisation) == ("dapo", None)
    assert parts.loss_config == {"epsilon": 0.1}
    assert "dapo" in parts.capabilities.losses
    assert parts.scorer.rewards[0].name == "exact_match"
    assert parts.warnings == ()


async def test_rewards_may_be_functions_classes_or_decorated(folder: Path) -> None:
    (folder / "scores.py").write_text(
        """
from retrain import RewardCalculator, reward

def helper(text): return len(text)

def length(completion, target: int, scale: float = 1.0): return helper(completion) * scale - target

async def constant(value: float = 1.0): return value

@reward(name="nice", factor=2)
def decorated(completion, factor, required, bonus=0): return factor + bonus + required

class Calculator(RewardCalculator):
    def __init__(self, value: float): self.value = value
    async def calculate(self, trajectory): return self.value
"""
    )
    parts = make(
        folder,
        rewards=[
            {"type": "scores.py:length", "target": 1, "scale": 2},
            {"type": "scores.py:constant", "weight": 3},
            {"type": "scores.py:decorated", "bonus": 0.5, "required": 0.5},
            {"type": "scores.py:Calculator", "value": 5, "name": "own"},
        ],
    )
    completion = Completion([1], [0.0], "abc", "stop", 0)
    prompt = Prompt("0.0.0", ({"role": "user", "content": "a"},))
    trajectory = Trajectory(prompt, [Turn([1], completion)])
    await parts.scorer.score(Group(prompt, [trajectory]))
    assert trajectory.rewards == {"length": 5.0, "constant": 1.0, "nice": 3.0, "own": 5.0}
    assert trajectory.reward == 5 + 3 + 3 + 5


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        ({"type": "r.py:fine", "targt": 1}, "rewards.0.targt"),
        ({"type": "r.py:fine", "weigth": 1}, "rewards.0.weight"),
        ({"type": "r.py:fine", "target": "x"}, "rewards.0.target: got 'x'"),
        ({"type": "r.py:needs"}, "rewards.0.word"),
        ({"type": "r.py:fine", "completion": 1}, "rewards.0.completion"),
        ({"type": "r.py:Fails"}, "rewards.0"),
        ({"type": "r.py:object_", "x": 1}, "rewards.0.x"),
        ({"type": "r.py:any_", "wieght": 1}, "rewards.0.wieght"),
        ({"type": "r.py:any_", "targt": 1, "proceses": 2}, "rewards.0.targt"),
        ({"type": "r.py:any_", "scale": 1, "onlyif": "x"}, "0.only_if"),
        ({"type": "r.py:decorated"}, "rewards.0.word"),
        ({"type": "r.py:by_place"}, "'by_place' (r.py:8)"),
        ({"type": "r.py:fine", "name": "environment"}, "'environment'"),
    ],
)
def test_a_rewards_keys_are_checked(folder: Path, reward: dict[str, Any], message: str) -> None:
    (folder / "r.py").write_text(
        """
from retrain import RewardCalculator, reward
def fine(completion, target: int = 1): return 1.0
@reward
def any_(completion, target: int = 1, **further): return 1.0
@reward
def decorated(completion, word): return 1.0
@reward
def by_place(completion, /): return 1.0
def needs(completion, word: str): return 1.0
class Fails(RewardCalculator):
    def __init__(self): raise OSError("no model")
    async def calculate(self, trajectory): return 1.0
class Fine(RewardCalculator):
    async def calculate(self, trajectory): return 1.0
object_ = Fine()
"""
    )
    message = message.replace("no model (r.py:", f"no model at {folder / 'r.py'}:")
    assert message in problems(folder, rewards=[reward])


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("reward('a')(len)", "@reward(name='a')"),
        ("reward(5)", "@reward: got 5"),
        ("reward(name=5)(len)", "@reward"),
        ("reward(print, scal=1)", "'print'"),
        ("reward(min)", "reward 'min' has no signature; wrap it in a function"),
        ("@reward(scal=1)\ndef near(completion, scale=2): return 1.0",
         "'near' (r.py:3)"),
        ("@reward\ndef each(completion): yield 1.0",
         "'each' (r.py:3)"),
        ("@reward\nasync def each(completion): yield 1.0",
         "'each' (r.py:3)"),
        ("reward(type('Each', (), {'__call__': lambda self, completion: (yield)})())",
         "reward '' yields; expected it to return a number or a Reward"),
        ("json.loads('no')", "JSONDecodeError"),
    ],
)  # fmt: skip
def test_what_a_decorator_rejects_is_at_a_line_of_the_users(
    folder: Path, code: str, message: str
) -> None:
    (folder / "r.py").write_text(f"import json\nfrom retrain import reward\n{code}\n")
    text = problems(folder, rewards=["r.py"])
    assert text.startswith(f"rewards.0.type: importing r.py failed at {folder / 'r.py'}:3: ")
    assert message in text


def test_two_rewards_of_one_name_are_refused(folder: Path) -> None:
    message = problems(folder, rewards=["exact_match", "exact_match"])
    assert "'exact_match'" in message


def test_an_environments_constructor_that_raises_is_a_config_error(folder: Path) -> None:
    (folder / "e.py").write_text(
        "from retrain import Environment\n"
        "class E(Environment):\n    def __init__(self): raise KeyError('HOME')"
    )
    assert "environment: E(...) raised KeyError: 'HOME' at " in problems(
        folder, environment="e.py:E"
    )


def test_the_problems_of_all_parts_come_together(folder: Path) -> None:
    message = problems(
        folder,
        environment={"type": "mine.py:Mine", "siz": 3},
        rewards=["exact_mach"],
        algorithm={"type": "grpo", "baselin": "mean"},
        backend={"type": "trl", "learning_rat": 1},
        prompts={"type": "file", "path": "gone.jsonl"},
        model="./nowhere",
    )
    for part in (
        "environment.siz: unknown key; did you mean environment.size?",
        "environment.size: missing",
        "did you mean exact_match?",
        "algorithm.baselin: unknown key; did you mean algorithm.baseline?",
        "backend.learning_rat: unknown key; did you mean backend.learning_rate?",
        "prompts: file not found",
        "model: folder not found:",
    ):
        assert part in message


def test_foreign_keys_inside_plug_in_sections_are_explained(folder: Path) -> None:
    message = problems(
        folder,
        algorithm={"type": "grpo", "hyperparameters": {"learning_rate": 1, "num_generations": 2}},
        environment={"type": "mine.py:Mine", "size": 1, "env_specific_config": {"mode": "x"}},
        backend={"type": "trl", "loss_fn": "ppo"},
    )
    for part in (
        "algorithm.hyperparameters.learning_rate: unknown key; use backend.learning_rate",
        "algorithm.hyperparameters.num_generations: unknown key; use algorithm.group_size",
        "environment.env_specific_config.mode: unknown key; use environment.mode",
        "backend.loss_fn: unknown key; use algorithm.loss",
    ):
        assert part in message


LIMITED = """
from retrain import AdapterOptions, Capabilities
class Options(AdapterOptions):
    adapter = "nowhere:Adapter"
    def capabilities(self):
        return Capabilities(losses=frozenset({"ppo", "importance_sampling", "dro"}),
                            max_staleness=3, sampling=frozenset({"max_tokens", "temperature"}))
    def problems(self, config):
        return ["backend: told by problems()"] if config.train.seed == 13 else []
"""


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "'dapo'"),
        ({"algorithm": {"loss": "pp"}}, "the loss 'pp'; the nearest is ppo"),
        ({"algorithm": {"loss": "my.py:loss"}}, "does not support custom losses"),
        ({"algorithm": {"loss": "dro", "normalisation": "sequence"}}, "can't be normalised by seq"),
        ({"algorithm": {"group_size": 1}}, "algorithm.group_size: got 1"),
        ({"sampling": {"top_k": 5}}, "sampling.top_k: got 5"),
        ({"sampling": {"stop": ["x"]}}, "sampling.stop: got ('x',)"),
        ({"staleness": {"target": 2}}, "staleness.max: got 6"),
        ({"train": {"seed": 13}}, "backend"),
        ({"rewards": []}, "rewards"),
        (
            {"algorithm": {"loss": "importance_sampling"}, "staleness": {"target": 2, "max": 3}},
            "importance_sampling",
        ),
        ({"endpoint": {"honour": ["stop"]}}, "endpoint.honour: got stop"),
    ],
)
def test_what_the_backend_cannot_honour_is_refused(
    folder: Path, sections: dict[str, Any], message: str
) -> None:
    (folder / "limited.py").write_text(LIMITED)
    base = {"backend": "limited.py", "algorithm": {"loss": "ppo"}} if sections else {}
    assert message in problems(folder, **{"backend": "limited.py", **base, **sections})


def test_the_rewards_of_an_agent_may_be_its_own(folder: Path) -> None:
    (folder / "solve.py").write_text("def solve(base_url):\n    return {'reward': 1.0}")
    make(folder, rewards=[], environment={"type": "agent", "run": "solve.py:solve"})


def test_an_unclipped_loss_on_old_samples_can_be_forced(folder: Path) -> None:
    parts = make(
        folder,
        algorithm={"loss": "importance_sampling", "loss_config": {"force": True}},
        staleness={"target": 2},
    )
    assert (parts.loss, parts.normalisation, parts.loss_config) == (
        "importance_sampling",
        "token",
        {},
    )


def test_a_normalisation_beside_trls_own_loss_is_refused(folder: Path) -> None:
    message = problems(folder, algorithm={"loss": "dapo", "normalisation": "token"})
    assert "dapo" in message


def test_seldom_meant_sampling_is_warned_of(folder: Path) -> None:
    (folder / "limited.py").write_text(LIMITED)
    backend = {"backend": "limited.py", "algorithm": {"loss": "ppo"}}
    (warm,) = make(folder, sampling={"temperature": 0.7}, **backend).warnings
    assert warm.startswith("sampling with temperature 0.7: ppo weighs tokens by the ratio")
    (greedy,) = make(folder, sampling={"temperature": 0}, **backend).warnings
    assert "the rollouts of a group are equal" in greedy


def test_a_short_name_of_a_key_beside_it_is_no_misspelling(folder: Path) -> None:
    message = problems(folder, backend={"lr": 4})
    assert message == "backend.lr: unknown key; use backend.learning_rate"
    message = problems(folder, backend={"args": {"optimm": 1}})
    assert message.endswith("has no key 'optimm' (did you mean 'optim'?)")


def test_rows_without_the_answer_that_a_reward_asks_for_are_warned_of(folder: Path) -> None:
    (folder / "bare.txt").write_text("a\nb\n")
    (folder / "mild.py").write_text("def mild(completion, answer=None): return 0.0")
    (warning,) = make(folder, prompts="bare.txt").warnings
    assert warning.startswith(f"prompts: no row of {folder / 'bare.txt'} has an answer, but the re")
    assert "exact_match" in warning
    (warning,) = make(folder, eval={"prompts": ["b"]}).warnings
    assert warning.startswith("eval.prompts: no row of the list has an answer")
    assert make(folder, prompts="bare.txt", rewards="mild.py").warnings == ()


def test_credit_per_turn_that_clip_disables_is_warned_of(folder: Path) -> None:
    turns, clipped = {"type": "grpo", "credit": "turns"}, {"type": "environment", "clip": [0, 1]}
    (warning,) = make(folder, algorithm=turns, rewards=[clipped]).warnings
    assert warning.startswith("rewards.0.clip: ")
    assert make(folder, algorithm={"type": "grpo"}, rewards=[clipped]).warnings == ()


def test_a_stall_shorter_than_another_deadline_is_warned_of(folder: Path) -> None:
    assert make(folder, deadlines={"stall": 3600, "blocked": 9000}).warnings == ()
    (warning,) = make(folder, deadlines={"stall": 1800, "step": 2000}).warnings
    assert warning.startswith(
        "deadlines.stall is 1800 s, less than deadlines.step (2000), sample (3600), update (3600): "
    )
    assert "3600" in warning


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./gone", "model"),
        ("/gone/model", "/gone/model"),
        ("a/b/c", "model"),
        ("  ", "model: got '  '"),
        ("hollow", "config.json"),
    ],
)
def test_a_model_that_is_not_there_is_refused(folder: Path, model: str, message: str) -> None:
    (folder / "hollow").mkdir()
    assert message in problems(folder, model=model)


def test_a_hub_id_is_left_to_the_backend(folder: Path) -> None:
    assert make(folder, model="Qwen/Qwen3-0.6B").config.model == "Qwen/Qwen3-0.6B"


def test_a_backend_whose_library_is_missing_says_what_to_install(folder: Path) -> None:
    (folder / "limited.py").write_text(LIMITED.replace('"nowhere:', '"needs:'))
    (folder / "needs.py").write_text("import surely_not_there")
    parts = make(folder, backend="limited.py", algorithm={"loss": "ppo"})
    with pytest.raises(PluginError, match="surely_not_there"):
        parts.open_adapter()


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
