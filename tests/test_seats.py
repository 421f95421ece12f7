"""Rollouts with several seats: players of an environment, roles of an agent, and opponents."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from benchmarks.mock_engine import CharacterTokenizer, MockAdapter, MockOptions, mock_config
from environments.nim import Nim, at_random, taken
from retrain.agents.calls import Calls
from retrain.agents.server import EndpointServer
from retrain.algorithms.batching import make_samples
from retrain.assembly import assemble
from retrain.chat import Chat
from retrain.check import check_environment, check_subject
from retrain.config import EndpointConfig, Plugin, RunConfig, load_config
from retrain.environment import Action, Environment, StepResult
from retrain.errors import ConfigError, NoSignalError
from retrain.observe.run_dir import read_metrics
from retrain.pipeline import train
from retrain.pipeline.checkpoint import group_from_json, group_to_json
from retrain.pipeline.signal import Signal, without_signal
from retrain.rollout import Rollouts, Slot
from retrain.rollout.opponents import Opponent, opponent_of
from retrain.scoring import Scorer
from retrain.types import Group, Prompt, Trajectory
from tests.pipe_kit import kept_adapter, parts_with, rollouts_of

HERE = f"{__file__}:"
PROMPT = Prompt("0.0.0", ({"role": "user", "content": "a="},), "aaaa")
ROWS = [{"prompt": "a=", "answer": "aa"}, {"prompt": "b=", "answer": "bb"}]


def say(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


class Duel(Environment):
    """X and O speak in turn; X earns its share of `a`, O that of `b`, and the other loses it."""

    seats: Any = ("X", "O")

    def __init__(self, turns: int = 4, info: Any = None) -> None:
        self.turns, self.info = turns, info

    async def reset(self, prompt: Prompt) -> Any:
        self.said: list[str] = []
        return prompt.messages

    async def step(self, action: Action) -> StepResult:
        mover, other = ("X", "O") if len(self.said) % 2 == 0 else ("O", "X")
        self.said.append(action.text)
        share = action.text.count("a" if mover == "X" else "b") / 4
        info = {"seat": other, "rewards": {other: -share}, f"by {mover}": len(self.said)}
        if self.info is not None and len(self.said) == 2:
            info = self.info
        over = len(self.said) == self.turns
        return StepResult(say(f"{mover}:{action.text};"), share, over, False, info)


def rollouts(opponents: dict[str, Opponent] | None = None, **sections: Any) -> Rollouts:
    config = RunConfig(prompts=Plugin(type="list"), **sections)
    adapter, chat = MockAdapter(MockOptions(), config), Chat(CharacterTokenizer(), template="none")
    return Rollouts(config, adapter, chat, 4096, opponents=opponents or {})


async def played(
    make: Any = Duel, size: int = 3, opponents: Any = None, **sections: Any
) -> dict[str, list[Trajectory]]:
    """A scored group, by seat."""
    slot = Slot(size, make, rollouts(opponents, **sections), Scorer([]))
    try:
        group = await slot.play(PROMPT)
    finally:
        await slot.close()
    assert all(t.index == i for part in group.by_seat for i, t in enumerate(part.trajectories))
    return {part.trajectories[0].seat: part.trajectories for part in group.by_seat}


# --- environments --------------------------------------------------------------------------------


async def test_each_seat_has_its_own_conversation_and_reward() -> None:
    seats = await played()
    assert {seat: len(own) for seat, own in seats.items()} == {"X": 3, "O": 3}
    for x, o in zip(seats["X"], seats["O"], strict=True):
        first, second, third, fourth = [t.completion.text for t in (*x.turns, *o.turns)][::1]
        moves = [first, third, second, fourth]  # X, O, X, O
        heard = [f"X:{moves[0]};", f"O:{moves[1]};", f"X:{moves[2]};"]
        assert [m["content"] for m in x.messages] == ["a=", moves[0], heard[1], moves[2]]
        assert [m["content"] for m in o.messages] == [heard[0], moves[1], heard[2], moves[3]]
        won = sum(move.count("a") for move in moves[::2]) / 4
        lost = sum(move.count("b") for move in moves[1::2]) / 4
        assert x.reward == pytest.approx(won - lost)
        assert o.reward == pytest.approx(lost - won)
        assert x.info == o.info == {"by X": 3, "by O": 4}
    for own in seats.values():  # one sample each: its second prompt extends the first turn
        samples = make_samples([Group(PROMPT, own)], [[1.0] * 3])
        assert [sum(s.loss_mask) for s in samples] == [8, 8, 8]
        assert len({s.run_id for s in samples}) == 3


async def test_the_limit_of_turns_counts_those_of_all_seats() -> None:
    seats = await played(lambda: Duel(turns=9), rollout={"max_turns": 3})
    assert [len(own[0].turns) for own in seats.values()] == [2, 1]
    assert seats["O"][0].info["truncated"] == "max_turns"


class Odd(Duel):
    seats = ("X", "X")


class Silent(Environment):
    seats = ("X",)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Duel(info={"seat": "Z"}), "seat 'Z'.*X, O"),
        (lambda: Duel(info={"rewards": {"Z": 1}}), "seat 'Z'.*X, O"),
        (lambda: Duel(info={"seat": []}), r"returned the seat \[\], expected one of X, O"),
        (lambda: Duel(info={"rewards": [1]}), r"info\['rewards'\] \[1\]"),
        (lambda: Duel(info={"rewards": {"X": "1"}}), "'1' of X"),
        (Odd, r"Odd: got the seats .*, expected different names"),
        (Silent, "Silent has seats, so it must override step or run"),
    ],
)
async def test_a_rollout_with_wrong_seats_fails_for_all_of_them(make: Any, error: str) -> None:
    seats = await played(make, size=1)
    assert seats.keys() == ({"X", "O"} if make not in (Odd, Silent) else {""})
    for [trajectory] in seats.values():
        assert trajectory.outcome == "infra_error"
        with pytest.raises(AssertionError, match=error):
            raise AssertionError(trajectory.info["error"])


async def test_groups_with_seats_survive_a_checkpoint() -> None:
    seats = await played()
    group = Group(PROMPT, [t for own in seats.values() for t in own])
    saved = json.loads(json.dumps(group_to_json(group)))
    again = group_from_json(saved, lambda ticket: PROMPT)
    assert group_to_json(again) == group_to_json(group)
    assert [(t.seat, t.index) for t in again.trajectories][2:4] == [("X", 2), ("O", 0)]


def group(**rewards: list[float]) -> Group:
    made = [Trajectory(PROMPT, seat=s, reward=r, index=i)
            for s, own in rewards.items() for i, r in enumerate(own)]  # fmt: skip
    return Group(PROMPT, made)


def test_a_group_has_signal_if_one_of_its_seats_has() -> None:
    assert without_signal(group(X=[1, 1], O=[-1, -1]))
    assert without_signal(group(X=[1, 1], O=[-1]))
    assert not without_signal(group(X=[1, 1], O=[1, -1]))
    assert not without_signal(group(X=[1], O=[-1]))
    for last, solved in ((1.0, True), (0.0, False)):  # O's own best was 1
        signal = Signal(limit=1)
        signal.see(group(X=[5, 5], O=[0, 1]))
        flat = [group(X=[5, 5], O=[last, last])]
        if solved:
            signal.step(flat, has_credit=False)
        else:
            with pytest.raises(NoSignalError):
                signal.step(flat, has_credit=False)
        assert signal.solved == solved


async def test_a_run_trains_and_reports_each_seat(tmp_path: Path) -> None:
    config = mock_config(
        tmp_path / "run",
        environment={"type": f"{HERE}Duel"},
        rewards=[],
        algorithm={"group_size": 4},
        train={"total_train_steps": 3, "groups_per_step": 2},
        eval={
            "prompts": {"type": "list", "rows": ROWS},
            "every": 3,
            "samples": 2,
            "opponents": {"O": {"type": f"{HERE}bees"}},
        },
    )
    adapter = kept_adapter(config)
    await train(config, parts=parts_with(config, adapter))
    [row, *_] = rows = read_metrics(tmp_path / "run")
    assert (row["rollouts/ok"], row["groups/trained"]) == (16, 2)
    assert row["reward/X/mean"] == pytest.approx(-row["reward/O/mean"])
    assert row["reward/mean"] == pytest.approx(0.0)
    last = rows[-1]
    assert last["eval/rollouts/ok"] == 4  # X alone
    assert last["eval/reward/X/mean"] == last["eval/reward/mean"] < -1  # O says only b
    assert "eval/reward/O/mean" not in last
    lines = rollouts_of(tmp_path / "run")
    [opened] = {line["ticket"] for line in lines[:8]}
    assert sorted((line["index"], line["seat"]) for line in lines if line["ticket"] == opened) == [
        (index, seat) for index in range(4) for seat in ("O", "X")
    ]
    for batch in adapter.batches:  # advantages are relative to the rollouts of the same seat
        for seat in ("X", "O"):
            own = [s for s in batch.samples if s.run_id.endswith(f"/{seat}")]
            assert len(own) == 8
            assert sum(max(s.advantages, key=abs) for s in own) == pytest.approx(0.0, abs=1e-6)


# --- opponents -----------------------------------------------------------------------------------


def bees(messages: list[dict[str, Any]]) -> str:
    return "bbbb"


async def seeded(messages: list[dict[str, Any]], seed: int) -> str:
    messages[-1]["content"] = "changed"  # its own copy
    return f"{seed}"


def broken(messages: list[dict[str, Any]]) -> Any:
    return None


async def hangs(messages: list[dict[str, Any]]) -> str:
    await asyncio.sleep(60)
    return ""


def named(name: str, seat: str = "O") -> dict[str, Opponent]:
    return {seat: opponent_of(Plugin(type=f"{HERE}{name}"), f"opponents.{seat}", Path())}


@pytest.mark.parametrize("seat", ["X", "O"])
async def test_an_opponent_speaks_for_its_seat_and_is_not_trained(seat: str) -> None:
    other = {"X": "O", "O": "X"}[seat]
    [[name, own]] = (await played(opponents=named("seeded", seat))).items()
    assert name == other
    seeds = [m["content"] for t in own for m in t.messages if f"{seat}:" in m["content"]]
    assert len(set(seeds)) == len(seeds) == (6 if seat == "X" else 3)
    assert all(len(t.turns) == 2 and {x.seat for x in t.turns} == {other} for t in own)
    [again] = (await played(opponents=named("seeded", seat))).values()
    assert [t.messages for t in again] == [t.messages for t in own]


async def test_an_opponent_that_fails_fails_its_rollout() -> None:
    [[failed, *_]] = (await played(opponents=named("broken"))).values()
    assert failed.outcome == "infra_error"
    assert "opponents.O" in failed.info["error"]
    assert "it returned None, expected a reply" in failed.info["error"]
    [[late, *_]] = (await played(opponents=named("hangs"), deadlines={"step": 0.05})).values()
    assert late.outcome == "timeout"
    assert "deadlines.step" in late.info["error"]


async def test_a_server_with_openais_api_can_be_the_opponent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = rollouts()

    async def sample(ids: list[int], n: int, key: str, options: Any) -> Any:
        return await model.sampler.sample(ids, model.params, n)

    server = EndpointServer(EndpointConfig(), CharacterTokenizer().decode)
    async with server.serving(), server.open(Calls(model.chat, sample, 99, None)) as endpoint:
        monkeypatch.setenv("A_KEY", endpoint.api_key)
        keys = {"url": endpoint.base_url, "model": "any", "api_key_env": "A_KEY"}
        opponent = opponent_of(Plugin(type="openai", **keys), "opponents.O", Path())
        [own] = (await played(opponents={"O": opponent})).values()
        assert [t.outcome for t in own] == ["ok"] * 3
        assert all(t.messages[2]["content"].startswith("O:") for t in own)
        monkeypatch.setenv("A_KEY", "wrong")
        refused = opponent_of(Plugin(type="openai", **keys), "opponents.O", Path())
        [[failed, *_]] = (await played(opponents={"O": refused})).values()
        assert failed.outcome == "infra_error"
        assert "API key" in failed.info["error"]
        assert "wrong" not in failed.info["error"]
        await opponent.close()
        await refused.close()


@pytest.mark.parametrize(
    ("sections", "error"),
    [
        ({"opponents": {"Z": "openai"}}, "opponents: got 'Z'.*X, O"),
        ({"opponents": {"X": bees, "O": bees}}, "opponents: got all"),
        ({"opponents": {"X": "random"}}, "opponents.X.type: got 'random'"),
        ({"opponents": {"X": test_a_server_with_openais_api_can_be_the_opponent}}, "the function"),
        ({"opponents": {"X": {"type": f"{HERE}bees", "n": 1}}}, "got n, but a function"),
        ({"opponents": {"X": {"type": "openai", "url": "http://a"}}}, "opponents.X.model"),
        (
            {"opponents": {"X": {"type": "openai", "url": "ftp://a", "model": "m"}}},
            "opponents.X: .*ftp",
        ),
        (
            {"opponents": {"X": {"type": "openai", "url": "http://a", "model": "m",
                                 "api_key_env": "NO_SUCH_KEY"}}},
            "NO_SUCH_KEY",
        ),
        (
            {"opponents": {"X": bees}, "environment": {"type": "echo"}},
            "not a seat of the environment; it has no seats",
        ),
        ({"rewards": [{"type": "slot_match", "name": "X"}]}, "a reward are both named X"),
    ],
)  # fmt: skip
def test_wrong_opponents_are_found_before_the_run(
    tmp_path: Path, sections: dict[str, Any], error: str
) -> None:
    found = {
        seat: {"type": f"{HERE}{value.__name__}"} if callable(value)
        else {"type": value} if isinstance(value, str) else value
        for seat, value in sections.get("opponents", {}).items()
    }  # fmt: skip
    duel = {"environment": {"type": f"{HERE}Duel"}, "rewards": []}
    config = mock_config(tmp_path / "run", **{**duel, **sections, "opponents": found})
    with pytest.raises(ConfigError, match=error):
        assemble(config)


# --- agents --------------------------------------------------------------------------------------


def called(base_url: str, api_key: str, model: str, text: str) -> str:
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    request = urllib.request.Request(
        f"{base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            content: str = json.load(answer)["choices"][0]["message"]["content"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(error.read().decode()) from None
    return content


def judged(prompt: str, base_url: str, api_key: str) -> dict[str, Any]:
    """An agent that knows only the names of its two models."""
    solution = called(base_url, api_key, "solver", prompt)
    verdict = called(base_url, api_key, "judge", f"{solution}?")
    solved, fair = solution.count("a") / 4, verdict.count("b") / 4
    info = {"solution": solution, "verdict": verdict}
    return {**info, "rewards": {"solver": solved, "judge": fair}}


@pytest.mark.parametrize("opponent", [None, "bees", "broken", "hangs"])
async def test_an_agent_with_two_models_trains_both_or_one(
    tmp_path: Path, opponent: str | None
) -> None:
    others = {} if opponent is None else {"solver": {"type": f"{HERE}{opponent}"}}
    config = mock_config(
        tmp_path / "run",
        environment={"type": "agent", "run": f"{HERE}judged", "seats": ["solver", "judge"]},
        opponents=others,
        rewards=[],
        algorithm={"group_size": 4},
        train={"total_train_steps": 2, "groups_per_step": 2, "max_failed_groups": 2},
        deadlines={"agent": 0.5 if opponent == "hangs" else 60.0},
    )
    adapter = kept_adapter(config)
    running = train(config, parts=parts_with(config, adapter))
    if opponent in ("broken", "hangs"):
        with pytest.raises(NoSignalError):
            await running
        failed = rollouts_of(tmp_path / "run")
        outcome, error = {
            "broken": ("infra_error", "it returned None, expected a reply"),
            "hangs": ("timeout", "Agent.run took longer than deadlines.agent"),
        }[opponent]
        assert {(line["seat"], line["outcome"]) for line in failed} == {("judge", outcome)}
        assert error in failed[0]["error"]
        return
    await running
    lines = [line for line in rollouts_of(tmp_path / "run") if line["step"]]
    trained = ("judge", "solver") if opponent is None else ("judge",)
    assert {line["seat"] for line in lines} == set(trained)
    for line in lines:
        said = line["info"]["solution" if line["seat"] == "solver" else "verdict"]
        assert line["reward"] == said.count("a" if line["seat"] == "solver" else "b") / 4
        assert line["messages"][-1]["content"] == said
        assert opponent is None or line["info"]["solution"] == "bbbb"
    for batch in adapter.batches:
        for seat in trained:
            own = [s for s in batch.samples if s.run_id.endswith(f"/{seat}")]
            assert len(own) == 8
            assert sum(max(s.advantages, key=abs) for s in own) == pytest.approx(0.0, abs=1e-6)


async def twice(base_url: str, api_key: str) -> dict[str, Any]:
    """Asks the same of both seats, of each two times at once."""
    asked = [(model, f"{n}") for model in ("solver", "judge") for n in (1, 1, 2)]
    said = await asyncio.gather(
        *(asyncio.to_thread(called, base_url, api_key, *each) for each in asked)
    )
    return {"rewards": {"judge": 1.0}, "said": sorted(said[:3])}


async def test_an_opponents_seeds_do_not_depend_on_the_order_of_calls(tmp_path: Path) -> None:
    said = []
    for number in range(2):
        config = mock_config(
            tmp_path / f"run{number}",
            environment={"type": "agent", "run": f"{HERE}twice", "seats": ["solver", "judge"]},
            opponents={"solver": {"type": f"{HERE}seeded"}},
            rewards=[],
            rollout={"max_turns": 6},
            algorithm={"group_size": 2},
            train={"total_train_steps": 1, "groups_per_step": 1},
        )
        await train(config)
        lines = [line for line in rollouts_of(tmp_path / f"run{number}") if line["step"]]
        assert [len(line["versions"]) for line in lines] == [3, 3]  # the judge's
        said.append([line["info"]["said"] for line in lines])
    assert said[0] == said[1]
    assert len({seed for own in said[0] for seed in own}) == 6


# --- the game ------------------------------------------------------------------------------------


async def test_retrain_check_plays_all_seats() -> None:
    config = str(Path(__file__).parent.parent / "configs" / "nim.yaml")
    findings = await check_subject(config, ["rewards=exact_match"])
    assert all(finding.good for finding in findings), [str(f) for f in findings if not f.good]
    assert "answer 1 first: 1" in findings[-2].advice + findings[-1].advice

    class Remembers(Nim):
        games = 0

        async def step(self, action: Action) -> StepResult:
            Remembers.games += 1
            result = await super().step(action)
            return result._replace(reward=result.reward + Remembers.games)

    prompts = [Prompt("0.0.0", say("5"), answer=5)]
    assert any(not f.good for f in await check_environment(Remembers, prompts))


async def test_nim_is_won_by_perfect_play_and_lost_by_an_illegal_move() -> None:
    game = Nim()
    for sticks in range(1, 10):
        left = await game.reset(Prompt("0.0.0", say(""), answer=sticks))
        for number in range(9):
            sees = left[0]["content"]
            best = str(int(sees) % 4 or 1)
            move = best if number % 2 == 0 else at_random(left, seed=number)
            left, reward, over, _, info = await game.step(Action(move))
            if over:
                break
        if sticks % 4:
            assert (number % 2, reward, info["rewards"]) == (0, 1.0, {"second": -1.0})
    await game.reset(Prompt("0.0.0", say(""), answer=2))
    lost = await game.step(Action("3"))
    assert (lost.reward, lost.info["rewards"]) == (-1.0, {"second": 1.0})
    assert [taken(text, 5) for text in ("2", " 3 ", "0", "4", "", "x", "¹", "11")] == [
        2, 3, None, None, None, None, None, None,
    ]  # fmt: skip


@pytest.mark.slow(6)
async def test_self_play_beats_a_random_player_more_and_more(tmp_path: Path) -> None:
    steps = ["train.total_train_steps=28", "eval.every=28", "eval.samples=16", "checkpoint.every=0"]
    config = Path(__file__).parent.parent / "configs" / "nim.yaml"
    await train(load_config(config, [*steps, f"run_dir={tmp_path / 'run'}"]))
    rows = [row for row in read_metrics(tmp_path / "run") if "eval/step" in row]
    won = [(1 + row["eval/reward/first/mean"]) / 2 for row in rows]
    assert won[0] < 0.1  # illegal moves
    assert won[-1] > 0.2  # 0.31
