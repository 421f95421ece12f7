"""A batch without any advantage: no forward and backward, no publish, and the step counts."""

import logging
from dataclasses import replace

import pytest

from benchmarks.mock_engine import mock_config
from retrain.assembly import Learner
from retrain.errors import RunError
from retrain.losses import LOSSES, vanishes
from retrain.observe.run_dir import RunDirectory, read_events, surviving
from retrain.pipeline import train
from retrain.scoring import reward
from tests.backends_kit import FULL, LORA, whole_and_resumed
from tests.pipe_kit import events, kept_adapter, parts_with

FLAT = "b"
"""The prompts that begin with it have equal rewards."""
ROWS = [{"prompt": f"{c}=", "answer": c} for c in "abcb"]
RUN = {
    "prompts": {"type": "list", "rows": ROWS},
    "rewards": [{"type": "tests.test_skipped_steps:varied"}],
    "algorithm": {"type": "grpo", "group_size": 4},
    "sampling": {"max_tokens": 3},
    "staleness": {"target": 0},
    "train": {"groups_per_step": 1, "order": "in_order", "shuffle": False},
    "checkpoint": {"every": 1},
}


@reward
def varied(completion: str, answer: str) -> float:
    """Different for each completion, but for the flat prompts."""
    return 0.0 if answer == FLAT else sum(map(ord, completion)) % 97 / 97


def test_the_table_says_which_losses_vanish():
    assert not vanishes("dro", {"beta": 0.05}), "it has a quadratic term"
    assert not vanishes("dpo", {})
    assert not vanishes("module:mine", {})
    assert not vanishes("a_backends_own", {})
    assert {name for name in LOSSES if not vanishes(name, {})} == {"dro", "dpo"}
    assert vanishes("grpo", {"beta": 0.0, "epsilon": 0.2})
    for term in ({"beta": 0.1}, {"entropy_coef": 0.1}, {"use_adaptive_entropy": True}):
        assert not vanishes("grpo", term)


async def test_a_step_without_an_advantage_counts_and_trains_and_publishes_nothing(tmp_path):
    config = mock_config(
        tmp_path,
        **{key: RUN[key] for key in ("prompts", "rewards", "train")},
        staleness={"target": 0},
        eval={"prompts": {"type": "list", "rows": ["a="]}, "every": 2, "samples": 1},
    )
    adapter = kept_adapter(config)
    result = await train(config, parts=parts_with(config, adapter))
    assert result.total_steps == 4
    assert len(adapter.batches) == 2
    assert [row["version"] for row in result.history] == [1, 1, 2, 2]
    assert [event["version"] for event in events(tmp_path, "publish")] == [1, 2]
    assert [e.get("skipped", False) for e in events(tmp_path, "update")] == [False, True] * 2
    skipped = result.history[1]
    assert (skipped["loss"], skipped["grad_norm"], skipped["tokens/trained"]) == (0.0, 0.0, 0.0)
    promised = [
        key for key in result.history[2] if not key.startswith(("eval/", "time/wait_for_e"))
    ]
    assert set(promised) <= skipped.keys()
    assert [row["staleness/max"] for row in result.history] == [0] * 4
    assert [e["eval/version"] for e in events(tmp_path, "eval")] == [0, 1, 2]


@pytest.mark.parametrize("backend", [FULL["trl"], LORA["tinker"]])
async def test_a_resume_of_a_run_with_skipped_steps_goes_on_as_if_it_had_not_been_cut(
    tmp_path, backend
):
    run = {**RUN, "checkpoint": {"every": 0}}
    found = await whole_and_resumed(tmp_path, backend, run, stop=2, steps=3)
    whole, parts = ([row["loss"] for row in rows] for rows in found)
    assert parts == pytest.approx(whole, abs=1e-6)
    assert whole[1] == 0.0
    assert 0.0 not in (whole[0], whole[2])
    assert [row["version"] for row in found[1]] == [1, 1, 2]


SCHEDULE = {"start": 0.5, "end": 1.0, "steps": 4}


class Own(Learner):
    """Takes its own steps."""

    async def update(self, groups, batch):
        return await super().update(groups, batch)


@pytest.mark.parametrize(
    ("changes", "given", "own_term"),
    [
        ({"algorithm": {"loss": "dro"}}, {}, False),
        ({"algorithm": {"loss": "grpo", "loss_config": {"beta": 0.1}}}, {}, False),
        ({"rewards": [{**RUN["rewards"][0], "weight": SCHEDULE}]}, {}, False),
        ({}, {"learner": Own()}, False),
        ({}, {}, True),
    ],
)
async def test_a_batch_is_trained_where_anything_else_may_move_the_weights(
    tmp_path, changes, given, own_term
):
    plain = {key: RUN[key] for key in ("prompts", "rewards", "train")}
    config = mock_config(tmp_path, **plain | changes)
    adapter = kept_adapter(config)
    adapter.model_loss = own_term
    parts = replace(parts_with(config, adapter), **given)
    result = await train(config, parts=parts)
    assert len(adapter.batches) == result.total_steps == 4


async def test_the_first_steps_in_which_nothing_earns_anything_name_the_keys(tmp_path, caplog):
    rows = [{"prompt": "b=", "answer": FLAT}]
    config = mock_config(
        tmp_path,
        prompts={"type": "list", "rows": rows},
        rewards=RUN["rewards"],
        train={"groups_per_step": 2, "total_train_steps": 5},
    )
    with caplog.at_level(logging.WARNING, "retrain.pipeline.signal"):
        await train(config)
    first, third = [r.getMessage() for r in caplog.records if r.name == "retrain.pipeline.signal"]
    assert "0 of 8 rollouts" in first
    assert "0 of 24 rollouts" in third
    for key in ("algorithm.group_size", "sampling.temperature", "sampling.max_tokens"):
        assert key in first
    caplog.clear()
    await train(mock_config(tmp_path / "earns", train={"total_train_steps": 5}))
    assert not [r for r in caplog.records if r.name == "retrain.pipeline.signal"]


@pytest.mark.parametrize("bad", [2, 3])
async def test_p1_a_run_that_fails_in_a_skipped_step_trains_each_prompt_once(
    tmp_path, monkeypatch, bad
):
    config = mock_config(
        tmp_path,
        **{key: RUN[key] for key in ("prompts", "rewards", "staleness", "checkpoint")},
        train={**RUN["train"], "total_train_steps": 4},
    )
    write = RunDirectory.metrics

    def full(self, row):
        if row["step"] == bad:
            raise RunError("no space left")
        write(self, row)

    with monkeypatch.context() as disk:
        disk.setattr(RunDirectory, "metrics", full)
        with pytest.raises(RunError):
            await train(config)
    await train(config, resume=True)
    updates = [e for e in surviving(read_events(tmp_path)) if e["event"] == "update"]
    tickets = [ticket for event in updates for ticket in event["tickets"]]
    assert tickets == ["0.0.0", "0.1.0", "0.2.0", "0.3.0"]
