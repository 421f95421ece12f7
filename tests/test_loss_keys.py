"""The keys of losses and sampling: each is read on every backend, or rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trl import GRPOConfig

from retrain.adapters.trl.plan import plan_loss
from retrain.assembly import assemble
from retrain.config import parse_config
from retrain.errors import ConfigError
from retrain.losses import LOSSES, Loss, check_keys, shared_name
from retrain.types import Batch, Denominators, Sample
from tests.knob_kit import BACKENDS, BASE, HERE, OPTIONS, merged


@pytest.fixture(autouse=True)
def _no_report(monkeypatch):
    """No knob is for the page at a run's end, which would take a fifth of the time."""
    monkeypatch.setattr("retrain.pipeline.recorder.write_report", lambda folder: folder)


TRL_VALUES: dict[str, Any] = {
    **{"beta": 0.7, "epsilon": 0.05, "epsilon_high": 0.06, "delta": 1.5, "entropy_coef": 0.1},
    **{"use_adaptive_entropy": True, "use_bias_correction_kl": True},
    **{"entropy_coef_min": 0.01, "entropy_coef_max": 0.2, "entropy_coef_delta": 0.01},
    **{"entropy_target": 0.3, "off_policy_mask_threshold": 0.1, "max_completion_length": 5},
    **{"importance_sampling_level": "sequence", "sapo_temperature_pos": 2.0},
    **{"sapo_temperature_neg": 2.0, "vespo_k_pos": 1.0, "vespo_lambda_pos": 1.0},
    **{"vespo_k_neg": 1.0, "vespo_lambda_neg": 1.0},
}
SHARED_VALUES = {"epsilon": 0.05, "epsilon_high": 0.06, "beta": 0.7}
TRL_CASES = [(loss, key) for loss, row in LOSSES.items() if not row.formula for key in row.keys]
SHARED_CASES = [
    (backend, loss)
    for backend in OPTIONS
    for loss in sorted(OPTIONS[backend]().capabilities().losses)
    if LOSSES[shared_name(loss)].keys and (backend != "trl" or LOSSES[loss].formula)
]


@pytest.mark.parametrize(("loss", "key"), TRL_CASES)
def test_every_key_of_trls_losses_reaches_its_arguments(loss, key):
    plain, changed = plan_loss(loss, {}, 3), {key: TRL_VALUES[key]}
    if (loss, key) == ("luspo", "importance_sampling_level"):  # it has one value there
        changed = {key: "token"}
        with pytest.raises(ConfigError, match="luspo"):
            plan_loss(loss, changed, 3)
    else:
        assert plan_loss(loss, changed, 3).args != plain.args
    settings = GRPOConfig.__dataclass_fields__
    assert key in settings


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "loss"), SHARED_CASES)
async def test_every_key_of_every_loss(backend, loss, tmp_path):
    plain = await trained(backend, loss, {}, tmp_path / "plain")
    for key in LOSSES[shared_name(loss)].keys:
        changed = await trained(backend, loss, {key: SHARED_VALUES[key]}, tmp_path / key)
        assert changed != plain, f"{key} of {loss} changed nothing"


def quadratic(ops, keys, lp, old, r, a):
    """-(A (r - 1) - scale/2 (log r)^2)."""
    gap = lp - old
    return -(a * (r - 1) - keys["scale"] / 2 * (gap * gap)), -(a * r - keys["scale"] * gap), None


async def test_a_new_row_of_the_table_trains_on_every_backend(monkeypatch, tmp_path):
    monkeypatch.setitem(LOSSES, "quadratic", Loss(formula=quadratic, keys={"scale": 1.0}))
    first, second = {}, {}
    for backend in OPTIONS:
        folder = tmp_path / backend
        metrics = await trained(backend, "quadratic", {"scale": 0.5}, folder)
        first[backend], second[backend] = metrics[0]["loss"], metrics[1]["loss"]
        with pytest.raises(ConfigError, match="scales"):
            await trained(backend, "quadratic", {"scales": 0.5}, folder)
    assert first == dict.fromkeys(OPTIONS, pytest.approx(first["trl"], rel=1e-4))
    assert all(second[backend] < first[backend] for backend in OPTIONS)


def test_adamw_has_the_same_defaults_on_every_backend():
    """What still differs is in the table of docs/configuration.md, which is made from the code."""
    adam = ("beta1", "beta2", "eps", "weight_decay", "max_grad_norm", "warmup_steps")
    found = [[getattr(options(), key) for key in adam] for options in OPTIONS.values()]
    assert found == [[0.9, 0.999, 1e-8, 0.0, 1.0, 0]] * 3


def test_a_key_of_another_backend_says_whose_it_is() -> None:
    for backend, key, value, owners in (
        ("tinker", "training_mode", "full_ft", "weaver"),
        ("weaver", "micro_batch_rows", 2, "trl"),
        ("trl", "context_length", 6, "tinker and weaver"),
    ):
        section = {**BACKENDS[backend], key: value}
        with pytest.raises(ConfigError) as caught:
            assemble(parse_config(merged(BASE, {"backend": section}), HERE))
        message = f"backend.{key}: not a key of {backend}, only of {owners}"
        assert message in str(caught.value)


async def trained(backend: str, loss: str, keys: dict[str, float], folder: Path) -> Any:
    """The metrics of two steps on a pair of rows far off the policy."""
    settings = {"algorithm": {"loss": loss, "loss_config": keys}, "run_dir": str(folder)}
    if loss == "dpo":
        settings |= {"algorithm": {"type": "dpo", **keys}, "rewards": [], "loggers": []}
        settings |= {"environment": "single_turn", "sampling": {}, "prompts": PAIRS}
    run = merged(BASE, {"backend": BACKENDS[backend]})
    run = {**run, **settings} if loss == "dpo" else merged(run, settings)
    parts = assemble(parse_config(run, HERE))
    async with parts.open_adapter() as adapter:
        batch = Batch(PAIR, loss, parts.loss_config, Denominators(8, 2))
        metrics = [await adapter.update(batch) for _ in range(2)]
    return [{k: round(v, 6) for k, v in one.items() if "time" not in k} for one in metrics]


PAIRS = [{"prompt": "a=", "chosen": "aa", "rejected": "bb"}]
PAIR = [
    Sample(
        token_ids=[70, 71, 72 + row, 73, 74, 75],
        loss_mask=[0, 0, 1, 1, 1, 1],
        logprobs=[0.0, 0.0, -2.0, -8.0, -4.6, -5.5],
        advantages=[0.0, 0.0, *([credit] * 4)],
        versions=[-1, -1, 0, 0, 0, 0],
        streams={"pair_ids": [0.0] * 6},
    )
    for row, credit in enumerate((0.5, -0.25))
]


@pytest.mark.parametrize("backend", OPTIONS)
def test_a_key_that_a_loss_does_not_read_is_refused(backend):
    able = OPTIONS[backend]().capabilities()
    for loss in able.losses:
        name = loss if backend == "trl" else shared_name(loss)
        first, *others = sorted({*TRL_VALUES, *SHARED_VALUES} - {*LOSSES[name].keys})
        for key in others:
            with pytest.raises(ConfigError, match=key):
                check_keys(name, {key: TRL_VALUES[key]})
        algorithm = {"loss": loss, "loss_config": {first: TRL_VALUES[first]}}
        run = merged(BASE, {"backend": BACKENDS[backend], "algorithm": algorithm})
        with pytest.raises(ConfigError, match=first):
            assemble(parse_config(run, HERE))


@pytest.mark.parametrize(
    ("backend", "sampling", "warned"),
    [
        ("tinker", {"temperature": 0.7}, True),
        ("weaver", {"top_p": 0.9}, True),
        ("weaver", {"top_k": 5}, True),
        ("trl", {"temperature": 0.7}, False),  # TRL divides its own logits by it, too
        ("trl", {"top_p": 0.9}, True),
        ("tinker", {}, False),
    ],
)
def test_a_shaped_distribution_under_an_importance_weighted_loss_is_warned_of(
    backend, sampling, warned
):
    run = merged(BASE, {"backend": BACKENDS[backend], "sampling": sampling})
    warnings = assemble(parse_config(run, HERE)).warnings
    assert any("the ratio is not 1" in warning for warning in warnings) is warned


@pytest.mark.parametrize("backend", OPTIONS)
def test_unclipped_importance_sampling_on_old_samples_is_refused_unless_forced(backend):
    algorithm: dict[str, Any] = {"loss": "importance_sampling"}
    old = {"backend": BACKENDS[backend], "staleness": {"target": 2}, "algorithm": algorithm}
    with pytest.raises(ConfigError, match="ppo or cispo"):
        assemble(parse_config(merged(BASE, old), HERE))
    algorithm["loss_config"] = {"force": True}
    assert assemble(parse_config(merged(BASE, old), HERE)).loss_config == {}
    algorithm |= {"loss": "ppo", "loss_config": {}}
    assert assemble(parse_config(merged(BASE, old), HERE)).loss == "ppo"
