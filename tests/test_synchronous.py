"""Guarantee P9: at staleness 0 the pipe is the loop of docs/one_step.py, number for number."""

from pathlib import Path

import pytest

from benchmarks.mock_engine import mock_config
from docs.one_step import learn
from retrain.adapters.trl.adapter import TrlAdapter
from retrain.assembly import assemble
from retrain.config import parse_config
from retrain.pipeline import train
from tests.pipe_kit import kept_adapter, parts_with

STEPS = 4


def config_in(folder):
    rows = [{"prompt": f"{c}=", "answer": c * 4} for c in "abcdefgh"]
    return parse_config(
        {
            "prompts": {"type": "list", "rows": rows},
            "rewards": ["tests.chaos.kills:even_letters"],  # each step has a gradient
            "algorithm": {"type": "grpo", "group_size": 4},
            "backend": {"type": "trl", "learning_rate": 5e-3},
            "sampling": {"max_tokens": 4},
            "staleness": {"target": 0},
            "train": {"total_train_steps": STEPS, "groups_per_step": 4, "order": "in_order"},
            "checkpoint": {"every": 0},
            "run_dir": str(folder),
        }
    )


@pytest.mark.slow
async def test_p9_staleness_0_is_synchronous_training_bit_for_bit(tmp_path, monkeypatch):
    batches = []
    update = TrlAdapter.update

    async def kept(self, batch):
        batches.append(batch)
        return await update(self, batch)

    monkeypatch.setattr(TrlAdapter, "update", kept)
    config = config_in(tmp_path / "run")
    result = await train(config)
    parts = assemble(config)
    history = await learn(parts)
    trained = [row for row in result.history if row["tokens/trained"]]
    assert [row["loss"] for row in trained] == [row["loss"] for row in history]
    assert [row["grad_norm"] for row in trained] == [row["grad_norm"] for row in history]
    number = len(trained)
    assert len(batches) == 2 * number > 2
    assert batches[:number] == batches[number:], "ids, log-probs, advantages, versions"
    for row in trained:
        assert row["clip_fraction"] == 0
        assert row["staleness/max"] == 0
        assert abs(row["ratio/max"] - 1) < 1e-4


@pytest.mark.parametrize("order", ["ready", "in_order"])
async def test_staleness_0_equals_the_loop_whatever_order_groups_finish_in(tmp_path, order):
    config = mock_config(
        tmp_path,
        staleness={"target": 0},
        train={"total_train_steps": 5, "order": order},
        backend={"type": "benchmarks.mock_engine:MockOptions", "latency": 0.002, "sigma": 1.0},
    )
    piped, looped = kept_adapter(config, 5), kept_adapter(config, 5)
    result = await train(config, parts=parts_with(config, piped))
    parts = parts_with(config, looped)
    await learn(parts)
    assert len(piped.batches) == 5
    assert piped.batches == looped.batches
    assert [row["staleness/max"] for row in result.history] == [0] * 5


def test_the_design_page_shows_the_loop():
    docs = Path(__file__).parents[1] / "docs"
    shown = (docs / "design.md").read_text(encoding="utf-8")
    assert f"```python\n# one_step.py\n{(docs / 'one_step.py').read_text()}```" in shown
