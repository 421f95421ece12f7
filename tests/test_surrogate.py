"""Every loss and its dL/dlogp, on floats and on tensors, against torch autograd."""

from __future__ import annotations

import random

import pytest
import torch

from retrain.adapters.remote.datums import Shifted
from retrain.adapters.remote.schedule import learning_rate
from retrain.adapters.remote.surrogate import surrogate
from retrain.engine.losses import shared_loss
from retrain.errors import AdapterError, ConfigError, NonFiniteError
from retrain.losses import LOSSES

CASES = [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"epsilon": 0.1, "epsilon_high": 0.3}),
    ("cispo", {}),
    ("cispo", {"epsilon": 0.2, "epsilon_high": 0.2}),
    ("reinforce", {}),
    ("cross_entropy", {}),
    ("dro", {}),
    ("dro", {"beta": 0.7}),
    ("dpo", {"beta": 0.3}),
]


def datums(seed: int, rows: int = 4, length: int = 6) -> tuple[list[Shifted], list[list[float]]]:
    """Random datums in pairs (+ and - advantages), and the learner's log-probs."""
    draw = random.Random(seed)
    made, learner = [], []
    for row in range(rows):
        mask = [float(draw.random() < 0.7) for _ in range(length)]
        mask[-1] = 1.0
        sign = 1.0 if row % 2 == 0 else -1.0
        made.append(
            Shifted(
                inputs=[1] * length,
                targets=[2] * length,
                mask=mask,
                logprobs=[-draw.uniform(0.1, 2.0) * m for m in mask],
                advantages=[sign * draw.uniform(0.2, 1.5) * m for m in mask],
                streams={
                    "reference_logprobs": [-draw.uniform(0.1, 2.0) for _ in mask],
                    "pair_ids": [float(row // 2)] * length,
                },
            )
        )
        learner.append([-draw.uniform(0.1, 2.0) for _ in mask])
    return made, learner


def plain(
    loss: str,
    lp: torch.Tensor,
    old: torch.Tensor,
    adv: torch.Tensor,
    ref: torch.Tensor,
    *,
    epsilon: float = 0.2,
    epsilon_high: float | None = None,
    beta: float = 0.05,
) -> torch.Tensor:
    """The losses written for autograd, each token's or pair's; 0-1, 2-3, ... are the pairs."""
    ratio = (lp - old).exp()
    if loss == "cispo" and epsilon_high is None:
        epsilon, epsilon_high = 1.0, 4.0
    clipped = ratio.clamp(1 - epsilon, 1 + (epsilon if epsilon_high is None else epsilon_high))
    if loss == "dpo":
        gains = (lp - ref).sum(-1)
        weights = adv.abs().amax(-1)
        margins = beta * (gains[::2] - gains[1::2])
        return -(weights[::2] + weights[1::2]) / 2 * torch.nn.functional.logsigmoid(margins)
    return {
        "importance_sampling": -ratio * adv,
        "ppo": -torch.minimum(ratio * adv, clipped * adv),
        "cispo": -clipped.detach() * adv * lp,
        "reinforce": -adv * lp,
        "cross_entropy": -adv * lp,
        "dro": -(adv * lp - beta / 2 * (lp - old).square()),
    }[loss]


def test_the_table_has_no_other_loss_with_a_formula() -> None:
    assert {loss for loss, _ in CASES} == {name for name, row in LOSSES.items() if row.formula}


@pytest.mark.parametrize(("loss", "config"), CASES)
@pytest.mark.parametrize("seed", range(3))
def test_value_gradient_and_metrics_equal_autograds(
    loss: str, config: dict[str, float], seed: int
) -> None:
    rows, learner = datums(seed)

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64)

    lp = tensor(learner).requires_grad_()
    value, sums = shared_loss(
        loss,
        config,
        lp,
        tensor([d.logprobs for d in rows]),
        tensor([d.advantages for d in rows]),
        tensor([d.mask for d in rows]),
        {name: tensor([d.streams[name] for d in rows]) for name in rows[0].streams},
    )
    value.backward()  # type: ignore[no-untyped-call] - torch leaves it untyped
    ours = surrogate(loss, config, learner, rows)
    mask = tensor([d.mask for d in rows])
    free = tensor(learner).requires_grad_()
    streams = [[d.logprobs for d in rows], [d.advantages for d in rows]]
    reference = tensor([d.streams["reference_logprobs"] for d in rows])
    old, adv, ref = (tensor(values) * mask for values in (*streams, reference.tolist()))
    expected = plain(loss, free * mask, old, adv, ref, **config).sum()
    expected.backward()  # type: ignore[no-untyped-call] - the same
    assert lp.grad is not None
    assert free.grad is not None
    for found in (ours.loss, value.item()):
        assert found == pytest.approx(expected.item(), abs=1e-9)
    for gradients in (tensor(ours.gradients), lp.grad):
        assert torch.allclose(gradients, free.grad, atol=1e-9)
    pairs, gaps = sums.pop("pairs", 0.0), (free.detach() - old)[mask > 0]
    means = {
        **{k: v / (pairs if k.startswith("dpo/") else len(gaps)) for k, v in sums.items()},
        "tokens/trained": len(gaps),
        "ratio/mean": gaps.exp().mean().item(),
        "kl/sampler_trainer": (gaps.exp() - 1 - gaps).mean().item(),
        "entropy": -free.detach()[mask > 0].mean().item(),
    }
    if loss != "dpo":  # whose answers are not samples of the learner's
        apart = (ref - free.detach())[mask > 0]
        means["kl/reference"] = (apart.exp() - 1 - apart).mean().item()
    assert ours.metrics == pytest.approx(means, abs=1e-9)


def one(logprob: float, advantage: float) -> list[Shifted]:
    return [Shifted([1], [2], [1.0], [logprob], [advantage])]


def test_a_pair_with_one_row_is_refused() -> None:
    row = Shifted([1], [2], [1.0], [0.0], [1.0], {"reference_logprobs": [-1.0]})
    with pytest.raises(ValueError, match="one row"):
        surrogate("dpo", {}, [[-1.0]], [row])
    with pytest.raises(ValueError, match="same sign"):
        surrogate("dpo", {}, [[-1.0], [-1.0]], [row, row])


def test_unknown_losses_keys_and_lengths_are_refused() -> None:
    with pytest.raises(ConfigError, match="'grpo2'"):
        surrogate("grpo2", {}, [], [])
    with pytest.raises(ConfigError, match=r"loss_config\.beta.*'ppo'"):
        surrogate("ppo", {"beta": 1.0}, [], [])
    with pytest.raises(AdapterError, match="one per target"):
        surrogate("ppo", {}, [[-1.0, -1.0]], one(-1.0, 1.0))


def test_a_diverged_policy_is_an_error_not_a_number() -> None:
    with pytest.raises(NonFiniteError):
        surrogate("importance_sampling", {}, [[0.0]], one(-800.0, 1.0))


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ("constant", 0, 0.0),
        ("constant", 1, 0.5),
        ("constant", 2, 1.0),
        ("constant", 99, 1.0),
        ("linear", 6, 0.5),
        ("linear", 10, 0.0),
        ("linear", 12, 0.0),
        ("cosine", 6, 0.5),
        ("cosine", 10, 0.0),
    ],
)
def test_the_rate_warms_up_and_falls(schedule: str, step: int, rate: float) -> None:
    got = learning_rate(step, peak=1.0, schedule=schedule, warmup_steps=2, total_steps=10)  # type: ignore[arg-type] - a parametrised literal
    assert got == pytest.approx(rate)
