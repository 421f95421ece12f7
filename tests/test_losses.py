"""The shared losses: hand-worked values, gradients, masks and pairs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from retrain import losses
from retrain.adapters.trl.record import StepRecord
from retrain.engine.losses import custom_surrogate, shared_loss, token_logprobs
from retrain.errors import ConfigError, UserCodeError
from retrain.losses import LOSSES
from retrain.types import Batch, Denominators

LN = math.log
TOKEN_LOSSES = [n for n, row in LOSSES.items() if row.formula and row.reads != "pairs"]


def row(*values: float, grad: bool = False) -> Tensor:
    return torch.tensor([values], dtype=torch.float32, requires_grad=grad)


# The ratios are 0.5, 1.0 and 2.0: old log-probs are -ln 4 throughout, so lp = ln(ratio / 4).
LP = (LN(0.125), LN(0.25), LN(0.5))
OLD = (-LN(4),) * 3
# Worked by hand: (loss, d loss / d lp) with advantages +1, -2, +3.
TABLE = [
    ("importance_sampling", {}, -(0.5 - 2 + 6), (-0.5, 2.0, -6.0)),
    # the third is clipped at 1.2: 3.6, and its gradient stops
    ("ppo", {}, -(0.5 - 2 + 3.6), (-0.5, 2.0, 0.0)),
    ("ppo", {"epsilon": 0.2, "epsilon_high": 1.5}, -(0.5 - 2 + 6), (-0.5, 2.0, -6.0)),
    ("cispo", {}, -(0.5 * LN(0.125) - 2 * LN(0.25) + 6 * LN(0.5)), (-0.5, 2.0, -6.0)),
    # clipped to 0.8, 1 and 1.2, and the gradient goes on
    (
        "cispo",
        {"epsilon": 0.2, "epsilon_high": 0.2},
        -(0.8 * LN(0.125) - 2 * LN(0.25) + 3.6 * LN(0.5)),
        (-0.8, 2.0, -3.6),
    ),
    ("cross_entropy", {}, -(LN(0.125) - 2 * LN(0.25) + 3 * LN(0.5)), (-1.0, 2.0, -3.0)),
    # lp - old = -ln 2, 0, ln 2
    (
        "dro",
        {"beta": 0.5},
        -(LN(0.125) - 2 * LN(0.25) + 3 * LN(0.5)) + 0.25 * 2 * LN(2) ** 2,
        (-1 - 0.5 * LN(2), 2.0, -3 + 0.5 * LN(2)),
    ),
]


@pytest.mark.parametrize(("name", "config", "value", "gradient"), TABLE)
def test_a_loss_and_its_gradient_equal_the_hand_worked_ones(name, config, value, gradient):
    lp = row(*LP, grad=True)
    loss, _ = shared_loss(name, config, lp, row(*OLD), row(1, -2, 3), torch.ones(1, 3))
    loss.backward()
    assert loss.item() == pytest.approx(value, rel=1e-6)
    assert lp.grad[0].tolist() == pytest.approx(gradient, rel=1e-6)


def test_ppo_clips_a_low_ratio_of_a_negative_advantage():
    lp = row(LN(0.125), grad=True)
    loss, sums = shared_loss("ppo", {}, lp, row(-LN(4)), row(-1), torch.ones(1, 1))
    loss.backward()
    assert loss.item() == pytest.approx(0.8)
    assert lp.grad.item() == 0
    assert sums["clip_fraction"] == 1


@pytest.mark.parametrize("name", TOKEN_LOSSES)
@pytest.mark.parametrize("garbage", [math.inf, -math.inf, math.nan, 1e30])
def test_masked_positions_contribute_exactly_nothing(name, garbage):
    lp, clean = row(*LP, garbage, grad=True), row(*LP, grad=True)
    mask = torch.tensor([[1.0, 1, 1, 0]])
    loss, sums = shared_loss(name, {}, lp, row(*OLD, garbage), row(1, -2, 3, garbage), mask)
    expected, wanted = shared_loss(name, {}, clean, row(*OLD), row(1, -2, 3), torch.ones(1, 3))
    loss.backward()
    expected.backward()
    assert loss.item() == expected.item()
    assert sums == wanted
    assert lp.grad[0].tolist() == [*clean.grad[0].tolist(), 0.0]


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_micro_batches_add_up_to_the_batch(name):
    generator = torch.Generator().manual_seed(3)
    lp, old, adv = (torch.randn(6, 5, generator=generator) for _ in range(3))
    mask = (torch.rand(6, 5, generator=generator) > 0.3).float()
    whole, sums = shared_loss(name, {}, lp, old, adv, mask)
    parts = [
        shared_loss(name, {}, lp[i : i + 2], old[i : i + 2], adv[i : i + 2], mask[i : i + 2])
        for i in range(0, 6, 2)
    ]
    assert sum(part.item() for part, _ in parts) == pytest.approx(whole.item(), rel=1e-5)
    for key, value in sums.items():
        assert sum(part[key] for _, part in parts) == pytest.approx(value, rel=1e-5)


def metrics_of(lp: Tensor) -> dict[str, float]:
    """Of a ppo step on one micro-batch."""
    record = StepRecord(Batch([], "ppo", {}, Denominators(3, 1)))
    record.measure(lp, torch.zeros(1, 3), row(*OLD), torch.ones(1, 3))
    record.add(shared_loss("ppo", {}, lp, row(*OLD), row(1, -2, 3), torch.ones(1, 3))[1])
    return record.metrics()


def test_the_metrics_are_means_over_the_kept_tokens():
    metrics = metrics_of(row(*LP))
    assert metrics["ratio/mean"] == pytest.approx(3.5 / 3)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    # mean of r - 1 - ln r: (-.5 + ln 2) + 0 + (1 - ln 2), over 3
    assert metrics["kl/sampler_trainer"] == pytest.approx(0.5 / 3)
    assert metrics["tokens/trained"] == 3


def test_on_policy_the_ratio_is_one_and_nothing_is_clipped():
    expected = {
        **{"ratio/mean": 1.0, "ratio/max": 1.0, "clip_fraction": 0.0, "kl/sampler_trainer": 0.0},
        "tokens/trained": 3.0,
    }
    assert metrics_of(row(*OLD)).items() >= expected.items()


def dpo(lp: Tensor, ref: Tensor, adv: Tensor, **more: Tensor) -> tuple[Tensor, dict[str, float]]:
    streams = {"reference_logprobs": ref, **more}
    return shared_loss(
        "dpo", {"beta": 0.5}, lp, torch.zeros_like(lp), adv, (adv != 0).float(), streams
    )


ADVANTAGES = torch.tensor([[0, 1.0, 1], [0, 0, -1], [0, -2, -2], [0, 2, 2]])


def test_dpo_is_ln_2_a_pair_times_its_weight_when_the_policy_is_the_reference():
    lp = torch.randn(4, 3)
    loss, sums = dpo(lp, lp.clone(), ADVANTAGES)
    assert loss.item() == pytest.approx(LN(2) * (1 + 2))
    assert sums["dpo/margin"] == 0


def test_dpo_equals_the_closed_form_and_its_gradient_pushes_the_pair_apart():
    lp = torch.tensor([[9, -1.0, -1], [9, 9, -1]], requires_grad=True)
    ref = torch.tensor([[9, -2.0, -1], [9, 9, -2]])
    loss, sums = dpo(lp, ref, ADVANTAGES[:2])
    loss.backward()
    # gains +1 and +1: margin 0, sigmoid 1/2, so d loss / d lp = -+ beta / 2
    assert loss.item() == pytest.approx(LN(2))
    assert lp.grad.tolist() == [[0, -0.25, -0.25], [0, 0, 0.25]]
    assert sums["pairs"] == 1


def test_dpo_pairs_by_id_wherever_the_rows_stand():
    lp, ref = torch.randn(4, 3), torch.randn(4, 3)
    order = [2, 0, 3, 1]
    ids = torch.tensor([1.0, 1, 2, 2])[:, None].expand(4, 3)
    adjacent, _ = dpo(lp, ref, ADVANTAGES)
    shuffled, _ = dpo(lp[order], ref[order], ADVANTAGES[order], pair_ids=ids[order])
    assert shuffled.item() == pytest.approx(adjacent.item())


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([[1.0], [1.0]], "same sign"),
        ([[1.0], [0.0]], "no advantage"),
        ([[1.0], [-1.0], [1.0]], "one row"),
    ],
)
def test_rows_that_form_no_pairs_are_refused(advantages, message):
    adv = torch.tensor(advantages)
    lp = torch.zeros_like(adv)
    with pytest.raises(ValueError, match=message):
        shared_loss("dpo", {}, lp, lp, adv, torch.ones_like(adv), {"reference_logprobs": lp})


def test_dpo_without_reference_logprobs_is_refused():
    with pytest.raises(ValueError, match="reference_logprobs"):
        shared_loss("dpo", {}, row(1), row(1), row(1), torch.ones(1, 1))


def test_a_custom_loss_gets_clean_rows():
    def reinforce(lp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
        return -(lp * adv * mask).sum()

    mask = torch.tensor([[1.0, 0]])
    loss, _ = shared_loss(reinforce, {}, row(-1, math.nan), row(-1, 0), row(2, 5), mask)
    assert loss.item() == 2


def unfit(lp: Tensor, old: Tensor, adv: Tensor, mask: Tensor) -> Tensor:
    return lp @ adv


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda lp, *_: lp, r"^loss '<lambda>'.*\(1, 2\): "),
        (lambda *_: 0.5, r"returned 0\.5: it must return one number, a tensor"),
        (lambda lp, *_: lp.detach().sum(), r"-1\.0, .*`logprobs`"),
        (unfit, r"^loss 'unfit'.*RuntimeError: .* \(test_losses\.py:\d+\)$"),
    ],
)
def test_a_custom_loss_that_fails_is_named(loss, message):
    """By the surrogate too, which runs it for the services."""
    with pytest.raises(UserCodeError, match=message):
        shared_loss(loss, {}, row(-1, 0, grad=True), row(-1, 0), row(2, 5), torch.ones(1, 2))
    with pytest.raises(UserCodeError, match=message):
        custom_surrogate(loss, [[-1, 0]], [[-1, 0]], [[2, 5]], [[1, 1]])


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("pppo", {}, "'ppo'"),
        ("ppo", {"epsilon_hi": 1}, "'epsilon_high'"),
        ("cross_entropy", {"beta": 1}, "it takes no keys"),
    ],
)
def test_an_unknown_loss_or_key_names_the_nearest(name, config, message):
    with pytest.raises(ConfigError, match=message):
        shared_loss(name, config, row(1), row(1), row(1), torch.ones(1, 1))


@pytest.mark.parametrize("value", [math.inf, math.nan, "0.2", True])
def test_the_value_of_a_key_is_a_number(value):
    message = r"^algorithm\.loss_config\.epsilon: got .*, expected a number$"
    with pytest.raises(ConfigError, match=message):
        losses.check_keys("ppo", {"epsilon": value})


def test_a_name_that_the_table_lacks_has_a_row():
    """A user's function is normalised here; what a user's own backend computes is not."""
    assert not losses.row_of("mine.py:loss").normalises_itself
    assert losses.row_of("theirs").normalises_itself


def test_epsilon_high_is_epsilon_unless_it_is_said():
    assert losses.settings("ppo", {"epsilon": 0.3}) == {"epsilon": 0.3, "epsilon_high": 0.3}
    assert losses.settings("cispo", {}) == {"epsilon": 1.0, "epsilon_high": 4.0}


@settings(deadline=None)  # the first call pays for torch warming up
@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 7))
def test_token_logprobs_equal_a_log_softmax_whatever_the_chunks(rows, length, chunk):
    generator = torch.Generator().manual_seed(rows * 100 + length)
    logits = torch.randn(rows, length, 11, generator=generator) * 5
    ids = torch.randint(0, 11, (rows, length), generator=generator)
    expected = torch.log_softmax(logits, -1).gather(-1, ids[..., None])[..., 0]
    got = token_logprobs(logits, ids, chunk_tokens=chunk)
    assert got.shape == ids.shape
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_token_logprobs_of_half_precision_logits_are_float32_and_differentiable():
    logits = torch.randn(3, 5, 11).bfloat16().requires_grad_()
    ids = torch.randint(0, 11, (3, 5))
    got = token_logprobs(logits, ids, chunk_tokens=4)
    expected = torch.log_softmax(logits.float(), -1).gather(-1, ids[..., None])[..., 0]
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, expected)
    wanted = torch.autograd.grad(expected.sum(), logits)[0]
    torch.testing.assert_close(torch.autograd.grad(got.sum(), logits)[0], wanted)
