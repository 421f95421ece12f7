"""DPO through the one pipe: ln 2 at the start, one loss on every backend, pairs kept whole."""

import math
import random
from dataclasses import replace

import pytest
from backends_kit import FULL, LORA, histories, run_of, updated, whole_and_resumed
from pipe_kit import events

from retrain.algorithms.batching import batch_of, make_samples
from retrain.algorithms.dpo import DPO
from retrain.assembly import assemble
from retrain.errors import ConfigError
from retrain.pipeline import train
from retrain.types import Completion, Group, Prompt, Trajectory, Turn

ROWS = [
    {"prompt": "abc=", "chosen": "cba", "rejected": "abc"},
    {"prompt": "d=", "chosen": "dddddd", "rejected": "d"},
    {"prompt": "ef=", "chosen": "fe", "rejected": "I don't know"},
]
RUN = {
    "prompts": {"type": "list", "rows": ROWS},
    "algorithm": {"type": "dpo", "beta": 0.5},
    "train": {"total_train_steps": 3, "groups_per_step": 3, "order": "in_order"},
}
BACKENDS = [FULL["trl"], LORA["tinker"], FULL["weaver"]]


def pair(number: int, *lengths: int) -> Group:
    """Answers of these lengths to one prompt."""
    draw = random.Random(number)
    prompt = Prompt(f"0.{number}.0", [{"role": "user", "content": "?"}])
    trajectories = []
    for length in lengths:
        ids = [draw.randrange(10, 90) for _ in range(length)]
        completion = Completion(ids, [0.0] * length, "", "stop", -1)
        trajectories.append(Trajectory(prompt, [Turn([1, 20 + number, 2], completion)]))
    return Group(prompt, trajectories)


def batch(groups):
    credit = DPO().advantages(groups)
    samples = make_samples(groups, credit, paired=True)
    return batch_of(samples, loss="dpo", loss_config={"beta": 0.5})


def test_the_chosen_gets_a_share_of_the_batch_and_the_rejected_its_negative():
    assert DPO().advantages([pair(0, 2, 3), pair(1, 1, 1)]) == [[0.5, -0.5], [0.5, -0.5]]
    with pytest.raises(ValueError, match=r"0\.4\.0.*1"):
        DPO().advantages([pair(4, 2)])


def test_both_samples_of_a_pair_carry_its_number():
    made = batch([pair(0, 2, 3), pair(1, 1, 4)])
    assert [set(sample.streams["pair_ids"]) for sample in made.samples] == [{0}, {0}, {1}, {1}]


@pytest.mark.parametrize(
    "backend",
    [*BACKENDS, {**FULL["trl"], "lora": {"r": 4}}],
    ids=["trl", "tinker", "weaver", "trl-lora"],
)
async def test_the_first_loss_is_ln_2_and_the_margin_grows(tmp_path, backend):
    result = await train(run_of(tmp_path, backend, **RUN))
    first, *_, last = result.history
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert last["loss"] < first["loss"]
    assert first["dpo/margin"] == pytest.approx(0.0, abs=1e-5)
    assert last["dpo/margin"] > 0
    assert last["dpo/accuracy"] == 1.0
    assert "reward/mean" not in last


@pytest.mark.parametrize("backends", [FULL, LORA], ids=["full", "lora"])
async def test_later_steps_agree_between_backends_that_tune_the_same_weights(tmp_path, backends):
    found = await histories(tmp_path, backends, RUN)
    one, other = ([row["loss"] for row in rows] for rows in found)
    assert one == pytest.approx(other, abs=1e-4)
    assert one[-1] < 0.65


async def test_a_batch_far_from_its_reference_has_one_loss_on_all_three(tmp_path):
    """The reference is given with the batch, so that the margins aren't 0."""
    made = batch([pair(0, 2, 5), pair(1, 4, 1), pair(2, 3, 3)])
    draw = random.Random(0)
    samples = [
        replace(s, streams={**s.streams, "reference_logprobs": [draw.uniform(-7, -2)
                                                               for _ in s.token_ids]})
        for s in made.samples
    ]  # fmt: skip
    losses = []
    for backend in BACKENDS:
        config = run_of(tmp_path / backend["type"], backend, **RUN)
        [metrics] = await updated(config, replace(made, samples=samples))
        losses.append(metrics["loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-4)
    assert losses[0] == pytest.approx(losses[2], abs=1e-4)
    assert abs(losses[0] - math.log(2)) > 0.1


async def test_pairs_stay_whole_in_micro_batches_and_add_up_to_the_batch(tmp_path):
    groups = [pair(number, 1 + number, 7 - number) for number in range(5)]
    metrics = {}
    for rows in (None, 2, 3):  # of sorted lengths, so that the rows of a pair would come apart
        backend = {**FULL["trl"], "micro_batch_rows": rows}
        config = run_of(tmp_path / str(rows), backend, **RUN)
        metrics[rows] = await updated(config, batch(groups), batch(groups))
    for key in ("loss", "grad_norm", "dpo/margin", "dpo/accuracy"):
        whole = [step[key] for step in metrics[None]]
        assert [step[key] for step in metrics[2]] == pytest.approx(whole, abs=1e-5)
        assert [step[key] for step in metrics[3]] == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b["type"])
async def test_after_a_resume_the_reference_is_still_where_the_run_started(tmp_path, backend):
    found = await whole_and_resumed(tmp_path, backend, RUN, stop=2, steps=3)
    whole, parts = ([row["loss"] for row in rows] for rows in found)
    assert parts == pytest.approx(whole, abs=1e-6)
    assert parts[2] < 0.68, "against the resumed weights it would be ln 2 again"


async def test_an_evaluation_tells_the_held_out_loss_and_accuracy(tmp_path):
    held_out = {"prompts": {"type": "list", "rows": ROWS[:1]}, "every": 3}
    result = await train(run_of(tmp_path, FULL["trl"], **RUN, eval=held_out))
    first, event = events(tmp_path, "eval")
    assert first["eval/loss"] == pytest.approx(math.log(2))
    assert event["eval/dpo/accuracy"] == 1.0
    assert event["eval/loss"] < math.log(2)
    assert result.best_checkpoint_path == tmp_path / "checkpoints" / "step_3"


def test_equal_pairs_are_told_at_the_start(tmp_path):
    rows = [*ROWS, {"prompt": "x", "chosen": "y", "rejected": "y"}]
    changed = {**RUN, "prompts": {"type": "list", "rows": rows}}
    parts = assemble(run_of(tmp_path, FULL["trl"], **changed))
    assert any(warning.startswith("prompts: 1 ") for warning in parts.warnings)


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"beta": 0}, "beta: got 0.0"),
        ({"loss_config": {"beta": 0.2}}, "algorithm.loss_config.beta"),
        ({"normalisation": "token"}, "algorithm.normalisation: got 'token'"),
        ({"pair_by": "score"}, "has no answer, response or completion;"),
    ],
)
def test_what_does_not_fit_dpo_is_refused_before_a_model_loads(tmp_path, algorithm, message):
    changed = {**RUN, "algorithm": {"type": "dpo", **algorithm}}
    with pytest.raises(ConfigError) as caught:
        assemble(run_of(tmp_path, FULL["trl"], **changed))
    assert message in str(caught.value)
