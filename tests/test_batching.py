"""Samples are made of the very ids, log-probs and versions that were sampled."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms import batching
from retrain.algorithms.batching import as_shared, branches, make_samples, normalised, segments
from retrain.types import Batch, Completion, Denominators, Group, Prompt, Sample, Trajectory, Turn

PROMPT = Prompt("0.0.0", [{"role": "user", "content": "?"}])


def turn(prompt_ids, token_ids, version=0):
    logprobs = [-float(t) / 10 for t in token_ids]
    return Turn(prompt_ids, Completion(token_ids, logprobs, "", "stop", version))


def test_a_two_turn_rollout_is_one_sample_with_the_environments_tokens_masked():
    trajectory = Trajectory(PROMPT, [turn([1, 2], [3, 4], 5), turn([1, 2, 3, 4, 9], [6], 7)])
    [sample] = segments(trajectory, 0.5, "r")
    assert sample.token_ids == [1, 2, 3, 4, 9, 6]
    assert sample.loss_mask == [0, 0, 1, 1, 0, 1]
    assert sample.logprobs == [0, 0, -0.3, -0.4, 0, -0.6]
    assert sample.advantages == [0, 0, 0.5, 0.5, 0, 0.5]
    assert sample.versions == [-1, -1, 5, 5, -1, 7]


def test_a_rewritten_history_starts_a_new_sample_of_the_same_rollout():
    trajectory = Trajectory(PROMPT, [turn([1, 2], [3, 4]), turn([1, 2, 4, 9], [6])])
    first, second = segments(trajectory, [0.1, 0.2, 0.3], "r")
    assert (first.token_ids, first.advantages) == ([1, 2, 3, 4], [0, 0, 0.1, 0.2])
    assert (second.token_ids, second.advantages) == ([1, 2, 4, 9, 6], [0, 0, 0, 0, 0.3])
    assert first.run_id == second.run_id == "r"


def test_a_long_prompt_with_another_start_branches():
    prompt = list(range(40))
    assert branches([turn(prompt, [3]), turn([1, *prompt[1:], 3, 4], [5])]) == [[0], [1]]
    assert branches([turn(prompt, [3]), turn([*prompt, 3, 4], [5])]) == [[0, 1]]


def test_turns_that_branch_share_what_comes_before_and_equal_ones_are_all_trained():
    first = turn([1, 2], [3])
    turns = [first, first, turn([1, 2, 3, 4], [5]), turn([1, 2, 3], [6]), turn([1, 2, 3, 9], [])]
    assert branches(turns) == [[0, 2], [1, 3], [4]]
    samples = segments(Trajectory(PROMPT, turns), 1.0, "r")
    assert [s.token_ids for s in samples] == [[1, 2, 3, 4, 5], [1, 2, 3, 6]]
    assert [s.loss_mask for s in samples] == [[0, 0, 1, 0, 1], [0, 0, 1, 1]]


def test_a_rollout_without_a_sampled_token_makes_no_sample():
    assert segments(Trajectory(PROMPT, [turn([1], [])]), 1.0, "r") == []
    assert segments(Trajectory(PROMPT), 1.0, "r") == []


def test_credit_of_the_wrong_length_is_an_error():
    with pytest.raises(ValueError, match="2 sampled tokens, but 1 advantages"):
        segments(Trajectory(PROMPT, [turn([1], [2, 3])]), [0.1], "r")


def test_a_sample_whose_streams_differ_in_length_is_an_error():
    with pytest.raises(ValueError, match=r"2 token_ids.*\{'logprobs': 1, 'ref': 3\}"):
        Sample([1, 2], [0, 1], [0.0], [0, 0], [0, 0], {"ref": [1, 2, 3]})


ids = st.lists(st.integers(0, 5), max_size=4)


@given(st.lists(st.tuples(ids, ids, st.none() | st.integers(0, 9)), max_size=6), st.booleans())
def test_every_sampled_token_is_trained_once_after_the_tokens_that_the_sampler_saw(turns, flat):
    histories: list[list[int]] = [[]]
    played = []
    for version, (given_ids, sampled, base) in enumerate(turns):
        begun = [99] if base is None else histories[-1 - base % len(histories)]
        prompt = [*begun, *given_ids]
        played.append(turn(prompt, sampled, version))
        histories.append(prompt + sampled)
    count = sum(len(t.completion.token_ids) for t in played)
    credit = 1.0 if flat else [float(i) for i in range(count)]
    samples = segments(Trajectory(PROMPT, played), credit, "r")
    trained = [
        (tuple(s.token_ids[:i]), s.token_ids[i], s.logprobs[i], s.versions[i], s.advantages[i])
        for s in samples
        for i, mask in enumerate(s.loss_mask)
        if mask
    ]
    expected, number = [], 0
    for t in played:
        for i, token in enumerate(t.completion.token_ids):
            past = (*t.prompt_ids, *t.completion.token_ids[:i])
            advantage = 1.0 if flat else float(number)
            number += 1
            expected.append((past, token, -token / 10, t.completion.version, advantage))
    assert Counter(trained) == Counter(expected)
    assert len(branches(played)) >= len(samples)
    for s in samples:
        masked = [i for i, mask in enumerate(s.loss_mask) if not mask]
        assert all(s.advantages[i] == 0 == s.logprobs[i] and s.versions[i] == -1 for i in masked)


def test_weights_that_changed_in_flight_are_named_per_token():
    changed = Completion([1, 2, 3], [0.0] * 3, "", "stop", 4, [4, 4, 6])
    trajectory = Trajectory(PROMPT, [Turn([9], changed)])
    [sample] = segments(trajectory, 1.0, "r")
    assert list(sample.versions) == [-1, 4, 4, 6]
    group = Group(PROMPT, [trajectory])
    assert (group.oldest_version, group.versions) == (4, {4, 6})
    for wrong in ([4, 6], [5, 5, 6]):
        with pytest.raises(ValueError, match="expected one per token, the oldest 4"):
            replace(changed, versions=wrong)


def batch_of(loss="ppo", **config):
    samples = [
        Sample([1, 2, 3], [0, 1, 1], [0, -1, -1], [0, 2.0, 2.0], [-1, 0, 0]),
        Sample([1, 2], [0, 1], [0, -1], [0, -6.0], [-1, 0]),
    ]
    return Batch(samples, loss, config, Denominators(3, 2))


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("token", [2 / 3, 2 / 3, -2.0]),  # / 3 tokens
        ("sequence", [0.5, 0.5, -3.0]),  # / (own length x 2)
        ("batch", [1.0, 1.0, -3.0]),  # / 2 sequences
    ],
)
def test_a_normaliser_folds_into_the_advantages(by, expected):
    made = normalised(batch_of(), by)
    values = [a for s in made.samples for a, m in zip(s.advantages, s.loss_mask, strict=True) if m]
    assert values == pytest.approx(expected)


@pytest.mark.parametrize(
    ("by", "each"), [("token", 1 / 12), ("sequence", 1 / 12), ("batch", 1 / 2)]
)
def test_a_rollout_cut_into_samples_weighs_what_a_whole_one_does(by, each):
    """Two rollouts of 6 sampled tokens, one of them in 3 samples of 1, 2 and 3 tokens."""

    def part(count, run):
        ones, zeros = [1] * count, [0] * count
        return Sample(ones, ones, zeros, [1.0] * count, zeros, run_id=run)

    samples = [part(6, "whole"), part(1, "cut"), part(2, "cut"), part(3, "cut"), part(0, "none")]
    batch = batching.batch_of(samples, loss="ppo", loss_config={}, normalisation=by)
    assert batch.denominators == Denominators(tokens=12, sequences=2)
    credits = [a for sample in batch.samples for a in sample.advantages]
    assert credits == pytest.approx([each] * 12)
    named, nameless = samples, [replace(sample, run_id="") for sample in samples]
    counts = [batching.rollout_tokens(rows) for rows in (named, nameless)]
    assert counts == [[6, 6, 6, 6, 0], [6, 1, 2, 3, 0]]


def test_dro_scales_its_quadratic_term_too_and_refuses_sequences():
    assert normalised(batch_of("dro", beta=0.6), "token").loss_config == {
        "beta": pytest.approx(0.2)
    }
    with pytest.raises(ValueError, match=r"dro.*sequence"):
        normalised(batch_of("dro", beta=0.6), "sequence")


@pytest.mark.parametrize(
    ("loss", "first"), [("dapo", 2 / 3), ("bnpo", 2 / 3), ("grpo", 0.5), ("dr_grpo", 2.0 / 2 / 8)]
)
def test_trls_names_are_shared_losses_with_a_normaliser(loss, first):
    made = as_shared(batch_of(loss), max_tokens=8)
    assert made.loss == "ppo"
    assert made.samples[0].advantages[1] == pytest.approx(first)
    assert as_shared(made, max_tokens=8) is made


def test_a_batch_counts_its_tokens_and_its_sequences():
    group = Group(PROMPT, [Trajectory(PROMPT, [turn([1], [2, 3])]), Trajectory(PROMPT)])
    samples = make_samples([group], [[1.0, 1.0]])
    batch = batching.batch_of(samples, loss="dapo", loss_config={"epsilon": 0.1})
    assert batch.denominators == Denominators(tokens=2, sequences=1)
    assert [s.run_id for s in batch.samples] == ["0.0.0#0"]
