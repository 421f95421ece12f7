"""SFT through the one pipe: the loss is plain cross-entropy, whatever the backend."""

import pytest
import torch
from backends_kit import FULL, LORA, histories, run_of, whole_and_resumed
from pipe_kit import events
from torch.nn.functional import cross_entropy

from retrain.assembly import assemble
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.errors import ConfigError, NoSignalError
from retrain.observe.run_dir import read_metrics
from retrain.pipeline import train

ROWS = [
    {"prompt": "abc=", "answer": "cba"},
    {"prompt": "d=", "answer": "dddddd"},
    {"messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hi again"},
        {"role": "assistant", "content": "Ha"},
    ]},
]  # fmt: skip
SFT = {
    "prompts": {"type": "list", "rows": ROWS},
    "algorithm": {"type": "sft"},
    "train": {"total_train_steps": 2, "groups_per_step": 3, "order": "in_order"},
}


def plain_loss(rows) -> float:
    """Mean over the assistant's tokens, ends of turns included, by transformers and torch alone."""
    model, tokenizer = load_model(tiny_folder()), tiny_tokenizer()
    total, count = 0.0, 0
    for row in rows:
        messages = row.get("messages") or [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["answer"]},
        ]
        ids = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False))
        speaks, labels = False, []
        for token in ids:
            labels.append(token if speaks else -100)
            mark = tokenizer.decode([token])
            speaks = mark == "<|assistant|>" or (speaks and mark != "<|end|>")
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, :-1]
        total += cross_entropy(logits, torch.tensor(labels[1:]), reduction="sum").item()
        count += sum(label != -100 for label in labels)
    return total / count


@pytest.mark.parametrize("backend", [FULL["trl"], LORA["tinker"], FULL["weaver"]],
                         ids=lambda b: b["type"])  # fmt: skip
async def test_the_first_loss_is_the_plain_cross_entropy_of_the_assistants_tokens(
    tmp_path, backend
):
    result = await train(run_of(tmp_path, backend, **SFT))
    assert result.history[0]["loss"] == pytest.approx(plain_loss(ROWS), abs=1e-4)
    assert result.history[0]["tokens/trained"] == 4 + 7 + 3 + 3
    assert result.history[1]["loss"] < result.history[0]["loss"]


@pytest.mark.parametrize("backends", [FULL, LORA], ids=["full", "lora"])
async def test_later_steps_agree_between_backends_that_tune_the_same_weights(tmp_path, backends):
    found = await histories(tmp_path, backends, SFT)
    one, other = ([row["loss"] for row in rows] for rows in found)
    assert one == pytest.approx(other, abs=1e-4)


async def test_micro_batches_of_any_size_give_one_and_the_same_step(tmp_path):
    losses = []
    for rows in (None, 1, 2):
        backend = {**FULL["trl"], "micro_batch_rows": rows}
        result = await train(run_of(tmp_path / str(rows), backend, **SFT))
        losses.append([row["loss"] for row in result.history])
    assert losses[1] == pytest.approx(losses[0], abs=1e-6)
    assert losses[2] == pytest.approx(losses[0], abs=1e-6)


async def test_a_step_speaks_of_no_reward_and_of_no_sampler(tmp_path):
    await train(run_of(tmp_path, FULL["trl"], **SFT))
    [first, _] = read_metrics(tmp_path)
    foreign = ("reward", "kl/", "ratio", "entropy", "staleness", "groups/zero", "clip")
    assert not [key for key in first if key.startswith(foreign)]
    assert first["rollouts/ok"] == 3
    assert "nonfinite" not in first
    assert not events(tmp_path, "rollout")
    assert not events(tmp_path, "publish"), "nothing is sampled, so nothing need be served"
    assert len(events(tmp_path, "example")) == 6
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


async def test_an_evaluation_is_the_held_out_loss_and_chooses_the_best_checkpoint(tmp_path):
    held_out = {"prompts": {"type": "list", "rows": ROWS[:1]}, "every": 1}
    result = await train(run_of(tmp_path, LORA["tinker"], **SFT, eval=held_out))
    found = events(tmp_path, "eval")
    assert [event["eval/tokens"] for event in found] == [4, 4, 4]
    losses = [event["eval/loss"] for event in found]
    assert losses[2] < losses[1] < losses[0] == pytest.approx(plain_loss(ROWS[:1]))
    assert [event["eval/rows/ok"] for event in found] == [1, 1, 1]
    assert result.best_checkpoint_path == tmp_path / "checkpoints" / "step_2"


async def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    run = {**SFT, "train": {"groups_per_step": 2, "order": "in_order"}}
    found = await whole_and_resumed(tmp_path, FULL["trl"], run, stop=2, steps=4)
    whole, parts = ([row["loss"] for row in rows] for rows in found)
    assert parts == whole


async def test_rows_over_the_limit_are_left_out_and_counted(tmp_path):
    sections = {**SFT, "algorithm": {"type": "sft", "max_length": 10}}
    sections["train"] = {"total_train_steps": 2, "groups_per_step": 1}
    await train(run_of(tmp_path, FULL["trl"], **sections))
    counts = [row["groups/dropped_failed"] for row in read_metrics(tmp_path)]
    assert sum(counts) >= 1
    assert all(event["cause"] == "failed" for event in events(tmp_path, "dropped"))


async def test_a_run_whose_rows_are_all_too_long_ends_with_the_cause(tmp_path):
    sections = {**SFT, "algorithm": {"type": "sft", "max_length": 3}}
    with pytest.raises(NoSignalError, match=r"row \d \(from 0\): it has \d+ tokens"):
        await train(run_of(tmp_path, FULL["trl"], **sections))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"type": "echo"}}, "environment"),
        ({"rewards": [{"type": "exact_match"}]}, "rewards: exact_match"),
        ({"sampling": {"temperature": 0.5}}, "sampling"),
        ({"algorithm": {"type": "sft", "group_size": 4}}, "algorithm.group_size: 4"),
        ({"algorithm": {"type": "sft", "loss": "ppo"}}, "algorithm.loss: got 'ppo'"),
        ({"algorithm": {"type": "sft", "kl_penalty": 0.1}}, "sft samples no tokens to penalise"),
        ({"prompts": {"type": "list", "rows": ["Hi"]}}, "prompts"),
        ({"eval": {"prompts": {"type": "list", "rows": ["Hi"]}}}, "eval.prompts"),
    ],
)  # fmt: skip
def test_what_has_no_meaning_beside_sft_is_refused_before_a_model_loads(tmp_path, changes, message):
    with pytest.raises(ConfigError) as caught:
        assemble(run_of(tmp_path, FULL["trl"], **{**SFT, **changes}))
    assert message in str(caught.value)
