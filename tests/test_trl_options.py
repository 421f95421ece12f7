"""The TRL backend's keys: each has one home, and what can't be honoured is refused by name."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import get_args

import pytest
from pydantic import ValidationError

from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.trl import keys as trl_keys
from retrain.adapters.trl.keys import REFUSED, installed_keys, refusal
from retrain.adapters.trl.options import Schedule, TrlOptions
from retrain.adapters.trl.plan import plan_loss, run_plan
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import assemble
from retrain.cli.run import main
from retrain.config import parse_config
from retrain.engine.available import cuda_devices
from retrain.errors import ConfigError
from retrain.losses import LOSSES
from retrain.pipeline.checkpoint import changed_run
from tests import trl_kit as kit

PASSED = {
    *("optim", "optim_args", "optim_target_modules"),
    *("activation_checkpointing_kwargs", "cast_lm_head_to_fp32", "disable_dropout"),
    *("ddp_bucket_cap_mb", "ddp_find_unused_parameters"),
    *("full_determinism", "lr_scheduler_kwargs", "router_aux_loss_coef", "tf32"),
    *("torch_compile", "torch_compile_backend", "torch_compile_mode", "torch_empty_cache_steps"),
}
"""The keys of TRL 1.16 that change how TRL updates and nothing that the run decides."""
NEW_NAMES = "activation_checkpointing" in installed_keys()
"""Whether transformers has the names of 5.23 for the options of activation checkpointing."""


def test_the_keys_of_the_installed_grpo_config_are_read_from_its_sources():
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert installed_keys() == fields
    passed = {field for field in fields if refusal(field) is None}
    expected = PASSED if NEW_NAMES else PASSED - {"activation_checkpointing_kwargs"}
    assert passed >= expected
    if trl.__version__.startswith("1.16."):
        assert passed == expected


def test_every_refused_pattern_is_of_a_key_of_the_installed_grpo_config():
    pytest.importorskip("trl")
    patterns = [pattern for patterns in REFUSED for pattern in patterns.split()]
    unknown = {p for p in patterns if not fnmatch.filter(installed_keys(), p)}
    assert unknown == (set() if NEW_NAMES else {"activation_checkpointing"})


def test_keys_are_checked_at_the_start_where_trl_is_built_differently(monkeypatch, tmp_path):
    """A file of its classes is elsewhere: only GRPOConfig itself knows its keys."""
    monkeypatch.setattr(trl_keys, "SOURCES", [*trl_keys.SOURCES[:2], ("trl", "gone.py")])
    monkeypatch.setattr(trl_keys, "installed_keys", trl_keys.installed_keys.__wrapped__)
    assert refusal("adam_beta3") is None
    assert "set `loggers`" in (refusal("report_to") or "")
    config = kit.run_config("dapo")
    with pytest.raises(ConfigError, match="adam_beta3"):
        kit.trainer_of(config, tmp_path, args={"adam_beta3": 0.5})


def test_every_schedule_is_one_of_transformers():
    utils = pytest.importorskip("transformers.trainer_utils")
    assert {schedule.value for schedule in utils.SchedulerType} >= set(get_args(Schedule))


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("num_generations", "set algorithm.group_size"),
        ("learning_rate", "set backend.learning_rate"),
        ("max_completion_length", "set sampling.max_tokens"),
        ("use_vllm", "own sampler"),
        ("report_to", "set `loggers`"),
        ("adam_beta2", "set backend.beta2"),
        ("vllm_importance_sampling_mode", "set algorithm.mismatch"),
        ("optin", "did you mean 'optim'?"),
    ],
)
def test_a_key_that_args_cannot_carry_says_where_it_is_set(key, advice):
    assert advice in (refusal(key) or "")
    with pytest.raises(ValidationError, match=key):
        TrlOptions(args={key: 1})


@pytest.mark.parametrize(
    ("found", "given", "problem"),
    [
        (0, {"device": "cuda"}, "backend.device: got cuda, but torch finds no CUDA device; set it"),
        (1, {"processes": 2}, "backend.processes: got 2 on this machine, but torch finds 1 CUDA"),
        (1, {"device": "cuda"}, ""),
        (2, {"device": "cuda", "processes": 2}, ""),
        (1, {"device": "cpu", "processes": 2}, ""),
        (0, {"processes": 2}, ""),
        (0, {"sharding": "full"}, "backend.sharding: got full"),
        (0, {"sharding": "full", "processes": 2, "device": "cpu"}, "backend.sharding: got full"),
    ],
)
def test_devices_are_counted_before_a_model_loads(found, given, problem, monkeypatch):
    for place in ("engine.available", "adapters.trl.options"):
        monkeypatch.setattr(f"retrain.{place}.cuda_devices", lambda: found)
    problems = TrlOptions(**given).problems(kit.run_config("dapo"))
    assert len(problems) == bool(problem)
    assert all(found.startswith(problem) for found in problems)


@pytest.mark.skipif(cuda_devices() > 0, reason="needs a machine without CUDA")
def test_a_dry_run_finds_that_there_is_no_cuda_device(capsys):
    assert main(["quickstart", "--dry-run", "backend.device=cuda"]) == 2
    assert "backend.device: got cuda" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({}, {"sharding": "none"}, ""),
        ({"sharding": "full", "processes": 4}, {"sharding": "full", "processes": 2}, ""),
        ({"sharding": "full", "processes": 4}, {}, ""),
        ({"sharding": "none"}, {"sharding": "full"}, "backend.sharding: was 'none', is 'full'."),
        ({}, {"sharding": "full"}, "changed: backend.sharding: was 'none', is 'full'. Undo"),
    ],
)
def test_a_resume_with_another_sharding_is_found_before_a_model_loads(before, now, said):
    old, new = (
        {"prompts": {"type": "list"}, "backend": {"type": "trl", **b}} for b in (before, now)
    )
    problem = changed_run(parse_config(old).model_dump(mode="json"), parse_config(new))
    assert said in problem if said else problem == ""


def test_lora_on_the_output_head_is_refused():
    with pytest.raises(ValidationError, match="lm_head"):
        TrlOptions(lora={"target_modules": ["q_proj", "lm_head"]})


def test_every_loss_has_a_plan():
    for loss, row in LOSSES.items():
        plan = plan_loss(loss, {}, 8)
        assert plan.native == (row.trl_mean is not None)
        assert plan.native == (row.formula is None or loss == "cispo")
        assert plan.reference == (loss == "dpo")
    assert TrlOptions().capabilities().losses == LOSSES.keys()


def test_cispo_is_trls_own_where_it_means_the_same():
    assert plan_loss("cispo", {}, 8).args == {"loss_type": "cispo", "epsilon_high": 5.0}
    assert plan_loss("cispo", {"epsilon_high": 0.2}, 8).args["epsilon_high"] == 1.2
    assert not plan_loss("cispo", {"epsilon": 0.2}, 8).native


@pytest.mark.parametrize(
    ("loss", "keys", "message"),
    [
        ("sapo", {"epsilon": 0.1}, r"loss_config.epsilon: the loss 'sapo' has no such key"),
        ("dapo", {"epsilon_hihg": 0.1}, "did you mean 'epsilon_high'"),
        ("dappo", {}, "did you mean 'dapo'"),
        ("cross_entropy", {"beta": 0.1}, "it takes no keys"),
        ("luspo", {"importance_sampling_level": "token"}, "luspo always uses the sequence's ratio"),
        ("dapo", {"top_entropy_quantile": 0.2}, "has no such key"),
    ],
)
def test_a_loss_refuses_what_it_does_not_read(loss, keys, message):
    config = kit.run_config(loss, loss_config=keys)
    with pytest.raises(ConfigError, match=message) as caught:
        run_plan(config)
    assert len(caught.value.problems) == 1
    assert TrlOptions().problems(config) == ([] if loss == "dappo" else [*caught.value.problems])


def test_a_loss_of_ones_own_is_found_by_its_path(tmp_path):
    (tmp_path / "mine.py").write_text(
        "def half(logprobs, old_logprobs, advantages, mask):\n"
        "    return -(logprobs * advantages * mask).sum() / 2\n"
    )
    config = kit.run_config("mine.py:half", base_dir=tmp_path)
    assert callable(run_plan(config).custom)
    assert TrlOptions().problems(config) == []
    run = {"prompts": ["a"], "rewards": "exact_match", "algorithm": {"loss": "mine.py:half"}}
    assert assemble(parse_config(run, tmp_path)).normalisation == "token"
    run["algorithm"]["normalisation"] = "batch"
    assert assemble(parse_config(run, tmp_path)).normalisation == "batch"


@pytest.mark.parametrize("options", [TrlOptions(), TinkerOptions(), WeaverOptions()])
@pytest.mark.parametrize(
    ("loss", "keys", "message"),
    [
        ("mine.py:whole", {}, "algorithm.loss: there is no whole in "),
        ("mine.py:two", {}, "algorithm.loss: mine.py:two "),
        ("mine.py:keyed", {}, "define it as (logprobs, old_logprobs, advantages, mask)"),
        ("mine.py:Class", {}, "algorithm.loss: Class in "),
        ("mine.py:right", {"beta": 1}, "algorithm.loss_config: got beta, but a custom loss"),
    ],
)
def test_a_loss_of_ones_own_that_cannot_run_is_told(options, loss, keys, message, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def two(logprobs, advantages): ...\n"
        "def keyed(logprobs, old, advantages, mask, *, scale): ...\n"
        "def right(logprobs, old, advantages, mask, scale=1.0): ...\n"
        "class Class: ...\n"
    )
    [problem] = options.problems(kit.run_config(loss, loss_config=keys, base_dir=tmp_path))
    assert message in problem


def test_a_loss_that_isnt_one_is_told_once():
    with pytest.raises(ConfigError) as caught:
        assemble(
            parse_config({"prompts": ["a"], "rewards": "exact_match", "algorithm": {"loss": "x"}})
        )
    (problem,) = caught.value.problems
    assert "the trl backend does not support the loss 'x'" in problem
