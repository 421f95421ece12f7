"""The KL penalty as credit: hand-worked values, and one meaning on every backend."""

import pytest
from backends_kit import FULL, LORA, histories, run_of, whole_and_resumed

from retrain.algorithms.batching import batch_of, kl_penalised
from retrain.assembly import assemble
from retrain.errors import ConfigError
from retrain.scoring import reward
from retrain.types import Sample


@reward
def early(completion: str) -> float:
    """Told apart from the first step on, by any weights."""
    return sum(letter < "P" for letter in completion) / 4


RUN = {
    "prompts": {"type": "list", "rows": [{"prompt": f"{k}=", "answer": k * 4} for k in "abcdefgh"]},
    "rewards": [{"type": f"{__name__}:early"}],
    "algorithm": {"type": "grpo", "group_size": 4, "kl_penalty": 0.1, "loss": "ppo"},
    "sampling": {"max_tokens": 4},
    "train": {"total_train_steps": 3, "groups_per_step": 8, "order": "in_order"},
}


def test_a_token_pays_for_what_it_is_likelier_than_under_the_reference():
    sample = Sample([7, 8, 9], [0, 1, 1], [0.0, -1.0, -2.0], [0.0, 0.5, 0.5], [-1, 0, 0])
    [charged] = kl_penalised([sample], [[0.0, -1.5, -1.0]], 0.1)
    assert charged.advantages == pytest.approx([0.0, 0.5 - 0.1 * 0.5, 0.5 + 0.1 * 1.0])
    assert charged.streams == {"reference_logprobs": [0.0, -1.5, -1.0]}


def test_at_the_reference_nothing_is_paid():
    sample = Sample([7, 8], [0, 1], [0.0, -1.0], [0.0, 0.5], [-1, 0])
    assert kl_penalised([sample], [[0.0, -1.0]], 5.0)[0].advantages == sample.advantages


@pytest.mark.parametrize("backends", [FULL, LORA], ids=["full", "lora"])
async def test_backends_that_tune_the_same_weights_charge_the_same(tmp_path, backends):
    found = await histories(tmp_path, backends, RUN)
    one, other = ([(row["kl/reference"], row["loss"]) for row in rows] for rows in found)
    assert one[0] == pytest.approx((0.0, other[0][1]), abs=1e-4)
    assert one[1][0] > 1e-4
    assert one[1] == pytest.approx(other[1], abs=1e-4)


async def test_the_metric_of_trls_kl_term_is_that_of_the_penalty(tmp_path):
    """With weights far from those that sampled: TRL's own term is weighted by the ratio."""
    sample = Sample([40, 41, 42, 43], [0, 1, 1, 1], [0, -2, -8, -5], [0, 1, -1, 1], [-1, 0, 0, 0])
    term = {"type": "grpo", "loss": "dapo", "loss_config": {"beta": 1e-9}}
    found = []
    for number, algorithm in enumerate((term, {"type": "grpo", "loss": "dapo"})):
        config = run_of(tmp_path / str(number), FULL["trl"], **{**RUN, "algorithm": algorithm})
        async with assemble(config).open_adapter() as adapter:
            reference = await adapter.logprobs([sample.token_ids], reference=True)
            [given] = kl_penalised([sample], reference, 0.0) if number else [sample]
            batch = batch_of([given], loss="dapo", loss_config=algorithm.get("loss_config", {}))
            found.append([(await adapter.update(batch))["kl/reference"] for _ in range(3)])
    assert found[0] == pytest.approx(found[1], rel=1e-4, abs=1e-6)
    assert found[0][2] > 1e-4 > abs(found[0][0])


@pytest.mark.parametrize("backend", [FULL["trl"], LORA["tinker"]], ids=lambda b: b["type"])
async def test_after_a_resume_the_reference_is_still_where_the_run_started(tmp_path, backend):
    found = await whole_and_resumed(tmp_path, backend, RUN, stop=2, steps=3)
    whole, parts = ([row["kl/reference"] for row in rows] for rows in found)
    assert parts == pytest.approx(whole, abs=1e-6)
    assert parts[2] > 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sampling": {"temperature": 0.7}}, "sampling.temperature"),
        ({"algorithm": {"type": "grpo", "kl_penalty": 0.1, "loss_config": {"beta": 0.1}}},
         "algorithm.loss_config.beta"),
        ({"backend": {"type": "benchmarks/mock_engine.py:MockOptions"}},
         "backend has no reference log-probs"),
        ({"algorithm": {"type": "grpo", "kl_penalty": -0.1}}, "algorithm.kl_penalty"),
    ],
)  # fmt: skip
def test_a_penalty_that_would_mean_something_else_is_refused(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        assemble(run_of(tmp_path, **{"backend": FULL["trl"], **RUN, **changes}))
    assert message in str(caught.value)
