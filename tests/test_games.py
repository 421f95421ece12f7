"""Environments of game libraries, each with the real package.

textarena and openenv-core are in no environment of the tests: to test them, install one beside
pytest and run this file there.
"""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import yaml
from gymnasium import spaces

import retrain
from environments.gymnasium import Gymnasium, action_of
from environments.openenv import OpenEnv
from environments.reasoning_gym import ReasoningGym
from environments.textarena import TextArena
from retrain import Action, Environment, Prompt, StepResult, UserCodeError
from retrain.check import check_subject
from retrain.cli.run import main
from retrain.supervision.outages import is_outage

ROOT = Path(retrain.__file__).resolve().parent.parent
LAKE: dict[str, Any] = {
    "id": "FrozenLake-v1",
    "kwargs": {"desc": ["SF", "HG"], "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}


def prompt(seed: int = 0, **metadata: Any) -> Prompt:
    return Prompt("0.0.0", (), metadata=metadata, seed=seed)


def text(messages: Any) -> str:
    """The text of a single message to the model."""
    [message] = messages
    assert message["role"] == "user"
    return str(message["content"])


async def play(
    environment: Environment, replies: list[str], seed: int = 0
) -> tuple[list[str], list[StepResult]]:
    """The texts that a model sees, until the episode ends or the replies do, and the results."""
    await environment.setup()
    try:
        seen, results = [text(await environment.reset(prompt(seed)))], list[StepResult]()
        for reply in replies:
            results.append(await environment.step(Action(reply)))
            if results[-1].terminated or results[-1].truncated:
                break
            seen.append(text(results[-1].observation))
    finally:
        await environment.close()
    return seen, results


# Gymnasium


async def test_a_game_of_gymnasium_is_read_as_text_and_played_by_names() -> None:
    lake = Gymnasium(**LAKE, hint="left or right?", penalty=0.25)
    seen, results = await play(lake, ["hm", "Not down. RIGHT!", "2", "So: down."])
    assert seen == ["[S]F\nHG", "left or right?", "  (Right)\nS[F]\nHG", "  (Right)\nS[F]\nHG"]
    assert [result.reward for result in results] == [-0.25, 0.0, 0.0, 1.0]
    assert results[-1].terminated
    assert results[-1].info["gymnasium"]["prob"] == 1


async def test_the_turns_of_a_game_are_limited_and_a_prompt_comes_before_it() -> None:
    lake = Gymnasium(**LAKE, max_turns=2, render="observation", system="Cross the lake.")
    await lake.setup()
    row = Prompt("0.0.0", [{"role": "user", "content": "Be quick."}])
    system, first = await lake.reset(row)
    assert system["content"] == "Cross the lake."
    assert first["content"] == "Be quick.\n\n0"
    assert not (await lake.step(Action("left"))).truncated
    assert (await lake.step(Action("?"))).truncated
    await lake.close()


async def test_the_seed_of_the_prompt_makes_the_task() -> None:
    hands = [(await play(Gymnasium(id="Blackjack-v1"), [], seed))[0] for seed in (1, 1, 2, 3)]
    assert hands[0] == hands[1]
    assert len({str(hand) for hand in hands}) == 3
    assert len(json.loads(hands[0][0])) == 3
    assert Gymnasium(id="Blackjack-v1").hint == "Answer with a number from 0 to 1."


@pytest.mark.parametrize(
    ("space", "names", "reply", "expected"),
    [
        (spaces.Discrete(3), [], "first 0, then 2", 2),
        (spaces.Discrete(3), [], "3", None),
        (spaces.Discrete(3), [], "-1", None),
        (spaces.Discrete(3), [], "1.5", None),
        (spaces.Discrete(3), [], "1e999", None),
        (spaces.Box(-9, 9, (1,)), [], "1e999", None),
        (spaces.Discrete(3, start=5), ["a", "b", "c"], "a or B", 6),
        (spaces.Discrete(3), ["up", "up left", "down"], "I go up left", 1),
        (spaces.Discrete(2), ["<", ">"], "<", 0),
        (spaces.Discrete(2), ["up", "down"], "setup", None),
        (spaces.Discrete(2), ["up", "down"], "", None),
        (spaces.Box(-1, 1, (2,)), [], "push 0.5 and -1e-1", [0.5, -0.1]),
        (spaces.Box(-1, 1, (2,)), [], "0.5", None),
        (spaces.Box(-1, 1, (2,)), [], "0.5, 7", None),
        (spaces.MultiDiscrete([2, 3]), [], "[1, 2]", [1, 2]),
        (spaces.MultiBinary(2), [], "0 1", [0, 1]),
        (spaces.Text(5), [], " abc\n", "abc"),
        (spaces.Text(2), [], "abc", None),
    ],
)
def test_actions_are_read_from_replies(
    space: Any, names: list[str], reply: str, expected: Any
) -> None:
    action = action_of(space, names, reply)
    valid = action is not None and bool(space.contains(action))
    assert valid == (expected is not None)
    if valid:
        assert numpy.allclose(action, expected) if space.dtype.kind != "U" else action == expected


OWN = """
import gymnasium, numpy

class Pair(gymnasium.Env):
    metadata = {"render_modes": []}
    action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(9)] * 2)
    observation_space = gymnasium.spaces.Dict({"x": gymnasium.spaces.Box(0, 1, (2,))})

    def __init__(self, goal=3):
        self.goal = goal

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"x": numpy.array([0.12345678, 1.0], dtype="float32")}, {}

    def step(self, action):
        return {"x": numpy.float32(1)}, numpy.float32(sum(action) == self.goal), True, False, {}

def pair(reply):
    return tuple(map(int, reply.split())) if reply else None

def picture(observation, env):
    return f"{env.goal}: {observation['x'][1]}"
"""


async def test_a_class_of_ones_own_plays_with_functions_of_ones_own(tmp_path: Path) -> None:
    (tmp_path / "own_pair.py").write_text(OWN)
    own = {"id": "own_pair.py:Pair", "kwargs": {"goal": 5}, "base_dir": tmp_path}
    reader = {"actions": "own_pair.py:pair"}
    seen, results = await play(Gymnasium(**own, **reader), ["", "2 3"])
    assert seen[0] == '{"x": [0.1235, 1.0]}'
    assert "Tuple" in seen[1]
    assert results[-1][1:4] == (1.0, True, False)
    drawn = Gymnasium(**own, **reader, render="own_pair.py:picture")
    assert (await play(drawn, []))[0] == ["5: 1.0"]


# Reasoning Gym


async def test_a_task_of_reasoning_gym_is_scored_by_its_data_set() -> None:
    sums = ReasoningGym(dataset="chain_sum", config={"max_terms": 2}, size=3)
    rows = sums.prompts()
    assert len(rows) == 3
    assert rows[1] == {**rows[1], "prompt": sums.dataset[1]["question"], "idx": 1}
    rewards = []
    for form in ("<answer>{}</answer>", "<answer>1</answer> No: <answer> {}</answer>", "{}", ""):
        system, question = await sums.reset(prompt(idx=1))
        result = await sums.step(Action(form.format(sums.entry["answer"])))
        rewards.append(result.reward)
        assert result.terminated
    assert "<answer>" in system["content"]
    assert question["content"] == sums.entry["question"]
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    plain = ReasoningGym(dataset="chain_sum", config={"max_terms": 2}, size=3, answer_tag="")
    [question] = await plain.reset(prompt(idx=1))
    assert question["content"] == sums.entry["question"], "the same task by the same number"
    assert (await plain.step(Action(plain.entry["answer"]))).reward == 1.0
    with pytest.raises(ValueError, match="idx 3, expected 0 to 2"):
        await sums.reset(prompt(idx=3))


async def test_several_data_sets_are_mixed_by_weight() -> None:
    parts = [
        {"name": "chain_sum", "weight": 3, "config": {"max_terms": 2}},
        {"name": "letter_counting"},
    ]
    mixed, sources = ReasoningGym(dataset=parts, size=80), []
    for index in range(80):
        await mixed.reset(prompt(idx=index))
        result = await mixed.step(Action(f"<answer>{mixed.entry['answer']}</answer>"))
        assert result.reward == 1.0
        sources.append(result.info["dataset"])
    assert 45 <= sources.count("chain_sum") < 75
    assert set(sources) == {"chain_sum", "letter_counting"}


# TextArena


async def test_a_game_of_textarena_plays_the_same_whatever_others_draw() -> None:
    pytest.importorskip("textarena.envs")
    keys: dict[str, Any] = {"id": "GuessTheNumber-v0", "kwargs": {"max_number": 5}}
    replies = ["none", *(f"[{number}]" for number in range(1, 6))]
    before = random.getstate()
    games = [await play(TextArena(**keys), replies, seed) for seed in (7, 7, 8)]
    assert random.getstate() == before
    assert str(games[0]) == str(games[1])
    seen, results = games[0]
    assert "between 1 and 5" in seen[0]
    assert "invalid move" in seen[1]
    assert "[none]" not in seen[1], "it does not hear itself"
    assert "higher" in seen[2] or results[1].terminated
    assert (results[-1].reward, results[-1].terminated) == (1.0, True)


async def test_the_players_of_textarena_are_seats() -> None:
    pytest.importorskip("textarena.envs")
    game = TextArena(id="TicTacToe-v0", players=2, system="Play.")
    assert game.seats == ("player_0", "player_1")
    system, first = await game.reset(prompt())
    assert system["content"] == "Play."
    assert "You are Player 0" in first["content"]
    mover, results = "player_0", []
    for cell in (0, 3, 1, 4, 2):
        results.append(await game.step(Action(f"[{cell}]")))
        mover = results[-1].info.get("seat", mover)
    assert [result.info.get("seat") for result in results] == [
        "player_1", "player_0", "player_1", "player_0", None,
    ]  # fmt: skip
    system, heard = results[0].observation
    assert "You are Player 1" in heard["content"]
    assert "[Player 0] [0]" in heard["content"]
    assert "You are" not in text(results[2].observation), "said once"
    assert results[-1].reward == 1.0
    assert results[-1].info["rewards"] == {"player_1": -1.0}


def test_a_player_of_textarena_can_be_an_opponent(tmp_path: Path) -> None:
    pytest.importorskip("textarena.envs")
    (tmp_path / "corner.py").write_text("def move(messages, seed):\n    return '[0]'")
    config = {
        **LEAST,
        "environment": {"type": "textarena", "id": "TicTacToe-v0", "players": 2},
        "opponents": {"player_1": "corner.py:move"},
    }
    rows = trained(tmp_path, config)
    assert {row["seat"] for row in rows} == {"player_0"}
    assert {row["outcome"] for row in rows} == {"ok"}


# OpenEnv

SERVER = """
import socket
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app

class Guess(Action):
    number: int

class Hint(Observation):
    text: str

class Game(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, highest=9):
        self.secret = seed % (highest + 1)
        return Hint(text=f"0-{highest}?")

    def step(self, action, timeout_s=None):
        right = action.number == self.secret
        return Hint(text="" if right else "no", reward=float(right), done=right)

    @property
    def state(self):
        return State()

listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
app = create_app(Game, Guess, Hint, max_concurrent_envs=8)
uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The URL of an OpenEnv server, and its process."""
    pytest.importorskip("openenv.core")
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    command = [sys.executable, "-W", "ignore", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        finally:
            process.kill()


def number_of(reply: str) -> dict[str, Any]:
    return {"number": reply if reply.isdecimal() else 0.5}


async def test_an_openenv_server_plays_by_its_own_protocol(server: Any) -> None:
    url, process = server
    keys: dict[str, Any] = {"url": url, "reset": {"highest": 4}, "observation": "text"}
    reader = {"action": f"{__name__}:number_of"}
    seen, results = await play(OpenEnv(**keys, **reader), ["none", "1", "3"], seed=8)
    assert seen == ["0-4?", "This is not a valid action.", "no"]
    assert [result.reward for result in results] == [0.0, 0.0, 1.0]
    assert results[-1].terminated
    assert results[-1].info == {"openenv": {"text": ""}}

    games = [OpenEnv(url=url, action="number") for _ in range(3)]
    for game in games:
        await game.setup()
    for number, game in enumerate(games):
        assert text(await game.reset(prompt(number))) == "0-9?"
    found = [(await game.step(Action(str(number)))).reward for number, game in enumerate(games)]
    assert found == [1.0, 1.0, 1.0], "a session each"
    await games[0].close()

    more = [OpenEnv(url=url) for _ in range(8)]  # besides two of `games`
    for game in more:
        await game.setup()
    played = await asyncio.gather(*[g.reset(prompt()) for g in more], return_exceptions=True)
    refused = [str(error) for error in played if isinstance(error, UserCodeError)]
    assert len(refused) == 2
    assert all("at capacity" in error for error in refused)
    for game in more:
        await game.close()

    process.kill()
    process.wait()
    with pytest.raises(Exception, match="close frame") as lost:
        await games[1].reset(prompt())
    assert is_outage(lost.value)
    await games[1].close()
    with pytest.raises(ConnectionError, match="Failed to connect") as gone:
        await OpenEnv(url=url).setup()
    assert is_outage(gone.value)


# in a run

LEAST: dict[str, Any] = {
    "model": "tiny",
    "algorithm": {"type": "grpo", "group_size": 2},
    "sampling": {"max_tokens": 3},
    "train": {"total_train_steps": 1, "groups_per_step": 2},
}


def trained(folder: Path, config: dict[str, Any]) -> list[dict[str, Any]]:
    """The rollouts of a run."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    assert main([str(file), "--run-dir", str(folder / "run")]) == 0
    lines = (folder / "run" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("name", ["gymnasium", "reasoning_gym"])
async def test_the_games_of_the_configs_keep_what_an_environment_promises(name: str) -> None:
    findings = await check_subject(str(ROOT / "configs" / f"{name}.yaml"))
    assert [str(finding) for finding in findings if not finding.good] == []


def test_a_tiny_model_trains_on_the_frozen_lake(tmp_path: Path) -> None:
    lake = {**LAKE, "type": "gymnasium", "penalty": 0.1, "max_turns": 3}
    rows = trained(tmp_path, {**LEAST, "environment": lake})
    assert {row["outcome"] for row in rows} == {"ok"}
    assert all(row["info"]["unreadable"] for row in rows if row["reward"] < 0)
    assert {len(row["messages"]) for row in rows} <= {2, 4, 6, 7}


SUMS = {"type": "reasoning_gym", "dataset": "chain_sum"}
WRONG = [
    (dict(LAKE, id="FrozenLak-v1"), "environment.id: FrozenLak-v1", "Did you mean: `FrozenLake`?"),
    (dict(LAKE, kwargs={"dsc": 1}), "environment.id: FrozenLake-v1", "argument 'dsc'"),
    (dict(LAKE, actions=["a"]), "environment.actions: got 1 names, but an action is of"),
    (dict(LAKE, id="nowhere:Lake"), "environment.id: there is no module nowhere"),
    (dict(LAKE, render="ascii"), "environment.render: there is no function 'ascii'"),
    (dict(LAKE, action=[]), "environment.action: unknown key; did you mean environment.actions?"),
    (dict(SUMS, dataset="chain_sums"), "unknown dataset 'chain_sums'; did you mean chain_s"),
    (dict(SUMS, config={"terms": 1}), "environment.config: chain_sum: ", "argument 'terms'"),
    (dict(SUMS, config={"min_terms": 9}), "environment.config: chain_sum: max_terms must be"),
    (dict(SUMS, dataset=[{"name": "chain_sum", "size": 3}]), "keyword argument 'size'"),
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: str(wrong[1]))
def test_a_wrong_game_fails_before_the_run(
    wrong: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, *expected = wrong
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump({**LEAST, "environment": {"type": "gymnasium", **keys}}))
    assert main([str(file), "--dry-run"]) == 2
    said = capsys.readouterr().err
    assert all(part in said for part in expected), said


def test_a_wrong_game_of_textarena_fails_before_the_run(tmp_path: Path) -> None:
    pytest.importorskip("textarena.envs")
    with pytest.raises(retrain.ConfigError, match="TicTacToe-v0"):
        TextArena(id="TicTacTo-v0")
    with pytest.raises(retrain.ConfigError, match="number of players has to be 2, received 1"):
        TextArena(id="TicTacToe-v0")


@pytest.mark.parametrize(
    ("module", "make", "extra"),
    [
        ("gymnasium.envs.registration", lambda: Gymnasium(id="Taxi-v4"), "gymnasium"),
        ("reasoning_gym.utils", lambda: ReasoningGym(dataset="chain_sum"), "reasoning-gym"),
        ("textarena.envs.registration", lambda: TextArena(id="Nim-v0"), "textarena"),
        ("openenv.core.generic_client", lambda: OpenEnv(url="http://localhost"), "openenv"),
    ],
)
def test_a_missing_library_is_named_with_the_command_that_installs_it(
    module: str, make: Any, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(
        retrain.ConfigError, match=rf"is not installed \(.*\): pip install .*\[{extra}\]"
    ):
        make()
