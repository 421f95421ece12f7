"""NexRL's Trajectory, Batch, advantages, metrics and datums, on values worked out by hand."""

from __future__ import annotations

import copy
import math
import pickle
from dataclasses import replace

import pytest
import torch

from retrain.trainer.data import response_of
from retrain.trainer.nexrl import (
    Batch,
    SelfHostedGrpoTrainer,
    Trajectory,
    apply_kl_penalty,
    compute_grpo_advantage_for_trajectories,
    compute_position_id_with_mask,
    convert_trajectories_to_datums,
    log_grpo_metrics,
    log_rollout_metrics,
    padding_data,
)
from retrain.trainer.nexrl.datums import samples_of_datums
from retrain.trainer.nexrl.metrics import floats
from retrain.trainer.nexrl.self_hosted import samples_of
from retrain.trainer.nexrl.trajectory import from_group
from retrain.types import Completion, Group, Prompt, Turn
from retrain.types import Trajectory as Rollout

# --- Trajectory


def test_attribute_item_and_get_reach_one_store() -> None:
    trajectory = Trajectory({"prompt": "p"}, reward=1.0, uid="u")
    trajectory.advantage = 0.5
    assert trajectory["advantage"] == trajectory.get("advantage") == trajectory.advantage == 0.5
    trajectory["advantage"] = 0.25
    assert trajectory.advantage == 0.25
    assert trajectory.uid == "u"
    assert trajectory.get("run_id", "default") == "default"
    assert {**trajectory} == {"prompt": "p", "reward": 1.0, "uid": "u", "advantage": 0.25}
    del trajectory["advantage"]
    assert "advantage" not in trajectory


def test_a_missing_field_is_named_with_those_that_are_there() -> None:
    with pytest.raises(AttributeError, match=r"'advantage'\."):
        _ = Trajectory(prompt="p", reward=1.0).advantage
    assert not hasattr(Trajectory(), "advantage")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))]
)
def test_a_trajectory_can_be_copied_and_pickled(again) -> None:
    trajectory = Trajectory(prompt="p", tokens=[1, 2], loss_mask=[0, 1])
    made = again(trajectory)
    assert made == trajectory
    made.prompt = "other"
    assert trajectory.prompt == "p"


def test_per_token_fields_must_have_the_tokens_length() -> None:
    with pytest.raises(ValueError, match="logprobs"):
        Trajectory(tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0.0, -1.0])


# --- GRPO advantages


def scored(rewards, **ids) -> list[Trajectory]:
    rows = [Trajectory(reward=reward) for reward in rewards]
    for name, values in ids.items():
        for row, value in zip(rows, values, strict=True):
            row[name] = value
    return rows


def advantages(trajectories, **keywords) -> list[float]:
    made = compute_grpo_advantage_for_trajectories(trajectories, **keywords)
    return [trajectory["advantage"] for trajectory in made]


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([0, 1, 1, 0], [-0.8660, 0.8660, 0.8660, -0.8660]),
        ([1, 0, 0, 0], [1.5, -0.5, -0.5, -0.5]),
        ([1], [0]),
        ([0.3, 0.3, 0.3], [0, 0, 0]),
        ([], []),
    ],
)
def test_advantages_of_one_group(rewards, expected) -> None:
    rows = scored(rewards, group_id=["g"] * len(rewards), run_id=range(len(rewards)))
    assert advantages(rows) == pytest.approx(expected, abs=1e-4)


def test_segments_of_a_run_count_once() -> None:
    # run 0 has two segments with mean reward 1, run 1 one with reward 0: means 1 and 0
    rows = scored([1, 1, 0], group_id=["g"] * 3, run_id=[0, 0, 1])
    half = math.sqrt(0.5)
    assert advantages(rows) == pytest.approx([half, half, -half], abs=1e-6)
    apart = advantages(rows, use_run_ids=False)
    assert apart == pytest.approx([0.5774, 0.5774, -1.1547], abs=1e-4)
    assert advantages(scored([1, 0], group_id=["g", "g"], run_id=[0, 0])) == [0, 0]


def test_run_id_alone_is_the_group_and_neither_is_a_group_of_its_own() -> None:
    rows = scored([0, 1, 0, 0], run_id=["a", "a", "b", "b"])
    assert advantages(rows) == pytest.approx([-0.7071, 0.7071, 0, 0], abs=1e-4)
    assert advantages(scored([0, 1])) == [0, 0]


def test_a_datum_with_a_run_id_alone_is_a_rollout_of_its_own() -> None:
    """Its run_id names the prompt; beside a group_id it names the rollout."""

    def rollouts(*facts: dict[str, object]) -> list[str]:
        datum = {"tokens": [1, 2], "loss_mask": [0, 1], "logprobs": [0.0, -1.0]}
        datums = [{**datum, "advantage": 1.0, "metadata": one} for one in facts]
        return [sample.run_id for sample in samples_of_datums(datums)]

    assert len(set(rollouts({"run_id": "a"}, {"run_id": "a"}))) == 2
    assert len(set(rollouts(*[{"group_id": "a", "run_id": 0}] * 2))) == 1


def test_equal_run_ids_of_two_prompts_are_not_pooled() -> None:
    rows = scored([0, 1, 5, 5], group_id=["a", "a", "b", "b"], run_id=[0, 1, 0, 1])
    assert advantages(rows) == pytest.approx([-0.7071, 0.7071, 0, 0], abs=1e-4)


@pytest.mark.parametrize("reward", [None, "good", math.nan])
def test_a_reward_that_is_no_number_is_named(reward) -> None:
    with pytest.raises(ValueError, match=r"trajectory 0.*reward"):
        compute_grpo_advantage_for_trajectories([Trajectory(reward=reward, group_id="g")])


def test_a_plain_mapping_becomes_a_trajectory_and_anything_else_is_refused() -> None:
    [made] = compute_grpo_advantage_for_trajectories([{"reward": torch.tensor(1.0)}])
    assert made.advantage == 0
    with pytest.raises(TypeError, match="trajectory 0"):
        compute_grpo_advantage_for_trajectories([[1]])


# --- metrics


def test_rollout_and_grpo_metrics() -> None:
    rows = scored([0, 1, 1, 1], group_id=["a", "a", "b", "b"], run_id=[0, 1, 0, 1])
    rows[0].score = {"format": 1.0, "note": "text"}
    for row in rows:
        row.tokens, row.loss_mask, row.is_truncated = [1, 2, 3], [0, 1, 1], row is rows[0]
    metrics = log_rollout_metrics(compute_grpo_advantage_for_trajectories(rows), {})
    log_grpo_metrics(rows, metrics)
    assert metrics["rollout/reward_mean"] == 0.75
    assert metrics["rollout/reward_std"] == pytest.approx(0.5)
    assert (metrics["rollout/reward_min"], metrics["rollout/reward_max"]) == (0, 1)
    assert metrics["rollout/format"] == 1.0
    assert metrics["response_length/mean"] == 2
    assert metrics["prompt_length/max"] == 1
    assert metrics["response_length/truncated"] == 0.25
    assert metrics["critic/grpo_num_groups"] == 2
    assert metrics["critic/grpo_flat_groups"] == 1
    assert metrics["critic/grpo_std/max"] == pytest.approx(0.7071, abs=1e-4)
    assert metrics["critic/advantage_mean"] == pytest.approx(0, abs=1e-9)
    assert log_rollout_metrics(rows, {}, prefix="mine/")["mine/reward_mean"] == 0.75


def test_tensors_become_floats() -> None:
    assert floats({"one": torch.tensor(0.5), "plain": 1}) == {"one": 0.5, "plain": 1.0}
    with pytest.raises(TypeError, match="'rewards'"):
        floats({"rewards": torch.ones(2)})


# --- Batch


def rows() -> list[Trajectory]:
    return [
        Trajectory(tokens=[5, 6, 7], loss_mask=[0, 1, 1], logprobs=[0, -1, -2], reward=1.0),
        Trajectory(tokens=[5, 6], loss_mask=[0, 1], logprobs=[0, -3], reward=0.0),
    ]


def test_a_batch_of_trajectories_is_padded_on_the_right() -> None:
    batch = Batch.from_trajectories(rows(), pad_token_id=9)
    assert len(batch) == 2
    assert batch.values["input_ids"].tolist() == [[5, 6, 7], [5, 6, 9]]
    assert batch.values["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch.values["loss_mask"].tolist() == [[0, 1, 1], [0, 1, 0]]
    assert batch.values["position_ids"].tolist() == [[0, 1, 2], [0, 1, 1]]
    assert batch.values["logprobs"].tolist() == [[0, -1, -2], [0, -3, 0]]
    assert batch.values["reward"].tolist() == batch.metadata["rewards"].tolist() == [1, 0]
    with pytest.raises(ValueError, match="got no trajectories"):
        Batch.from_trajectories([])


def test_rewards_and_advantages_can_be_set_and_read_from_both_sides() -> None:
    batch = Batch({"input_ids": torch.zeros(2, 3)}, {"rewards": [1, 0], "note": "x"})
    assert batch.values["reward"].tolist() == [1, 0]
    batch.metadata["advantages"] = [torch.tensor(0.5), torch.tensor(-0.5)]
    assert batch.values["advantages"].tolist() == [0.5, -0.5]
    batch.values["advantages"] = torch.ones(2, 3)
    assert batch.metadata["advantages"].shape == (2, 3)
    assert set(batch.metadata) == {"note", "rewards", "advantages"}
    assert len(batch.metadata) == 3
    del batch.metadata["advantages"]
    assert "advantages" not in batch.values
    assert len(Batch(metadata={"rewards": []}).metadata["rewards"]) == 0


def test_a_copy_shares_tensors_but_no_fields() -> None:
    batch = Batch.from_trajectories(rows())
    other = batch.copy()
    other.values["extra"] = torch.zeros(2)
    other.metadata["rewards"] = [5, 5]
    assert "extra" not in batch.values
    assert batch.metadata["rewards"].tolist() == [1, 0]


@pytest.mark.parametrize(("strip", "expected"), [("left", [[1, 2, 0]]), ("right", [[0, 1, 2]])])
def test_padding_that_all_rows_share_is_removed(strip, expected) -> None:
    batch = Batch({"input_ids": torch.tensor([[0, 1, 2, 0]]), "reward": [1.0]})
    done = getattr(Batch, f"remove_redundant_{strip}_padding")(batch, pad_token_id=0)
    assert done.values["input_ids"].tolist() == expected
    assert batch.values["input_ids"].shape == (1, 4)


def test_a_real_end_of_sequence_token_with_the_paddings_id_is_kept() -> None:
    batch = Batch(
        {
            "input_ids": torch.tensor([[5, 0, 0], [5, 6, 0]]),
            "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 0]]),
        }
    )
    done = Batch.remove_redundant_right_padding(batch, pad_token_id=0)
    assert done.values["input_ids"].tolist() == [[5, 0], [5, 6]]


def test_only_the_fields_that_are_named_are_stripped() -> None:
    ids = torch.tensor([[0, 0, 1]])
    batch = Batch({"input_ids": ids, "loss_mask": ids, "other": ids})
    done = Batch.remove_redundant_left_padding(batch, fields=["input_ids", "loss_mask"])
    assert [done.values[n].shape[1] for n in ("input_ids", "loss_mask", "other")] == [1, 1, 3]
    with pytest.raises(KeyError, match=r"'labels'.*input_ids"):
        Batch.remove_redundant_left_padding(batch, fields=["labels"])


def test_a_batch_of_padding_alone_keeps_one_column() -> None:
    batch = Batch({"input_ids": torch.zeros(2, 3, dtype=torch.long)})
    for side in ("left", "right"):
        done = getattr(Batch, f"remove_redundant_{side}_padding")(batch, pad_token_id=0)
        assert done.values["input_ids"].shape == (2, 3 if side == "left" else 1)


def test_padding_data_pads_the_rows_of_a_batch() -> None:
    batch = padding_data(Batch({"input_ids": [[1, 2], [3]]}), pad_token_id=9)
    assert batch.values["input_ids"].tolist() == [[1, 2], [3, 9]]
    assert batch.values["attention_mask"].tolist() == [[1, 1], [1, 0]]
    assert padding_data(batch, pad_token_id=9).values["input_ids"].tolist() == [[1, 2], [3, 9]]
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0]])
    assert compute_position_id_with_mask(mask).tolist() == [[0, 0, 0, 1], [0, 1, 2, 2]]


def test_a_kl_penalty_is_charged_for_the_trained_tokens() -> None:
    values = {
        "token_level_scores": torch.tensor([[0.0, 0.0, 2.0]]),
        "old_log_probs": torch.tensor([[-9.0, -1.0, -2.0]]),
        "ref_log_probs": torch.tensor([[0.0, -2.0, -1.5]]),
        "loss_mask": torch.tensor([[0, 1, 1]]),
    }
    charged = apply_kl_penalty(Batch(values), beta=0.1).values["token_level_scores"]
    assert charged.tolist() == [pytest.approx([0, -0.1, 2.05])]
    del values["ref_log_probs"]
    with pytest.raises(KeyError, match="'ref_log_probs'"):
        apply_kl_penalty(Batch(values), beta=0.1)


def test_rewards_and_grpo_advantages_are_laid_on_the_trained_tokens() -> None:
    trainer = SelfHostedGrpoTrainer({})
    mask = torch.tensor([[0, 1, 1, 0], [0, 1, 0, 0]])
    batch = Batch({"loss_mask": mask, "reward": [2.0, 3.0]})
    assert trainer._reward_fn(batch).tolist() == [[0, 0, 2, 0], [0, 3, 0, 0]]
    batch = Batch({**batch.values, "reward": [1.0, 0.0], "group_id": ["g", "g"], "run_id": [0, 1]})
    found = trainer._compute_advantage(batch).values["advantages"]
    half = math.sqrt(0.5)
    expected = torch.tensor([[0, half, half, 0], [0, -half, 0, 0]])
    assert torch.allclose(found, expected, atol=1e-6)


# --- datums and samples


def test_a_token_datum_becomes_the_sample_of_its_very_numbers() -> None:
    trajectory = Trajectory(
        tokens=[1, 2, 3], loss_mask=[0, 1, 1], logprobs=[0, -1, -2], advantage=0.5, group_id="g"
    )
    [sample] = samples_of_datums(convert_trajectories_to_datums([trajectory]), weighted=False)
    assert list(sample.token_ids) == [1, 2, 3]
    assert list(sample.advantages) == [0, 0.5, 0.5]
    assert list(sample.logprobs) == [0, -1, -2]
    assert list(sample.versions) == [-1, 0, 0]
    assert sample.group_id == "g"
    [weighted] = samples_of_datums(convert_trajectories_to_datums([trajectory]), weighted=True)
    assert list(weighted.advantages) == [0, 1, 1]


def test_token_advantages_are_laid_on_the_trained_tokens_in_order() -> None:
    datum = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "token_advantages": [3, 4]}
    [sample] = samples_of_datums([datum], weighted=False)
    assert list(sample.advantages) == [0, 3, 0, 4]
    with pytest.raises(ValueError, match=r"1 token_advantages.*2"):
        samples_of_datums([{**datum, "token_advantages": [1]}], weighted=False)


@pytest.mark.parametrize(
    ("advantage", "message"), [(None, "0.*`trajectory.advantage`"), (math.nan, "NaN or infinite")]
)
def test_a_datum_without_a_usable_advantage_is_named(advantage, message) -> None:
    datum = {"tokens": [1, 2], "loss_mask": [0, 1], "advantage": advantage}
    with pytest.raises(ValueError, match=message):
        samples_of_datums([datum], weighted=False)


def test_a_trajectory_with_nothing_to_train_is_named() -> None:
    with pytest.raises(ValueError, match=r"trajectory 0 has neither .*; it has reward"):
        convert_trajectories_to_datums([{"reward": 1.0}])


def test_the_samples_of_a_batch_are_its_rows_without_padding() -> None:
    batch = Batch.from_trajectories(rows(), pad_token_id=9)
    batch.values["advantages"] = torch.tensor([2.0, -1.0])
    first, second = samples_of(batch, batch.values["logprobs"])
    assert list(first.advantages) == [0, 2, 2]
    assert list(second.token_ids) == [5, 6]
    assert list(second.advantages) == [0, -1]
    assert list(second.logprobs) == [0, -3]


def test_a_response_has_its_reasoning():
    said = Completion([2], [-0.5], "<think>so</think>5", "stop", 0)
    prompt = Prompt("0.0.0", [{"role": "user", "content": "?"}])
    rollout = Rollout(prompt, [Turn([1], said, answer="5", reasoning="so")])
    [made] = from_group(Group(prompt, [rollout]))
    assert made.response == response_of(rollout) == said.text
    assert response_of(replace(rollout, result="5")) == "5"
