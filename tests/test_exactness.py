"""The tokens that each shipped config trains have the log-probs of a plain forward.

A config runs for one step at staleness 0 on the tiny model's first weights. Every sample of the
batch is then given to the model as one row, without a cache, padding or shared prefixes: a token
that was decoded and encoded again, shifted or masked wrongly has another log-prob.
"""

import pytest
import torch

from retrain.assembly import assemble
from retrain.config import load_config
from retrain.engine.losses import sequence_logprobs
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.pipeline import train
from tests.pipe_kit import ROOT, parts_with

CONFIGS = [
    path
    for path in sorted((ROOT / "configs").glob("*.yaml"))
    if "environment:" in path.read_text() and "type: trl" in path.read_text()
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


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
async def test_each_trained_token_has_the_log_prob_of_a_plain_forward(path, tmp_path, monkeypatch):
    config = load_config(path, [*ONE_STEP, f"run_dir={tmp_path / 'run'}"])
    adapter = assemble(config).open_adapter()
    batches = []
    update = adapter.update

    async def kept(batch):
        batches.append(batch)
        return await update(batch)

    monkeypatch.setattr(adapter, "update", kept)
    await train(config, parts=parts_with(config, adapter))
    model, trained = load_model(tiny_folder(tmp_path)), 0
    for sample in batches[0].samples:
        with torch.no_grad():
            again = sequence_logprobs(model, sample.token_ids, torch.device("cpu"))
        pairs = zip(sample.logprobs, again, sample.loss_mask, strict=True)
        differences = [abs(a - b) for a, b, kept in pairs if kept]
        trained += len(differences)
        assert max(differences, default=0) < 1e-4
    assert trained
