"""The tokens that each shipped config, and each format of tool calls, trains have the log-probs of
a plain forward.

A config runs for one step at staleness 0 on the tiny model's first weights. Every sample of the
batch is then given to the model as one row, without a cache, padding or shared prefixes: a token
that was decoded and encoded again, shifted or masked wrongly has another log-prob.
"""

import pytest
import torch

from retrain import Environment, StepResult, ToolSpec
from retrain.assembly import Parts, assemble
from retrain.config import load_config, parse_config
from retrain.engine.losses import sequence_logprobs
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.pipeline import train
from tests import formats_kit
from tests.pipe_kit import ROOT, parts_with

CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "environment:" in path.read_text()
    and "type: trl" in path.read_text()
    and path.stem != "agent"  # test_calls_properties.py does the same for agents of any kind
]
ONE_STEP = [
    "model=tiny",
    "staleness.target=0",
    "algorithm.group_size=2",
    "train.groups_per_step=3",
    "train.total_train_steps=1",
    "train.stop_after_flat_steps=2",
    "checkpoint.every=0",
    "eval=null",
]


class Talk(Environment):
    """Three turns with a tool."""

    tools = (ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {"type": "integer"}}}),)

    async def reset(self, prompt):
        self.left = 3
        return prompt.messages

    async def step(self, action):
        self.left -= 1
        return StepResult([{"role": "user", "content": "and?"}], 0.0, not self.left, False, {})


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
async def test_each_trained_token_has_the_log_prob_of_a_plain_forward(path, tmp_path, monkeypatch):
    await check(
        load_config(path, [*ONE_STEP, f"run_dir={tmp_path / 'run'}"]), tmp_path, monkeypatch
    )


@pytest.mark.parametrize("form", sorted(formats_kit.SHORT))
async def test_so_it_has_in_each_format_of_tool_calls(form, tmp_path, monkeypatch):
    (tmp_path / "chat.jinja").write_text(formats_kit.short(form))
    keys = {
        "prompts": [{"prompt": f"{letter}=", "answer": letter} for letter in "abc"],
        "environment": "tests.test_exactness:Talk",
        "rewards": "slot_match",
        "algorithm": {"group_size": 2},
        "chat": {"template": "chat.jinja", "tools": form},
        "sampling": {"max_tokens": 8},
        "staleness": {"target": 0},
        "train": {"total_train_steps": 1, "groups_per_step": 3},
        "checkpoint": {"every": 0},
        "run_dir": str(tmp_path / "run"),
    }
    trained = await check(parse_config(keys, tmp_path), tmp_path, monkeypatch)
    assert trained > 3 * 3 * 2


async def check(config, folder, monkeypatch) -> int:
    """Compare the log-probs of one step; returns how many."""
    adapter = assemble(config).open_adapter()
    batches = []
    update = adapter.update

    async def kept(batch):
        batches.append(batch)
        return await update(batch)

    monkeypatch.setattr(adapter, "update", kept)
    # an untrained model earns nothing, and its batch would be skipped
    monkeypatch.setattr(Parts, "skips_flat", False)
    await train(config, parts=parts_with(config, adapter))
    model, trained = load_model(tiny_folder(folder)), 0
    for sample in batches[0].samples:
        with torch.no_grad():
            again = sequence_logprobs(model, sample.token_ids, torch.device("cpu"))
        pairs = zip(sample.logprobs, again, sample.loss_mask, strict=True)
        differences = [abs(a - b) for a, b, kept in pairs if kept]
        trained += len(differences)
        assert max(differences, default=0) < 1e-4
    assert trained
    return trained
