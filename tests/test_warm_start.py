"""The shipped runs on examples, as a user starts them: they learn, and one goes on from another."""

from pathlib import Path

import pytest

from retrain.cli.run import main
from retrain.observe.run_dir import read_metrics

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.usefixtures("own_folder")


def history(name: str) -> list[dict]:
    return read_metrics(Path("runs", name))


@pytest.mark.slow(10)
def test_reinforcement_goes_on_from_the_demonstrations(capsys):
    grpo = str(ROOT / "configs" / "reverse_grpo.yaml")
    assert main([grpo]) == 2
    assert "runs/reverse_sft/final" in capsys.readouterr().err
    assert main([str(ROOT / "configs" / "reverse_sft.yaml")]) == 0
    losses = [row["loss"] for row in history("reverse_sft")]
    assert losses[0] > 4.0
    assert losses[-1] < 0.6
    assert main([grpo, "train.total_train_steps=60"]) == 0
    rewards = [row["reward/mean"] for row in history("reverse_grpo")]
    tenth = len(rewards) // 10
    assert 0.1 < sum(rewards[:tenth]) / tenth < 0.6
    assert sum(rewards[-tenth:]) / tenth > 0.65  # 0.8


@pytest.mark.slow(10)
def test_demonstrations_teach_to_call_a_tool_and_reinforcement_goes_on():
    fewer = "train.groups_per_step=16"
    assert main([str(ROOT / "configs" / "tools_sft.yaml"), fewer]) == 0
    fewer = "train.total_train_steps=4"
    assert main([str(ROOT / "configs" / "tools.yaml"), fewer]) == 0
    rows = history("tools")
    assert all(0.05 < row["reward/mean"] < 0.5 for row in rows)  # something is left to learn
    assert all(row["grad_norm"] > 0 for row in rows)
    scored, turns = rows[-1]["rollouts/ok"], rows[-1]["rollouts/turns"]
    assert turns > 1.9 * scored, "a call and an answer each, not products by heart"


@pytest.mark.slow
def test_preferences_are_learnt_on_held_out_pairs_too(capsys):
    assert main([str(ROOT / "configs" / "dpo.yaml"), "train.total_train_steps=60"]) == 0
    rows = history("dpo")
    assert rows[0]["loss"] == pytest.approx(0.6931472, abs=1e-6)
    assert rows[-1]["loss"] < 0.45  # 0.3
    assert "dpo/accuracy" in capsys.readouterr().out


@pytest.mark.slow
def test_demonstrations_are_learnt_over_tinkers_protocol():
    assert main([str(ROOT / "configs" / "sft_tinker.yaml"), "train.total_train_steps=65"]) == 0
    losses = [row["loss"] for row in history("sft_tinker")]
    assert losses[0] > 4.0
    assert losses[-1] < 0.5  # 0.14 +- 0.06, three seeds
