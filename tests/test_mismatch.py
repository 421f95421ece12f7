"""`algorithm.mismatch`: hand-worked weights, what it can't be combined with, and a stale run.

test_backend_parity.py holds its gradients to plain torch's on every backend.
"""

from __future__ import annotations

import math

import pytest
import torch
from backends_kit import FULL, LORA, run_of

from retrain.adapters.remote.datums import Shifted
from retrain.adapters.remote.surrogate import corrected
from retrain.assembly import assemble
from retrain.config import MismatchConfig, RunConfig, parse_config
from retrain.engine.losses import mismatch_weights
from retrain.errors import ConfigError
from retrain.pipeline import train
from retrain.pipeline.signal import MismatchWatch
from retrain.scoring import reward


@reward
def early(completion: str) -> float:
    """It differs from the first step on."""
    return sum(letter < "P" for letter in completion) / 4


RATIOS = [[0.25, 1.0, 4.0], [2.0, 9.0, 0.5]]
"""Two samples of three tokens. The second's first and last token were not sampled."""
MASK = [[1, 1, 1], [0, 1, 0]]
RUN = {
    "prompts": {"type": "list", "rows": [{"prompt": f"{k}=", "answer": k * 4} for k in "abcdefgh"]},
    "rewards": [{"type": f"{__name__}:early"}],
    "algorithm": {"type": "grpo", "group_size": 4},
    "sampling": {"max_tokens": 4},
}


def test_a_string_is_the_type():
    config = parse_config({"prompts": {"type": "list"}, "algorithm": {"mismatch": "mask"}})
    assert config.algorithm.mismatch == MismatchConfig(type="mask")


@pytest.mark.parametrize(
    ("rule", "forked", "weights", "clipped"),
    [
        ({"type": "tis"}, False, [[0.25, 1, 2], [2]], 2 / 4),
        ({"type": "tis", "low": 0.5, "high": math.inf}, False, [[0.5, 1, 4], [9]], 1 / 4),
        ({"type": "mask"}, False, [[0, 1, 4], [0]], 2 / 4),
        ({"type": "mask", "low": 0, "high": 3}, False, [[0.25, 1, 0], [0]], 2 / 4),
        # the first sequence's ratio is the cube root of 1, the second's 9
        ({"type": "tis", "level": "sequence"}, False, [[1, 1, 1], [2]], 1 / 2),
        ({"type": "mask", "level": "sequence"}, False, [[1, 1, 1], [0]], 1 / 2),
        # one sequence: the fourth root of 9
        ({"type": "tis", "level": "sequence"}, True, [[3**0.5] * 3, [3**0.5]], 0.0),
        ({"type": "mask", "level": "sequence", "high": 1.5}, True, [[0] * 3, [0]], 1.0),
    ],
)
def test_weights_are_the_hand_worked_ones_on_floats_and_on_tensors(rule, forked, weights, clipped):
    config = MismatchConfig(**rule)
    logs = [[math.log(ratio) for ratio in row] for row in RATIOS]
    datums = [
        Shifted([1] * 3, [2] * 3, mask, [-1.0] * 3, [1.0] * 3, run_id="r" if forked else "")
        for mask in MASK
    ]
    learner = [[gap - 1.0 for gap in row] for row in logs]
    made, share = corrected(config, learner, datums)
    got = [[a for a, on in zip(d.advantages, d.mask, strict=True) if on] for d in made]
    assert [w for row in got for w in row] == pytest.approx([w for row in weights for w in row])
    assert share == pytest.approx(clipped)
    assert [datum.logprobs for datum in made] == learner
    mask, rollouts = torch.tensor(MASK), torch.tensor([0, 0 if forked else 1])
    found, outside = mismatch_weights(config, torch.tensor(logs), mask, rollouts)
    assert found[mask > 0].tolist() == pytest.approx([w for row in weights for w in row])
    sequences = 1 if forked else 2
    assert outside / (4 if config.level == "token" else sequences) == pytest.approx(clipped)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"low": 3.0}, "algorithm.mismatch"),
        ({"type": "mask", "high": 0.25}, "low is 0.5, expected at most high (0.25)"),
        ({"low": -0.5}, "algorithm.mismatch.low: got -0.5"),
        ({"high": 0}, "algorithm.mismatch.high: got 0"),
        ({"type": "icepop"}, "algorithm.mismatch.type: got 'icepop'"),
        ({"level": "batch"}, "algorithm.mismatch.level: got 'batch'"),
        ({"cap": 2.0}, "algorithm.mismatch.cap"),
    ],
)
def test_a_wrong_value_is_an_error(keys, message):
    with pytest.raises(ConfigError) as caught:
        parse_config({"prompts": ["a"], "algorithm": {"type": "grpo", "mismatch": keys}})
    assert message in str(caught.value)


SFT = {"environment": "single_turn", "rewards": [], "sampling": {}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"loss": "dro"}}, "the loss dro corrects old samples itself"),
        ({"algorithm": {"loss": "vespo"}}, "the loss vespo corrects old samples itself"),
        ({"algorithm": {"loss": "grpo", "loss_config": {"beta": 0.1}}}, "algorithm.kl_penalty"),
        ({"algorithm": {"loss_config": {"off_policy_mask_threshold": 0.1}}}, "the same difference"),
        ({"algorithm": {"loss": "luspo"}}, "algorithm.mismatch.level"),
        ({"algorithm": {"loss_config": {"importance_sampling_level": "sequence"}}},
         "algorithm.mismatch.level"),
        ({"algorithm": {"type": "sft"}, **SFT}, "sft samples no tokens, so there is no mismatch"),
        ({"sampling": {"top_p": 0.9}}, "top_p 0.9"),
        ({"sampling": {"temperature": 0.7}, "backend": LORA["tinker"]}, "with temperature 0.7"),
        ({"backend": {"type": "benchmarks/mock_engine.py:MockOptions"}}, "does not support it"),
    ],
)  # fmt: skip
def test_what_would_be_corrected_twice_or_wrongly_is_rejected(tmp_path, changes, message):
    algorithm = {"type": "grpo", "mismatch": {}, **changes.get("algorithm", {})}
    with pytest.raises(ConfigError) as caught:
        assemble(
            run_of(tmp_path, **{"backend": FULL["trl"], **RUN, **changes, "algorithm": algorithm})
        )
    assert any(p.startswith("algorithm.mismatch:") and message in p for p in caught.value.problems)


@pytest.mark.parametrize("backend", [FULL["trl"], LORA["tinker"]], ids=lambda b: b["type"])
async def test_a_stale_run_reports_what_was_clipped_and_how_far_it_was(tmp_path, backend):
    """The ratio to the sampler stays visible, though the loss compares with the present weights."""
    algorithm = {**RUN["algorithm"], "loss": "importance_sampling", "mismatch": {"high": 1.02}}
    config = run_of(
        tmp_path,
        {**backend, "learning_rate": 2e-2},
        **{**RUN, "algorithm": algorithm},
        staleness={"target": 2},
        train={"total_train_steps": 4, "groups_per_step": 4, "order": "in_order"},
    )
    last = (await train(config)).history[-1]
    assert last["staleness/max"] > 0
    assert 0 < last["mismatch/clipped"] < 1
    assert last["kl/sampler_trainer"] > 1e-4
    assert "clip_fraction" not in last


def test_reinforce_is_a_mean_over_sequences_and_warns_of_old_samples(tmp_path):
    def parts(**algorithm):
        keys = {"type": "rloo", "loss": "reinforce", **algorithm}
        run = {**RUN, "algorithm": keys, "staleness": {"target": 1}}
        return assemble(run_of(tmp_path, FULL["trl"], **run))

    made = parts()
    assert made.normalisation == "batch"
    assert any("reinforce has no ratio" in warning for warning in made.warnings)
    assert not parts(mismatch={"level": "sequence"}, normalisation="token").warnings
    assert parts(normalisation="token").normalisation == "token"


@pytest.mark.parametrize(
    ("gaps", "stale", "given", "text"),
    [
        ([0.02] * 5, 0, {}, "above 0.01 for 5 steps (now 0.02) though no token was stale"),
        ([0.02] * 9, 1, {}, ""),
        ([0.2] * 9, 1, {}, "above 0.1 for 5 steps (now 0.2): sampler"),
        ([0.02, 0.02, 0.001, 0.02, 0.02, 0.02], 0, {}, ""),
        ([math.nan] * 9, 0, {}, ""),
        ([0.5] * 9, 0, {"algorithm": {"mismatch": {"high": 2.0}}}, ""),
        ([0.5] * 9, 0, {"sampling": {"top_p": 0.9}}, ""),
    ],
)
def test_a_lasting_difference_is_warned_of_once(gaps, stale, given, text, caplog):
    watch = MismatchWatch(RunConfig.model_validate({"prompts": {"type": "list"}, **given}))
    for gap in gaps:
        watch.see({"kl/sampler_trainer": gap, "staleness/max": stale})
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == bool(text)
    assert text in "".join(said)
    assert not text or "algorithm.mismatch" in said[0]
