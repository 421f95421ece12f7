"""The service's trainer against plain torch: losses, gradients, AdamW, LoRA, copies."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import log_softmax

from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.losses import native_to
from retrain.service import memory
from retrain.service.errors import ServiceError
from retrain.service.passes import BYTES_PER_LOGIT, TargetRow, tokens_at_once
from retrain.service.trainer import Trainer
from retrain.service.tuning import BaseModel, Tuning, merged_weights
from retrain.wire.training import AdamParams

FULL = Tuning(rank=0)
ADAM = AdamParams(3e-3, 0.8, 0.97, 1e-8, 0.1, 0.5)


@pytest.fixture(scope="module")
def model():
    return load_model(tiny_folder()).requires_grad_(False)


@pytest.fixture(scope="module")
def base(model):
    return BaseModel(model)


def rows(count: int = 5, seed: int = 0) -> list[TargetRow]:
    """Of different lengths, with every stream filled at random."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int, scale: float) -> list[float]:
        return (torch.randn(length, generator=generator) * scale).tolist()

    made = []
    for length in [3 + 4 * i for i in range(count)]:
        ids = torch.randint(7, 100, (length + 1,), generator=generator).tolist()
        mask = (torch.rand(length, generator=generator) > 0.3).float().tolist()
        logprobs = [-4.6 + x for x in numbers(length, 0.5)]
        made.append(TargetRow(ids[:-1], ids[1:], numbers(length, 1.0), logprobs, mask))
    return made


def plain_loss(model, data: list[TargetRow], loss: str) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Row by row, without padding, by the formulas as the protocol writes them."""
    total, found = torch.zeros(()), []
    for row in data:
        logits = model(input_ids=torch.tensor([row.tokens])).logits[0]
        lp = log_softmax(logits, -1).gather(1, torch.tensor(row.targets)[:, None])[:, 0]
        old, a, m = (torch.tensor(x) for x in (row.logprobs, row.advantages, row.mask))
        r = (lp - old).exp()
        value = {
            "importance_sampling": -r * a,
            "ppo": -torch.minimum(r * a, r.clamp(0.8, 1.2) * a),
            "cispo": -r.clamp(0.0, 5.0).detach() * a * lp,
            "cross_entropy": -a * lp,
            "dro": -(a * lp - 0.025 * (lp - old) ** 2),
        }[loss]
        total = total + (value * m).sum()
        found.append(lp.detach())
    return total, found


@pytest.mark.parametrize("loss", sorted(native_to("tinker")))
def test_loss_gradient_and_one_step_equal_plain_torch(base, model, loss):
    data = rows()
    trained = Trainer(base, FULL)
    passed = trained.forward_backward(data, loss, {})
    metrics = trained.optim_step(ADAM)

    model = copy.deepcopy(model).requires_grad_(True)
    value, logprobs = plain_loss(model, data, loss)
    value.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), ADAM.grad_clip_norm)
    matrices = [p for p in model.parameters() if p.dim() > 1]
    gains = {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0}
    torch.optim.AdamW(
        [{"params": matrices}, gains], lr=3e-3, betas=(0.8, 0.97), eps=1e-8, weight_decay=0.1
    ).step()

    assert passed.loss == pytest.approx(value.item(), rel=1e-5, abs=1e-5)
    for got, expected in zip(passed.logprobs, logprobs, strict=True):
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-5, rtol=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    after = plain_loss(model, data, "cross_entropy")[1]
    for got, expected in zip(
        trained.forward(data, "cross_entropy", {}).logprobs, after, strict=True
    ):
        torch.testing.assert_close(torch.tensor(got), expected, atol=1e-4, rtol=1e-4)


def test_gradients_add_up_over_calls_whatever_the_micro_batches(base, monkeypatch):
    once = Trainer(base, FULL)
    monkeypatch.setattr("retrain.service.passes.LOGITS_ON_CPU", 12 * base.vocabulary)  # 12 tokens
    twice = Trainer(base, FULL)
    data = rows()
    once.forward_backward(data, "ppo", {})
    twice.forward_backward(data[:2], "ppo", {})
    twice.forward_backward(data[2:], "ppo", {})
    assert once.optim_step(AdamParams())["grad_norm"] == pytest.approx(
        twice.optim_step(AdamParams())["grad_norm"], rel=1e-5
    )


def test_a_micro_batch_is_limited_on_every_device_and_memory_kept_for_it(base, monkeypatch):
    assert tokens_at_once(base) > 0
    elsewhere = SimpleNamespace(device=torch.device("meta"), vocabulary=base.vocabulary)
    assert tokens_at_once(elsewhere) > tokens_at_once(base)
    context = base.untied.config.max_position_embeddings
    need = base.size + BYTES_PER_LOGIT * base.vocabulary * context
    monkeypatch.setattr(memory, "free_memory", lambda device: need - 1)
    with pytest.raises(ServiceError):
        memory.check_memory(base, Tuning(), 1)
    monkeypatch.setattr(memory, "free_memory", lambda device: need)
    memory.check_memory(base, Tuning(), 1)


def test_a_forward_leaves_no_gradient(base):
    trained = Trainer(base, FULL)
    trained.forward(rows(), "ppo", {})
    with pytest.raises(ServiceError, match="forward_backward"):
        trained.optim_step(AdamParams())


def test_a_call_that_fails_adds_nothing(base):
    alone, failed = Trainer(base, FULL), Trainer(base, FULL)
    good, bad = rows(2), rows(2, seed=1)
    bad[1] = bad[1]._replace(logprobs=[-2000.0] * 7, mask=[1.0] * 7)  # exp overflows
    alone.forward_backward(good, "importance_sampling", {})
    failed.forward_backward(good, "importance_sampling", {})
    with pytest.raises(ServiceError, match="importance_sampling"):
        failed.forward_backward(bad, "importance_sampling", {})
    assert alone.optim_step(AdamParams()) == failed.optim_step(AdamParams())


def test_a_gradient_that_is_not_finite_takes_no_step(base):
    trained = Trainer(base, FULL)
    before = trained.weights()
    row = rows(1)[0]._replace(advantages=[1e37, 0.0, 0.0], mask=[1.0, 0.0, 0.0])
    trained.forward_backward([row], "cross_entropy", {})  # finite, but not its square
    with pytest.raises(ServiceError, match="norm"):
        trained.optim_step(AdamParams())
    assert all(torch.equal(before[name], tensor) for name, tensor in trained.weights().items())
    assert trained.steps == 0


def learn(trained: Trainer, steps: int, seed: int = 0) -> None:
    for step in range(steps):
        trained.forward_backward(rows(seed=seed + step), "cross_entropy", {})
        trained.optim_step(AdamParams(1e-2))


@pytest.mark.parametrize("tuning", [FULL, Tuning(rank=4)], ids=["full", "lora"])
def test_a_copy_goes_on_exactly_as_the_original(base, tuning):
    original, resumed = Trainer(base, tuning), Trainer(base, replace(tuning, seed=9))
    learn(original, 2)
    weights, state = original.weights(), original.optimizer_state()
    learn(original, 1, seed=50)  # what was copied must not move with it
    resumed.load(weights, state)
    learn(resumed, 1, seed=50)
    for name, tensor in original.weights().items():
        assert torch.equal(tensor, resumed.weights()[name]), name
    assert resumed.steps == 3


def test_weights_of_another_tuning_are_refused(base):
    with pytest.raises(ServiceError, match="LoRA rank"):
        Trainer(base, Tuning(rank=4)).load(Trainer(base, Tuning(rank=8)).weights(), None)


def test_lora_trains_the_layers_that_it_is_told_to(base):
    def layers(**tuning: bool) -> set[str]:
        names = Trainer(base, Tuning(rank=2, **tuning)).weights()
        return {name.split(".")[-3] for name in names}

    attention = {"q_proj", "k_proj", "v_proj", "o_proj"}
    mlp = {"gate_proj", "up_proj", "down_proj"}
    assert layers() == attention | mlp | {"lm_head"}
    assert layers(mlp=False, unembed=False) == attention
    assert layers(attention=False, unembed=False) == mlp
    assert layers(attention=False, mlp=False) == {"lm_head"}
    with pytest.raises(ServiceError, match="layer"):
        layers(attention=False, mlp=False, unembed=False)


def test_lora_shares_the_base_weights_and_never_changes_them(base, model):
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trainers = [Trainer(base, Tuning(rank=4)) for _ in range(2)]
    for trained in trainers:
        shared = dict(trained.model.named_parameters())
        assert shared["base_model.model.model.norm.weight"] is model.model.norm.weight
        head = shared["base_model.model.lm_head.base_layer.weight"]
        assert head is base.untied.lm_head.weight is not model.model.embed_tokens.weight
        learn(trained, 2)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("tuning", [FULL, Tuning(rank=4)], ids=["full", "lora"])
async def test_a_sampler_of_the_merged_weights_scores_as_the_trainer_does(base, tuning):
    trained, plain = Trainer(base, tuning), base.untied
    learn(trained, 3)
    weights = merged_weights(plain, trained.weights(), tuning.rank)
    row = rows()[-1]
    async with LocalSampler(plain, tiny_tokenizer()) as sampler:
        await sampler.load_weights(weights, 1)
        scored = await sampler.logprobs([*row.tokens, row.targets[-1]])
    assert scored[1:] == pytest.approx(
        trained.forward([row], "cross_entropy", {}).logprobs[0], abs=1e-5
    )
