"""The pipe on an engine without a model: what is trained, in which order, and how stale."""

import asyncio
import re
import threading
from dataclasses import replace

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.algorithms.grpo import GRPO
from retrain.assembly import assemble
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import Environment, ToolSpec
from retrain.errors import ConfigError, NoSignalError, RunError
from retrain.observe.callbacks import Callback
from retrain.observe.journal import read_lines
from retrain.observe.peak import in_words
from retrain.observe.progress import closing
from retrain.observe.rollout_lines import hash_of
from retrain.observe.run_dir import Tally, read_events, read_metrics
from retrain.pipeline import train
from retrain.report.page import digest
from retrain.scoring import reward
from retrain.types import Ticket
from tests.pipe_kit import events, kept_adapter, parts_with, rollouts_of, slot_share


async def test_the_reward_rises_and_the_files_say_so(tmp_path):
    result = await train(mock_config(tmp_path, train={"total_train_steps": 10}))
    assert result.status == "completed"
    assert [row["step"] for row in result.history] == list(range(1, 11))
    assert result.last_tenth_reward > result.first_tenth_reward + 0.3
    assert len(events(tmp_path, "update")) == 10
    assert sorted(p.name for p in (tmp_path / "checkpoints").glob("step_*")) == [
        "step_10", "step_6", "step_8",
    ]  # fmt: skip


async def test_opening_the_backend_counts_for_no_step(tmp_path):
    class Slow(MockAdapter):
        async def __aenter__(self):
            await asyncio.sleep(1.5)
            return self

    config = mock_config(tmp_path, train={"total_train_steps": 2})
    result = await train(config, parts=parts_with(config, Slow(MockOptions(), config)))
    assert sum(row["time/step"] for row in result.history) < 1.5


async def test_work_starts_only_as_far_ahead_as_staleness_admits(tmp_path):
    class Watch(Callback):
        most = 0

        def on_step_begin(self, trainer, step):
            self.most = max(self.most, len(trainer.desk.ledger.open))

    watch = Watch()
    config = mock_config(
        tmp_path, staleness={"target": 2, "max": 4}, train={"total_train_steps": 12}
    )
    result = await train(config, callbacks=[watch])
    assert watch.most <= 3 * 4
    assert max(row["staleness/mean"] for row in result.history) <= 2
    issued = len(events(tmp_path, "issued"))
    assert issued == 12 * 4, "nothing is started that the remaining steps can't use"


async def test_p3_no_trained_group_is_staler_than_the_bound(tmp_path):
    config = mock_config(
        tmp_path,
        staleness={"target": 2, "max": 2},
        train={"total_train_steps": 30},
        backend={"type": "benchmarks.mock_engine:MockOptions", "latency": 0.005, "sigma": 1.5},
    )
    result = await train(config)
    assert max(row["staleness/max"] for row in result.history) <= 2
    stale = [e for e in events(tmp_path, "dropped") if e["cause"] == "stale"]
    assert stale, "with these latencies some groups come too late"
    issued = [e["ticket"] for e in events(tmp_path, "issued")]
    for event in stale:
        ticket, again = Ticket.parse(event["ticket"]), Ticket.parse(event["again"])
        assert again == ticket._replace(attempt=ticket.attempt + 1)
    assert {e["again"] for e in stale[:-6]} <= set(issued), "a stale prompt is issued again"
    assert sum(row["groups/dropped_stale"] for row in result.history) == len(stale)


async def test_in_order_trains_the_groups_in_the_order_of_issue(tmp_path):
    config = mock_config(
        tmp_path,
        staleness={"target": 1, "max": 4},
        train={"total_train_steps": 6, "order": "in_order"},
        backend={"type": "benchmarks.mock_engine:MockOptions", "latency": 0.003, "sigma": 1.5},
    )
    await train(config)
    trained = [ticket for event in events(tmp_path, "update") for ticket in event["tickets"]]
    assert trained == [e["ticket"] for e in events(tmp_path, "issued")]


async def test_p8_the_same_seed_writes_the_same_event_log(tmp_path):
    def log(folder):
        return [
            {k: v for k, v in e.items() if k not in {"time", "started", "ended", "path"}}
            for e in read_events(folder)
        ]

    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        config = mock_config(
            tmp_path / name,
            rewards=[{"type": "tests.test_pipeline:share"}],  # async: threads have no fixed order
            train={"seed": seed, "total_train_steps": 20},
            checkpoint={"every": 0},
        )
        await train(config)
    assert log(tmp_path / "a") == log(tmp_path / "b")
    assert log(tmp_path / "a") != log(tmp_path / "c")


# --- groups without signal ---------------------------------------------------------------------


@reward
async def share(completion, answer):
    return slot_share(completion, answer)


@reward
async def always_one(completion):
    return 1.0


@reward
async def always_half(completion):
    return -0.5


async def test_a_run_of_flat_groups_at_the_top_reward_is_solved(tmp_path):
    config = mock_config(
        tmp_path,
        rewards=[{"type": "tests.test_pipeline:always_one"}],
        train={"total_train_steps": 50, "stop_after_flat_steps": 3},
    )
    result = await train(config)
    assert (result.status, result.total_steps) == ("solved", 3)
    assert result.history[0]["groups/zero_signal"] == 4


async def test_a_run_of_flat_groups_at_another_reward_ends_with_an_explanation(tmp_path):
    config = mock_config(
        tmp_path,
        rewards=[{"type": "tests.test_pipeline:always_half"}],
        train={"total_train_steps": 50, "stop_after_flat_steps": 3},
    )
    with pytest.raises(NoSignalError, match=r"3 steps.* -0\.5"):
        await train(config)


async def test_refill_replaces_flat_groups_and_is_bounded(tmp_path):
    config = mock_config(
        tmp_path,
        rewards=[{"type": "tests.test_pipeline:always_one"}],
        train={"total_train_steps": 1, "no_signal": "refill", "max_refill": 2},
    )
    result = await train(config)
    dropped = [e["cause"] for e in events(tmp_path, "dropped")]
    assert dropped == ["no_signal"] * 8, "two batches of four, then flat groups are kept"
    assert result.history[0]["rollouts/ok"] == 48, "reward/mean covers the dropped ones too"


# --- turns, slots and held-out prompts ---------------------------------------------------------


class Twice(Environment):
    """Two turns; the second prompt shows what was said, the reward is the environment's own."""

    async def step(self, action):
        if not hasattr(self, "said") or self.said is None:
            self.said = action.text
            return [{"role": "user", "content": f"<{action.text}>"}], 0.25, False, False, {"n": 1}
        first, self.said = self.said, None
        return [], float(action.text[0] == first[0]), True, False, {"n": 2}


async def test_an_environment_of_two_turns_adds_its_rewards_and_masks_its_words(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_pipeline:Twice"},
        rewards=[],
        train={"total_train_steps": 1},
    )
    adapter = kept_adapter(config)
    await train(config, parts=parts_with(config, adapter))
    [batch] = adapter.batches
    assert len(batch.samples) == 16
    sample = batch.samples[0]
    said = bytes(t for t, m in zip(sample.token_ids, sample.loss_mask, strict=True) if m)
    whole = bytes(sample.token_ids)
    assert whole == whole[:2] + said[:4] + b"<" + said[:4] + b">" + said[4:]
    assert sample.loss_mask == [0] * 2 + [1] * 4 + [0] * 6 + [1] * 4
    rows = rollouts_of(tmp_path)
    assert {r["rewards"]["environment"] for r in rows} <= {0.25, 1.25}
    assert all(r["info"] == {"n": 2} for r in rows)


class Counted(Environment):
    """Counts the setups that are under way at once, over all instances."""

    now = most = 0

    async def setup(self):
        Counted.now += 1
        Counted.most = max(Counted.most, Counted.now)
        await asyncio.sleep(0)
        Counted.now -= 1


async def test_environments_are_set_up_few_at_a_time(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_pipeline:Counted"},
        rollout={"setup_concurrency": 3},
    )
    await train(config)
    assert Counted.most == 3


async def test_held_out_prompts_are_evaluated_and_the_best_checkpoint_is_kept(tmp_path):
    rows = [{"prompt": f"{c}=", "answer": c * 4} for c in "abc"]
    config = mock_config(
        tmp_path,
        train={"total_train_steps": 12},
        eval={"prompts": {"type": "list", "rows": rows}, "every": 4, "samples": 2},
        checkpoint={"every": 1, "keep": 1},
    )
    tally = Tally()

    class Counts(Callback):
        def on_train_begin(self, trainer):
            trainer.run_dir.tally = tally

    result = await train(config, callbacks=[Counts()])
    evaluations = events(tmp_path, "eval")
    assert [e["eval/step"] for e in evaluations] == [0, 4, 8, 12]
    assert all(0 <= e["eval/pass@2"] <= 1 for e in evaluations)
    written = [row for row in read_lines(tmp_path / "metrics.jsonl") if "eval/step" in row]
    assert [row["eval/step"] for row in written] == [0, 4, 8, 12]
    assert [row["eval/version"] for row in written] == [0, 4, 8, 12]
    assert [one["eval/step"] for one in result.evaluations] == [0, 4, 8, 12]
    assert written[-1].keys() - {"step"} == evaluations[-1].keys() - {"event", "time"}
    assert (result.metrics["eval/step"], result.metrics["step"]) == (12, 12)
    assert [row.keys() - {"nonfinite"} for row in read_metrics(tmp_path)] == [
        row.keys() for row in result.history
    ]
    best = max(evaluations, key=lambda e: e["eval/reward/mean"])
    assert result.best_checkpoint_path == tmp_path / "checkpoints" / f"step_{best['eval/step']}"
    assert result.best_checkpoint_path.is_dir()
    held_out = [r for r in rollouts_of(tmp_path) if r["ticket"].startswith("-1.")]
    assert len(held_out) == 4 * 3 * 2
    last = [r for r in held_out if r["step"] == 12]
    for name in last[0]["rewards"]:
        mean = sum(r["rewards"][name] for r in last) / len(last)
        assert evaluations[-1][f"eval/reward/{name}/mean"] == pytest.approx(mean)
    assert evaluations[-1]["eval/rollouts/failed"] == 0 < evaluations[-1]["eval/tokens/completion"]
    assert not any("mixture" in key or "tool" in key for row in written for key in row)
    lines = closing(result, tally, 1.0)
    assert ("", "24 in evaluations, 0 failed") in lines
    [(_, text)] = [line for line in lines if line[0] == "rollouts"]
    [fact] = [f for f in digest(tmp_path)["facts"] if f["label"] == "rollouts"]
    assert text.startswith(f"{fact['value']} scored, 0 failed")
    [text] = [line[1] for line in lines if line[0] == "memory"]
    assert text == in_words(tally.memory)
    assert re.match(r"\d+\.\d\d GB in RAM at the peak", text)


async def test_each_source_of_a_mixture_has_its_own_reward(tmp_path):
    sources = [
        {"type": "list", "name": name, "rows": [{"prompt": f"{c}=", "answer": c * 4, "mixture": 1}]}
        for name, c in (("one", "a"), ("two", "b"))
    ]
    mixture = {"type": "mixture", "sources": sources}
    await train(
        mock_config(
            tmp_path,
            prompts=mixture,
            train={"total_train_steps": 3},
            eval={"prompts": mixture, "every": 3, "samples": 2},
        )
    )
    *rows, last = read_lines(tmp_path / "metrics.jsonl")
    played = [r for r in rollouts_of(tmp_path) if (r["ticket"][0], r["step"]) != ("-", 0)]
    for name in ("one", "two"):
        own = [r for r in played if r["metadata"]["mixture"] == name]
        for row in rows:
            found = [r["reward"] for r in own if r["ticket"][0] != "-" and r["step"] == row["step"]]
            key = f"reward/mixture/{name}"
            assert row[f"{key}/mean"] == pytest.approx(sum(found) / len(found))
            assert row[f"{key}/max"] == max(found)
        evaluated = [r["reward"] for r in own if r["ticket"][0] == "-"]
        assert last[f"eval/reward/mixture/{name}/mean"] == pytest.approx(sum(evaluated) / 2)
        assert last[f"eval/pass@2/{name}"] == float(max(evaluated) >= 1.0)


class Closing(Environment):
    """Counts the instances that are open."""

    open = 0

    async def setup(self):
        Closing.open += 1

    async def close(self):
        Closing.open -= 1


async def test_p7_a_run_leaves_no_task_thread_or_environment_behind(tmp_path):
    tasks, threads = asyncio.all_tasks(), set(threading.enumerate())
    config = mock_config(tmp_path, environment={"type": "tests.test_pipeline:Closing"})
    await train(config)
    assert asyncio.all_tasks() == tasks
    for thread in set(threading.enumerate()) - threads:
        thread.join(timeout=5)
    assert not set(threading.enumerate()) - threads
    assert Closing.open == 0


async def test_the_chat_template_may_be_a_file_beside_the_config(tmp_path):
    (tmp_path / "chat.jinja").write_text("...")
    config = mock_config(tmp_path / "run", chat={"template": "chat.jinja"})
    config = config.model_copy(update={"base_dir": tmp_path})
    assert assemble(config).chat_template == "..."
    with pytest.raises(ConfigError, match=r"chat\.template: .*gone\.jinja"):
        assemble(mock_config(tmp_path / "run", chat={"template": "gone.jinja"}))


async def test_a_prompt_longer_than_the_context_says_what_to_do(tmp_path):
    rows = [{"prompt": "x" * 5000, "answer": "x"}]
    config = mock_config(tmp_path, prompts={"type": "list", "rows": rows})
    with pytest.raises(NoSignalError, match=r"5000 tokens.*4096"):
        await train(config)


async def test_a_limit_above_the_context_is_warned_of_once(tmp_path, caplog):
    for limit in (4096, 100_000):
        few = {"sampling": {"max_tokens": limit}, "train": {"total_train_steps": 0}}
        await train(mock_config(tmp_path / str(limit), **few))
    [message] = [record.getMessage() for record in caplog.records]
    assert "max_tokens is 100000" in message
    assert "a context of 4096 tokens" in message


async def test_a_sampler_that_disagrees_with_the_trainer_is_warned_of(tmp_path, caplog):
    class Apart(MockAdapter):
        async def update(self, batch):
            return {**await super().update(batch), "kl/sampler_trainer": 0.5}

    config = mock_config(tmp_path, train={"total_train_steps": 8})
    adapter = Apart(MockOptions(**config.backend.arguments), config)
    await train(config, parts=parts_with(config, adapter))
    [message] = [record.getMessage() for record in caplog.records]
    assert "for 5 steps (now 0.5)" in message


async def test_the_result_says_where_the_model_is(tmp_path):
    class Away(MockAdapter):
        async def export(self, folder):
            return "mock://model"

    config = mock_config(tmp_path, train={"total_train_steps": 1})
    adapter = Away(MockOptions(**config.backend.arguments), config)
    assert (await train(config, parts=parts_with(config, adapter))).model == "mock://model"


@pytest.mark.parametrize(
    ("wrong", "returned"),
    [
        (lambda groups: [[0.0] * 4], "[[0.0, 0.0, 0.0, 0.0]] with the lengths [4]"),
        (lambda groups: [[0.0]] * 4, "[[0.0], [0.0], [0.0], [0.0]] with the lengths [1, 1, 1, 1]"),
        (lambda groups: [0.0] * 4, "[0.0, 0.0, 0.0, 0.0]"),
    ],
)
async def test_advantages_that_dont_fit_are_told_with_their_algorithm(tmp_path, wrong, returned):
    class Mine(GRPO):
        def advantages(self, groups):
            return wrong(groups)

    config = mock_config(tmp_path)
    expected = "expected one list per group, with one entry per trajectory: 4 lists with the "
    text = f"Mine: advantages returned {returned}, {expected}lengths [4, 4, 4, 4]"
    with pytest.raises(RunError, match=re.escape(text)):
        await train(config, parts=replace(assemble(config), algorithm=Mine()))


class Searches(Environment):
    tools = (ToolSpec("search", "Finds pages."), ToolSpec("fetch", "Reads a page."))


async def test_a_prompt_with_its_tools_is_shown_as_the_model_got_it(tmp_path):
    config = mock_config(
        tmp_path,
        environment={"type": f"{__name__}:Searches"},
        chat={"template": "auto"},
        train={"total_train_steps": 2},
    )
    adapter = kept_adapter(config)
    adapter.tokenizer = tiny_tokenizer()
    await train(config, parts=parts_with(config, adapter))
    [rendered] = events(tmp_path, "rendered")
    assert [tool["function"]["name"] for tool in rendered["tools"]] == ["search", "fetch"]
    assert rendered["text"].startswith("<|system|>search()\nfetch()<|user|>")
    lines = rollouts_of(tmp_path)
    assert {tuple(line["tools"]) for line in lines} == {("search", "fetch")}
    shown = [line for line in lines if line["ticket"] == rendered["ticket"]]
    ids = adapter.tokenizer.encode(rendered["text"], add_special_tokens=False)
    assert shown[0]["prompt"] == {"tokens": len(ids), "hash": hash_of(ids)}
    assert len({line["prompt"]["hash"] for line in lines}) == len({x["ticket"] for x in lines})
