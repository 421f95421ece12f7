"""The TRL backend's keys: each has one home, and what can't be honoured is refused by name."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from pydantic import ValidationError

from retrain.adapters.base import SHARED_LOSSES, TRL_LOSSES
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.trl.keys import OWNED, PASSED, SCHEDULERS, refusal
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.plan import SHARED_KEYS, plan_loss, run_plan
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import assemble
from retrain.config import parse_config
from retrain.errors import ConfigError
from tests import trl_kit as kit


def test_every_key_of_the_installed_grpo_config_is_passed_or_has_a_home():
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    assert fields == PASSED | OWNED.keys()
    assert not PASSED & OWNED.keys()


def test_every_schedule_is_one_of_transformers():
    utils = pytest.importorskip("transformers.trainer_utils")
    assert {schedule.value for schedule in utils.SchedulerType} >= set(SCHEDULERS)


def test_the_shared_losses_have_the_keys_of_the_engine():
    losses = pytest.importorskip("retrain.engine.losses")
    assert {name: set(keys) for name, keys in SHARED_KEYS.items()} == {
        name: set(keys) for name, keys in losses.LOSS_DEFAULTS.items()
    }


def test_checking_the_options_imports_nothing_heavy():
    code = (
        "import sys; from retrain.adapters.trl.options import TrlOptions;"
        "TrlOptions(args={'optim': 'sgd'}).capabilities();"
        "sys.exit(bool({'torch', 'trl', 'transformers'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("key", "advice"),
    [
        ("num_generations", "set algorithm.group_size"),
        ("learning_rate", "set backend.learning_rate"),
        ("max_completion_length", "set sampling.max_tokens"),
        ("use_vllm", "own sampler"),
        ("report_to", "set `loggers`"),
        ("adam_beta3", "did you mean 'adam_beta2'?"),
    ],
)
def test_a_key_that_args_cannot_carry_says_where_it_is_set(key, advice):
    assert advice in (refusal(key) or "")
    with pytest.raises(ValidationError, match=key):
        TrlOptions(args={key: 1})


def test_lora_on_the_output_head_is_refused():
    with pytest.raises(ValidationError, match="TRL refuses LoRA on lm_head"):
        TrlOptions(lora={"target_modules": ["q_proj", "lm_head"]})


def test_an_unknown_schedule_names_the_known_ones():
    with pytest.raises(ValidationError, match="expected one of constant, "):
        TrlOptions(lr_scheduler="cosinus")


def test_every_loss_has_a_plan():
    for loss in TRL_LOSSES | SHARED_LOSSES:
        plan = plan_loss(loss, {}, 8)
        assert plan.native == (loss in TRL_LOSSES or loss == "cispo")
        assert plan.reference == (loss == "dpo")
    assert TrlOptions().capabilities().losses == TRL_LOSSES | SHARED_LOSSES


def test_cispo_is_trls_own_where_it_means_the_same():
    assert plan_loss("cispo", {}, 8).args == {"loss_type": "cispo", "epsilon_high": 5.0}
    assert plan_loss("cispo", {"epsilon_high": 0.2}, 8).args["epsilon_high"] == 1.2
    assert not plan_loss("cispo", {"epsilon": 0.2}, 8).native


@pytest.mark.parametrize(
    ("loss", "keys", "message"),
    [
        ("sapo", {"epsilon": 0.1}, r"loss_config.epsilon: the loss 'sapo' does not read it"),
        ("dapo", {"epsilon_hihg": 0.1}, "did you mean 'epsilon_high'"),
        ("dappo", {}, "did you mean 'dapo'"),
        ("cross_entropy", {"beta": 0.1}, "no keys at all"),
        ("luspo", {"importance_sampling_level": "token"}, "its ratio is the sequence's"),
        ("dapo", {"top_entropy_quantile": 0.2}, "does not read it"),
    ],
)
def test_a_loss_refuses_what_it_does_not_read(loss, keys, message):
    config = kit.run_config(loss, loss_config=keys)
    with pytest.raises(ConfigError, match=message) as caught:
        run_plan(config)
    assert len(caught.value.problems) == 1
    assert TrlOptions().problems(config) == ([] if loss == "dappo" else [*caught.value.problems])


def test_the_runs_loss_is_the_algorithms_own_where_the_config_names_none():
    config = kit.run_config(None)
    assert run_plan(config).name == "dapo"


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
        (
            "mine.py:two",
            {},
            "algorithm.loss: mine.py:two is two(logprobs, advantages), which can't",
        ),
        (
            "mine.py:keyed",
            {},
            "four tensors: write it as (logprobs, old_logprobs, advantages, mask)",
        ),
        ("mine.py:Class", {}, "algorithm.loss: Class in "),
        ("mine.py:right", {"beta": 1}, "algorithm.loss_config: got beta, but a loss of your own"),
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
    assert "the trl backend has no loss 'x'" in problem
