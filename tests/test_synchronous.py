"""Promise P9: at staleness 0 the pipe is a synchronous loop, number for number, on TRL itself."""

import pytest

from retrain.adapters.trl.adapter import TrlAdapter
from retrain.assembly import assemble
from retrain.batching import batch_of, make_samples
from retrain.chat import Chat
from retrain.config import parse_config
from retrain.environment import Environment
from retrain.pipeline import train
from retrain.prompts import epoch_order
from retrain.rollout import Rollouts
from retrain.sampler import SamplingParams
from retrain.types import Ticket
from tests.pipe_kit import rollouts_of, slot_share

STEPS, GROUPS, SIZE = 4, 4, 4


def config_in(folder):
    rows = [{"prompt": f"{c}=", "answer": c * 4} for c in "abcdefgh"]
    return parse_config(
        {
            "prompts": {"type": "list", "rows": rows},
            "rewards": [{"type": "slot_match"}],
            "algorithm": {"type": "grpo", "group_size": SIZE},
            "backend": {"type": "trl", "learning_rate": 5e-3},
            "sampling": {"max_tokens": 4},
            "staleness": {"target": 0},
            "train": {"total_train_steps": STEPS, "groups_per_step": GROUPS, "order": "in_order"},
            "checkpoint": {"every": 0},
            "run_dir": str(folder),
        }
    )


async def longhand(config):
    """Losses and completions of a loop without queues, slots or stages."""
    parts = assemble(config)
    losses, texts = [], []
    async with TrlAdapter(parts.options, config) as adapter:
        rollouts = Rollouts(
            adapter.sampler,
            Chat(adapter.tokenizer),
            SamplingParams(max_tokens=4),
            adapter.context_length,
            max_turns=1,
            deadlines=config.deadlines,
            seed=0,
        )
        rows = [row for epoch in range(2) for row in epoch_order(epoch, 8, 0, True)]
        for step in range(STEPS):
            groups = []
            for number in range(GROUPS * step, GROUPS * (step + 1)):
                prompt = parts.prompts.prompt(Ticket(number // 8, rows[number]))
                group = await rollouts.play(prompt, [Environment() for _ in range(SIZE)])
                for trajectory in group.trajectories:
                    trajectory.reward = slot_share(trajectory.completion, prompt.answer)
                    texts.append(trajectory.completion)
                groups.append(group)
            credit = parts.algorithm.advantages(groups)
            batch = batch_of(make_samples(groups, credit), loss="dapo", loss_config={})
            losses.append((await adapter.update(batch))["loss"])
            await adapter.publish()
    return losses, texts


@pytest.mark.slow
async def test_p9_staleness_0_is_synchronous_training_bit_for_bit(tmp_path):
    config = config_in(tmp_path / "run")
    result = await train(config)
    losses, texts = await longhand(config)
    assert [row["loss"] for row in result.history] == losses
    played = sorted(rollouts_of(tmp_path / "run"), key=lambda r: (r["ticket"], r["index"]))
    assert sorted(r["messages"][-1]["content"] for r in played) == sorted(texts)
    for row in result.history:
        assert row["clip_fraction"] == 0
        assert row["staleness/max"] == 0
        assert abs(row["ratio/max"] - 1) < 1e-4
