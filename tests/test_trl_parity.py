"""The adapter's loss and gradients are TRL's own on the same rows, however they are cut."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from trl import GRPOConfig, GRPOTrainer  # noqa: E402 - the same

from retrain.adapters.trl.build import RECOMPUTE  # noqa: E402 - the same
from retrain.adapters.trl.plan import plan_loss  # noqa: E402 - the same
from retrain.adapters.trl.record import StepRecord  # noqa: E402 - the same
from retrain.adapters.trl.rows import micro_batches  # noqa: E402 - the same
from retrain.algorithms.batching import normalised  # noqa: E402 - the same
from retrain.engine.losses import shared_loss  # noqa: E402 - the same
from retrain.engine.models import load_model, load_tokenizer  # noqa: E402 - the same
from tests import trl_kit as kit  # noqa: E402 - needs torch

LEVEL = "importance_sampling_level"
TRL_LOSSES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def gradients(model):
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def whole_batch(trainer, batch, rows=None):
    """Loss and gradients of the adapter's trainer over `batch`, `rows` samples a micro-batch."""
    trainer.current_gradient_accumulation_steps = 1
    trainer.record = StepRecord(batch)
    trainer.cut = partial(micro_batches, rows=rows, tokens=10**6)
    loss = trainer._whole_batch(trainer.model, trainer._shares(batch)[0].parts)
    return loss.item(), gradients(trainer.model), trainer.record.metrics()


def drift(model):
    """Move the weights a little, always alike: as if steps had been made since the start."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.05 * torch.randn(weight.shape, generator=generator))


def native(config, samples, scratch, *, drifted=False):
    """Loss and gradients of a plain GRPOTrainer on its own layout of the same rows."""
    loss = config.algorithm.loss
    plan = plan_loss(loss, config.algorithm.loss_config, config.sampling.max_tokens)
    folder = kit.model_folder()
    args = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        per_device_train_batch_size=2,
        num_generations=2,
        report_to="none",
        **{RECOMPUTE: False, **plan.args},
    )
    from datasets import Dataset

    trainer = GRPOTrainer(
        load_model(folder),
        reward_funcs=lambda **_: [],
        args=args,
        train_dataset=Dataset.from_dict({"prompt": [""] * 2}),
        processing_class=load_tokenizer(folder),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    if drifted:
        drift(trainer.model)
    rows = kit.native_rows(samples)
    if trainer.ref_model is not None:
        with torch.no_grad():
            rows["ref_per_token_logps"] = trainer._get_per_token_logps_and_entropies(
                trainer.ref_model,
                torch.cat([rows["prompt_ids"], rows["completion_ids"]], 1),
                torch.cat([rows["prompt_mask"], rows["completion_mask"]], 1),
                rows["completion_ids"].size(1),
            )[0]
    value = trainer._compute_loss(trainer.model, rows)
    value.backward()
    return value.item(), gradients(trainer.model)


def assert_equal_gradients(left, right, tolerance=2e-5):
    assert left.keys() == right.keys()
    scale = max(g.abs().max().item() for g in left.values())
    assert scale > 0
    for name, gradient in left.items():
        assert (gradient - right[name]).abs().max().item() <= tolerance * scale, name


@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_loss_and_gradients_are_those_of_trl_alone(loss, tmp_path):
    samples = kit.apart(kit.ragged())
    config = kit.run_config(loss)
    batch = kit.batch(samples, loss)
    if loss == "cispo":  # the shared meaning: its normaliser is folded into the advantages
        batch = normalised(batch, "token")
    value, grads, metrics = whole_batch(kit.trainer_of(config, tmp_path), batch)
    expected, expected_grads = native(config, samples, tmp_path)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_equal_gradients(expected_grads, grads)
    assert metrics["loss"] == 0.0  # told by training_step, which this test does not run


@pytest.mark.parametrize("loss", TRL_LOSSES)
def test_micro_batches_add_up_to_the_whole_with_a_dropped_and_a_forked_row(loss, tmp_path):
    samples = kit.ragged()
    extra = {} if loss == "cispo" else {"entropy_coef": 0.05, "beta": 0.1}
    trainer = kit.trainer_of(kit.run_config(loss, loss_config=extra), tmp_path)
    batch = kit.batch(samples, loss)
    if loss == "cispo":
        batch = normalised(batch, "token")
    value, grads, metrics = whole_batch(trainer, batch)
    for rows in (1, 2, 4):
        part_value, part_grads, part_metrics = whole_batch(trainer, batch, rows)
        assert part_value == pytest.approx(value, rel=1e-5)
        assert_equal_gradients(grads, part_grads)
        assert part_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "luspo"])
def test_a_row_without_a_token_to_train_changes_nothing(loss, tmp_path):
    trainer = kit.trainer_of(kit.run_config(loss), tmp_path)
    samples = kit.ragged()
    value, grads, _ = whole_batch(trainer, kit.batch(samples, loss))
    kept = kit.batch([s for s in samples if any(s.loss_mask)], loss)
    assert whole_batch(trainer, kept)[0] == value
    assert_equal_gradients(grads, whole_batch(trainer, kept)[1], tolerance=0)


@pytest.mark.parametrize(
    ("loss", "loss_config"),
    [
        ("dapo", {"beta": 0.2}),
        ("grpo", {"epsilon": 0.1, "epsilon_high": 0.3, "delta": 1.5}),
        ("grpo", {"importance_sampling_level": "sequence"}),
        ("dapo", {"entropy_coef": 0.1}),
        ("sapo", {"sapo_temperature_pos": 0.7, "sapo_temperature_neg": 1.4}),
        ("vespo", {"vespo_k_pos": 1.0, "vespo_lambda_neg": 1.5}),
        ("dapo", {"off_policy_mask_threshold": 0.1}),
        ("cispo", {"epsilon_high": 0.2}),
    ],
)
def test_every_key_of_a_loss_means_what_it_means_in_trl(loss, loss_config, tmp_path):
    samples = kit.apart(kit.ragged())
    config = kit.run_config(loss, loss_config=loss_config)
    batch = kit.batch(samples, loss, **loss_config)
    if loss == "cispo":
        batch = normalised(batch, "token")
    trainer = kit.trainer_of(config, tmp_path)
    drift(trainer.model)
    value, grads, _ = whole_batch(trainer, batch, rows=3)
    expected, expected_grads = native(config, samples, tmp_path, drifted=True)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert_equal_gradients(expected_grads, grads)
    trainer = kit.trainer_of(kit.run_config(loss), tmp_path)
    drift(trainer.model)
    plain = whole_batch(trainer, batch)[0]
    assert plain != pytest.approx(value, rel=1e-5), "the keys must have an effect"


def plain_logprobs(model, samples):
    """(B, T) log-probs of whole rows by a plain forward, and the streams beside them."""
    width = max(len(s.token_ids) for s in samples)

    def table(rows):
        return torch.tensor([[*row, *([0] * (width - len(row)))] for row in rows])

    ids = table([s.token_ids for s in samples])
    logits = model(ids, attention_mask=table([[1] * len(s.token_ids) for s in samples])).logits
    scored = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
    return (
        scored,
        table([s.logprobs for s in samples])[:, 1:],
        table([s.advantages for s in samples])[:, 1:],
        table([s.loss_mask for s in samples])[:, 1:],
    )


@pytest.mark.parametrize(
    ("loss", "loss_config"),
    [
        ("importance_sampling", {}),
        ("ppo", {"epsilon": 0.1}),
        ("cispo", {"epsilon": 0.3}),
        ("cross_entropy", {}),
        ("dro", {"beta": 0.3}),
    ],
)
def test_a_shared_loss_equals_a_plain_forward_and_backward(loss, loss_config, tmp_path):
    samples = [s for s in kit.ragged() if any(s.loss_mask)]
    trainer = kit.trainer_of(kit.run_config(loss, loss_config=loss_config), tmp_path)
    batch = kit.batch(samples, loss, **loss_config)
    value, grads, metrics = whole_batch(trainer, batch, rows=3)
    model = load_model(kit.model_folder())
    logprobs, old, advantages, mask = plain_logprobs(model, samples)
    expected, sums = shared_loss(loss, loss_config, logprobs, old, advantages, mask)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert_equal_gradients(gradients(model), grads)
    assert ("clip_fraction" in metrics) == (loss in ("ppo", "cispo"))
    if "clip_fraction" in metrics:
        assert metrics["clip_fraction"] == sums["clip_fraction"] / mask.sum().item()
    gaps = (logprobs - old)[mask > 0]
    kl = (gaps.exp() - 1 - gaps).mean().item()
    assert metrics["kl/sampler_trainer"] == pytest.approx(kl, rel=1e-4)


def once_per_rollout(loss, keys, model, samples):
    """TRL's `loss` in plain torch, as the mean over rollouts of the mean over each one's tokens."""
    lp, old, advantages, mask = plain_logprobs(model, samples)
    with torch.no_grad():
        reference, *_ = plain_logprobs(load_model(kit.model_folder()), samples)
    ratio = (lp - old).exp()
    if loss == "grpo":
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    else:
        heat = torch.where(advantages > 0, 1.0, 1.05)
        terms = -torch.sigmoid(heat * (ratio - 1)) * 4 / heat * advantages
    kl = (reference - lp).exp() - (reference - lp) - 1
    plain_kl = (kl * mask).sum().item() / mask.sum().item()
    if keys.get("importance_sampling_level") == "sequence":
        ratio = ((lp - old) * mask).sum(-1, keepdim=True).div(mask.sum(-1, keepdim=True)).exp()
        terms = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    terms = terms + keys["beta"] * kl * (ratio if keys["use_bias_correction_kl"] else 1)
    names = [sample.run_id or str(row) for row, sample in enumerate(samples)]
    rollouts = [[row for row, own in enumerate(names) if own == name] for name in set(names)]
    means = [(terms * mask)[rows].sum() / mask[rows].sum() for rows in rollouts]
    return torch.stack(means).mean(), plain_kl


@pytest.mark.parametrize("rows", [None, 1])
@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        ("grpo", {"beta": 0.2, "use_bias_correction_kl": True}),
        ("grpo", {"beta": 0.2, "use_bias_correction_kl": True} | {LEVEL: "sequence"}),
        ("sapo", {"beta": 0.1, "use_bias_correction_kl": False}),
    ],
)
def test_a_rollout_of_several_samples_counts_once(loss, keys, rows, tmp_path):
    samples = [s for s in kit.ragged() if any(s.loss_mask)]
    trainer = kit.trainer_of(kit.run_config(loss, loss_config=keys), tmp_path)
    drift(trainer.model)
    value, grads, metrics = whole_batch(trainer, kit.batch(samples, loss, **keys), rows=rows)
    model = load_model(kit.model_folder())
    drift(model)
    expected, kl = once_per_rollout(loss, keys, model, samples)
    expected.backward()
    assert value == pytest.approx(expected.item(), rel=1e-5)
    assert_equal_gradients(gradients(model), grads)
    assert metrics["kl/reference"] == pytest.approx(kl, rel=1e-4)  # not weighted by the ratio
    apart = kit.batch(kit.apart(samples), loss, **keys)
    assert whole_batch(trainer, apart)[0] != pytest.approx(value, rel=1e-3)


@pytest.mark.parametrize("loss", ["importance_sampling", "grpo"])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_mismatch_weights_do_not_depend_on_the_micro_batches(level, loss, tmp_path):
    mismatch = {"type": "mask", "level": level, "low": 0.05, "high": 0.4}
    algorithm = {"type": "grpo", "loss": loss, "mismatch": mismatch}
    trainer = kit.trainer_of(kit.run_config(algorithm=algorithm), tmp_path)
    batch = kit.batch(kit.ragged(), loss)
    value, grads, metrics = whole_batch(trainer, batch)
    part_value, part_grads, part_metrics = whole_batch(trainer, batch, rows=1)
    assert part_value == pytest.approx(value, rel=1e-5)
    assert_equal_gradients(grads, part_grads)
    assert part_metrics == pytest.approx(metrics, rel=1e-4, abs=1e-6)
    assert 0 < metrics["mismatch/clipped"] < 1
    assert metrics.get("clip_fraction", 0.0) == 0.0
    assert metrics["kl/sampler_trainer"] > 0.01


@pytest.mark.parametrize("keys", [{}, {"lora": {"r": 4}}])
def test_the_reference_is_the_initial_model_and_stays_so(keys, tmp_path):
    config = kit.run_config("dapo", loss_config={"beta": 0.1})
    trainer = kit.trainer_of(config, tmp_path, **keys)
    batch = kit.batch(kit.ragged(), "dapo", beta=0.1)
    assert whole_batch(trainer, batch)[2]["kl/reference"] == pytest.approx(0.0, abs=1e-6)
    with torch.no_grad():
        for weight in trainer.model.parameters():
            weight.add_(0.3 * weight.requires_grad)
    assert whole_batch(trainer, batch)[2]["kl/reference"] > 1e-4
