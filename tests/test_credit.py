"""Credit per turn and per token against tables worked out by hand."""

from collections.abc import Sequence
from typing import Any

import pytest

from retrain import Environment, StepResult
from retrain.algorithms.batching import make_samples
from retrain.algorithms.credit import returns_of
from retrain.algorithms.grpo import GRPO
from retrain.algorithms.reinforce import Reinforce
from retrain.algorithms.rloo import RLOO
from retrain.check.scripted import FixedSampler, scripted
from retrain.config import parse_config
from retrain.rollout import Slot
from retrain.scoring import Scorer, Term, reward
from retrain.service.passes import TargetRow
from retrain.service.trainer import Trainer
from retrain.types import Completion, Group, Prompt, Trajectory, Turn
from tests.backends_kit import FULL, LORA, histories

HALF = Term("environment", 0.5)
PROMPT = Prompt("0.0.0", [{"role": "user", "content": "?"}])


def rollout(reward, sizes=(1,), turns=(), tokens=()):
    """A rollout whose turns sampled `sizes` tokens, each turn extending the one before."""
    made, before = [], [9]
    for size in sizes:
        said = list(range(size))
        made.append(Turn(before, Completion(said, [-0.5] * size, "", "stop", 0)))
        before = [*before, *said, 9]
    return Trajectory(PROMPT, made, reward=reward, turn_rewards=turns, token_rewards=tokens)


@pytest.mark.parametrize(
    ("trajectory", "credit", "discount", "expected"),
    [
        (rollout(2.0, (1, 2)), "turns", 1.0, [[2], [2]]),
        (rollout(2.0, (1, 2)), "turns", 0.5, [[1], [2]]),
        # 0.5 of the 2.0 is left for the last turn: r = 1, 0, 1
        (rollout(2.0, (1, 1, 1), [1, 0, 0.5]), "turns", 0.5, [[1.25], [0.5], [1]]),
        (rollout(2.0, (1, 2), [1, 0], [0.25, 0.5, 0]), "turns", 1.0, [[2], [0.75]]),
        # r = 0.25 + 1 | 0.5, 0.25
        (rollout(2.0, (1, 2), [1, 0], [0.25, 0.5, 0]), "tokens", 1.0, [[2], [0.75, 0.25]]),
        (rollout(1.0, (2, 0, 1)), "tokens", 0.5, [[0.125, 0.25], [0.5], [1]]),
        (rollout(1.0, (), ()), "turns", 1.0, []),
    ],
)
def test_returns(trajectory, credit, discount, expected):
    assert returns_of(trajectory, credit, discount) == expected


def test_turns_are_compared_with_those_of_the_same_number():
    a = rollout(3.0, (2, 1), [1, 2])  # G = 3, 2
    b = rollout(1.0, (1, 3), [1, 0])  # G = 1, 0
    [credit] = GRPO(scale="none", credit="turns").advantages([Group(PROMPT, [a, b])])
    assert credit == [[1, 1, 1], [-1, -1, -1, -1]]
    [credit] = RLOO(credit="turns", discount=0.5).advantages([Group(PROMPT, [a, b])])
    assert credit == [[1, 1, 2], [-1, -2, -2, -2]]  # G = 2, 2 and 1, 0
    [credit] = GRPO(eps=0.0, credit="turns").advantages([Group(PROMPT, [a, b])])
    assert credit == [pytest.approx([0.5**0.5] * 3), pytest.approx([-(0.5**0.5)] * 4)]


def test_a_turn_that_no_other_rollout_has_joins_the_last_shared_one():
    short, long = rollout(0.0, (1,)), rollout(3.0, (1, 1), [1, 2])  # G = 0 and 3, 2
    middle = rollout(1.0, (1,))
    [credit] = GRPO(scale="none", credit="turns").advantages([Group(PROMPT, [short, middle, long])])
    assert credit == [[-1.5], [-0.5], [1.5, 0.5]]  # the mean of 0, 1, 3, 2
    [alone] = GRPO(credit="turns").advantages([Group(PROMPT, [long])])
    assert alone == [[0.0, 0.0]]


def test_tokens_are_compared_within_a_turn():
    a, b = rollout(1.0, (2,), (), [1, 0]), rollout(0.0, (1,))  # G = 1, 0 | 0
    [credit] = GRPO(scale="none", credit="tokens").advantages([Group(PROMPT, [a, b])])
    assert credit == [pytest.approx([2 / 3, -1 / 3]), pytest.approx([-1 / 3])]


def test_reinforce_compares_the_turns_of_the_whole_batch():
    groups = [Group(PROMPT, [rollout(3.0, (1, 1), [1, 2])]), Group(PROMPT, [rollout(1.0, (1, 1))])]
    assert Reinforce(credit="turns").advantages(groups) == [[[1, 0.5]], [[-1, -0.5]]]
    scaled = GRPO(scale="batch", credit="turns").advantages(groups)
    assert scaled == [[[0, 0]], [[0, 0]]]


@pytest.mark.parametrize("make", [GRPO, RLOO, Reinforce])
@pytest.mark.parametrize("credit", ["turns", "tokens"])
def test_one_turn_with_one_reward_has_the_credit_of_the_whole(make, credit):
    groups = [Group(PROMPT, [rollout(r, (2,)) for r in (1.0, 0.0, 0.5)])]
    whole = make().advantages(groups)
    if credit == "turns":
        assert make(credit=credit).advantages(groups) == [[[a, a] for a in row] for row in whole]
    flat = [Group(PROMPT, [rollout(0.3, (2, 1)), rollout(0.3, (1, 3))])]
    assert make(credit=credit).advantages(flat) == [[[0.0] * 3, [0.0] * 4]]


def test_branches_and_rewritten_histories_keep_each_token_its_credit():
    a, b = rollout(3.0, (2, 1), [1, 2]), rollout(1.0, (1, 1), [1, 0])
    a.turns[1] = Turn([5, 5], a.turns[1].completion)  # the history was rewritten
    groups = [Group(PROMPT, [a, b])]
    samples = make_samples(groups, RLOO(credit="turns", discount=0.5).advantages(groups))
    assert [s.advantages for s in samples] == [[0, 1, 1], [0, 0, 2], [0, -1, 0, -2]]


@pytest.mark.parametrize(("credit", "discount"), [("turns", 1.5), ("turns", -0.1), ("whole", 0.9)])
def test_a_discount_without_sense_is_an_error(credit, discount):
    for make in (GRPO, RLOO, Reinforce):
        with pytest.raises(ValueError, match="discount is"):
            make(credit=credit, discount=discount)


def test_only_credit_per_turn_finds_a_signal_in_groups_with_equal_rewards():
    assert GRPO().compares == "group"
    assert GRPO(credit="turns").compares == "batch"
    equal = Group(PROMPT, [rollout(1.0, (1, 1), [1, 0]), rollout(1.0, (1, 1), [0, 1])])
    assert GRPO(credit="turns", scale="none").advantages([equal]) == [[[0, -0.5], [0, 0.5]]]


class Steps(Environment):
    """Pays 1 for the first turn, and 0.5 for the second."""

    async def reset(self, prompt):
        self.left = [1.0, 0.5]
        return prompt.messages

    async def step(self, action):
        reward = self.left.pop(0)
        return StepResult([{"role": "user", "content": "on"}], reward, not self.left, False, {})


async def test_the_reward_of_each_step_reaches_its_turn_with_the_environments_weight():
    script = FixedSampler()
    script.reply = "ab"
    slot = Slot(1, Steps, scripted(parse_config({"prompts": ["a"]}), script), Scorer([HALF]))
    try:
        group = await slot.play(PROMPT)
    finally:
        await slot.close()
    [trajectory] = group.trajectories
    assert [turn.reward for turn in trajectory.turns] == [1.0, 0.5]
    assert (trajectory.reward, trajectory.turn_rewards) == (0.75, [0.5, 0.25])
    assert returns_of(trajectory, "turns", 1.0) == [[0.75], [0.25]]


@reward
def early(completion: str) -> float:
    """It differs from the first step on."""
    return sum(letter < "P" for letter in completion) / 4


@pytest.mark.parametrize("credit", ["turns", "tokens"])
async def test_every_backend_trains_the_same_credit(credit, tmp_path, monkeypatch):
    received: list[list[float]] = []
    passed = Trainer.forward_backward

    def keep(self: Trainer, rows: Sequence[TargetRow], loss: str, config: Any) -> Any:
        received.append([advantage for row in rows for advantage in row.advantages])
        return passed(self, rows, loss, config)

    monkeypatch.setattr(Trainer, "forward_backward", keep)
    run = {
        "prompts": ["a=", "b="],
        "environment": f"{__name__}:Steps",
        "rewards": ["environment", {"type": f"{__name__}:early"}],
        "algorithm": {
            "type": "grpo",
            "group_size": 3,
            "loss": "importance_sampling",
            **{"credit": credit, "discount": 0.5, "scale": "none"},
        },
        "sampling": {"max_tokens": 4},
        "train": {"total_train_steps": 2, "groups_per_step": 2, "order": "in_order"},
    }
    trl, weaver = await histories(tmp_path / "full", FULL, run)
    low, other = await histories(tmp_path / "lora", LORA, run)
    for one, same in ((trl, weaver), (low, other)):
        for name in ("loss", "grad_norm"):
            assert [row[name] for row in one] == pytest.approx(
                [row[name] for row in same], abs=1e-4
            )
    first, *same = received[::2]  # of weaver with all weights, of tinker and weaver with LoRA
    assert same == [pytest.approx(first)] * 2
    assert len(set(first)) > 6, "turns of a rollout differ"
