"""Finding plug-ins, and checking their keys and those of rewards."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from retrain.config.binding import bind
from retrain.errors import PluginError, place_of
from retrain.types import Completion, Group, Prompt, Trajectory, Turn
from tests.plugin_kit import ENVIRONMENT, found, make, problems, refusal, written

pytestmark = pytest.mark.usefixtures("clean_imports")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path)


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
        ("algorithm", "abstract.py:Half", "advantages"),
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
