"""Checkpoints, resumes and the order of groups at awkward moments."""

import asyncio
import json
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.mock_engine import mock_config
from retrain.environment import Environment
from retrain.errors import CheckpointError, NoSignalError
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.pipeline.checkpoint import FORMAT, Checkpoints, read, verified
from retrain.pipeline.resume import checkpoint
from retrain.pipeline.signal import Signal
from retrain.types import Group, Prompt, Trajectory
from tests.faults_kit import HELD_OUT
from tests.pipe_kit import events, kept_adapter, parts_with

ENGINE = "benchmarks.mock_engine:MockOptions"


# --- what environments hand over ----------------------------------------------------------------


class Loose(Environment):
    """Gym's habits: no observation at the end, and anything at all in info."""

    def __init__(self, observation=None, info: str = ""):
        self.observation, self.kind = observation, info

    async def step(self, action):
        import threading

        info = {
            "": {},
            "keys": {("a", 1): 2},
            "lock": {"lock": threading.Lock()},
            "cycle": {},
        }[self.kind]
        if self.kind == "cycle":
            info["self"] = info
        return self.observation, 0.0, True, False, info


@pytest.mark.parametrize("info", ["", "keys", "lock", "cycle"])
async def test_a_checkpoint_holds_groups_whatever_their_environment_said(tmp_path, info):
    """At staleness 3 there are finished groups that no step has taken."""
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_checkpoint_edges:Loose", "info": info},
        staleness={"target": 3, "max": 6},
        checkpoint={"every": 1},
        train={"total_train_steps": 6},
    )
    assert (await train(config)).total_steps == 6
    [saved, *_] = [read(path) for path in (tmp_path / "checkpoints").glob("step_[1-5]")]
    assert saved.groups


# --- checkpoints --------------------------------------------------------------------------------


async def test_a_half_deleted_checkpoint_is_no_obstacle_to_pruning(tmp_path):
    config = mock_config(tmp_path, checkpoint={"every": 1, "keep": 1})
    await train(config)
    torn = tmp_path / "checkpoints" / "step_2"
    (torn / "adapter").mkdir(parents=True)
    longer = mock_config(
        tmp_path, checkpoint={"every": 1, "keep": 1}, train={"total_train_steps": 6}
    )
    assert (await train(longer, resume=True)).total_steps == 6
    assert not torn.exists()


@pytest.mark.parametrize("writable", [True, False])
async def test_a_disk_without_links_still_has_its_best_checkpoint(tmp_path, monkeypatch, writable):
    def refuse(self, *args, **kwargs):
        raise PermissionError(1, "Operation not permitted", str(self))

    write_text = Path.write_text

    def written(self, text, *args, **kwargs):
        mark = self.name == ".best" and not writable
        return refuse(self) if mark else write_text(self, text, *args, **kwargs)

    monkeypatch.setattr(Path, "symlink_to", refuse)
    monkeypatch.setattr(Path, "write_text", written)
    evaluation = {"prompts": HELD_OUT, "every": 2, "samples": 3}
    result = await train(mock_config(tmp_path, eval=evaluation))
    assert result.status == "completed"
    if writable:
        best = result.best_checkpoint_path
        assert best == tmp_path / "checkpoints" / (tmp_path / "checkpoints/best").read_text()
        assert best.is_dir()
        return
    assert result.best_checkpoint_path is None
    faults = [event["error"] for event in events(tmp_path, "fault")]
    assert any("can't mark step" in fault for fault in faults)


async def test_a_torn_checkpoint_of_the_last_step_is_written_anew(tmp_path):
    config = mock_config(tmp_path, checkpoint={"every": 3}, train={"total_train_steps": 4})
    await train(config)
    (tmp_path / "checkpoints" / "step_4" / "manifest.json").unlink()
    await train(config, resume=True)
    found = Checkpoints(tmp_path / "checkpoints").newest()
    assert found is not None
    assert found[1].step == 4


async def test_a_checkpoint_of_another_format_is_refused_and_no_older_one_taken(tmp_path):
    await train(mock_config(tmp_path, checkpoint={"every": 2}))
    manifest = tmp_path / "checkpoints" / "step_4" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"format": {FORMAT}', '"format": 7'))
    longer = mock_config(tmp_path, train={"total_train_steps": 6})
    with pytest.raises(CheckpointError, match=r"step_4.*format 7.*--run-dir"):
        await train(longer, resume=True)
    with pytest.raises(CheckpointError, match="format 7, expected"):
        verified(manifest.parent)


@pytest.mark.parametrize("files", [{}, {"../elsewhere": [0, ""]}, {"/elsewhere": [0, ""]}])
def test_a_manifest_names_files_of_its_own_folder(files, tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "files": files}))
    with pytest.raises(CheckpointError, match="its own folder"):
        verified(tmp_path)


async def test_a_checkpoint_asked_for_by_a_callback_is_not_written_twice(tmp_path):
    class Asks(Callback):
        seen = ()

        async def on_step_end(self, trainer, step, metrics):
            await checkpoint(trainer)

        def on_checkpoint(self, trainer, step, path):
            self.seen = (*self.seen, step)

    asks = Asks()
    await train(mock_config(tmp_path, checkpoint={"every": 2}), callbacks=[asks])
    assert asks.seen == (1, 2, 3, 4)


async def test_a_data_set_that_has_shrunk_is_refused_on_resume(tmp_path):
    data = tmp_path / "data.jsonl"
    rows = [f'{{"prompt": "{c}=", "answer": "{c * 4}"}}\n' for c in "abcdefgh"]
    data.write_text("".join(rows))
    where = {"prompts": {"type": "file", "path": str(data)}}
    await train(mock_config(tmp_path / "run", **where))
    data.write_text("".join(rows[:2]))
    longer = mock_config(tmp_path / "run", **where, train={"total_train_steps": 8})
    with pytest.raises(CheckpointError, match=r"8 rows.*2"):
        await train(longer, resume=True)


# --- admission, order, budgets ------------------------------------------------------------------


@pytest.mark.parametrize("order", ["ready", "in_order"])
@pytest.mark.parametrize("slots", [1, 3])
async def test_fewer_slots_than_groups_train_all_the_same(tmp_path, order, slots):
    config = mock_config(
        tmp_path,
        rollout={"slots": slots},
        train={"order": order, "total_train_steps": 6},
        staleness={"target": 2, "max": 2},
        backend={"type": ENGINE, "latency": 0.001, "sigma": 1.5},
        environment={"type": "tests.faults_kit:Odd", "where": "step", "every": 6},
    )
    async with asyncio.timeout(30):
        assert (await train(config)).total_steps == 6


async def test_more_groups_a_step_than_prompts(tmp_path):
    config = mock_config(
        tmp_path,
        prompts={"type": "list", "rows": [{"prompt": "a=", "answer": "aaaa"}]},
        train={"groups_per_step": 7, "total_train_steps": 3},
    )
    await train(config)
    trained = [t for e in events(tmp_path, "update") for t in e["tickets"]]
    assert len(set(trained)) == 21


async def test_no_step_at_all_still_leaves_a_checkpoint(tmp_path):
    result = await train(mock_config(tmp_path, train={"total_train_steps": 0}))
    assert (result.status, result.total_steps) == ("completed", 0)
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0]


@pytest.mark.parametrize("before", [4, 0])
async def test_a_resume_with_another_staleness_goes_on(tmp_path, before):
    after = 4 - before
    config = mock_config(
        tmp_path,
        staleness={"target": before, "max": before},
        rollout={"slots": 2 if after else None},
        checkpoint={"every": 1},
        train={"total_train_steps": 3},
    )
    await train(config)
    longer = mock_config(
        tmp_path, staleness={"target": after, "max": after}, train={"total_train_steps": 9}
    )
    async with asyncio.timeout(30):
        assert (await train(longer, resume=True)).total_steps == 9
    trained = [t for e in events(tmp_path, "update") for t in e["tickets"]]
    assert len(set(trained)) == len(trained) == 36


async def test_a_resume_after_the_end_does_nothing_but_export(tmp_path):
    await train(mock_config(tmp_path))
    result = await train(mock_config(tmp_path), resume=True)
    assert (result.status, result.total_steps, len(result.history)) == ("completed", 4, 4)
    assert len(events(tmp_path, "checkpoint")) == 2


async def test_stop_is_heard_while_finished_groups_wait_for_a_step(tmp_path):
    """The queue holds two groups, and a step needs four."""

    class Stops(Callback):
        async def on_step_begin(self, trainer, step):
            if step == 2:
                while trainer.desk.done.qsize() < 2:  # noqa: ASYNC110 - a queue has no event of that
                    await asyncio.sleep(0)
                trainer.request_stop()
                trainer.stopping = False  # the learner went past that check already

    config = mock_config(tmp_path, rollout={"slots": 1}, train={"total_train_steps": 4})
    result = await train(config, callbacks=[Stops()])
    assert result.total_steps == 1


async def test_held_groups_keep_their_place_in_order_over_a_resume(tmp_path):
    """With an async callback work starts before the checkpoint is written."""

    class Yields(Callback):
        async def on_step_end(self, trainer, step, metrics):
            for _ in range(30):
                await asyncio.sleep(0.001)

    batches = {}
    for name, steps in (("whole", (4,)), ("parts", (2, 4))):
        seen = []
        for total in steps:
            config = mock_config(
                tmp_path / name,
                staleness={"target": 0},
                train={"total_train_steps": 4, "order": "in_order"},
                checkpoint={"every": 1},
                backend={"type": ENGINE, "latency": 0.02, "sigma": 1.0},
            )
            adapter = kept_adapter(config)

            class Stops(Callback):
                def on_checkpoint(self, trainer, step, path, total=total):
                    if step == total != 4:
                        raise RuntimeError("killed")

            with suppress(RuntimeError):
                await train(
                    config,
                    parts=parts_with(config, adapter),
                    callbacks=[Yields(), Stops()],
                    resume=bool(seen),
                )
            seen += adapter.batches
        batches[name] = seen
    assert batches["parts"] == batches["whole"]


@pytest.mark.parametrize(
    ("seen", "last", "solved"),
    [
        ([-1.0, 0.0], 0.0, True),  # penalties, and there are none any more
        ([-3.0, -2.0], -2.0, True),
        ([0.0, -1e-17], 0.0, False),  # it never was anything else
        ([-1.0, 0.0], -1.0, False),
        ([0.5], 0.5, True),
        ([0.5, 1.0], 0.5, False),
    ],
)
def test_flat_groups_at_the_top_reward_are_solved_at_zero_too(seen, last, solved):
    def group(*rewards):
        prompt = Prompt("0.0.0", [])
        return Group(prompt, [Trajectory(prompt, reward=r) for r in rewards])

    signal, again = Signal(limit=1), Signal(limit=1)
    signal.see(group(*seen))
    again.restore(signal.state())
    for one in (signal, again):
        with suppress(NoSignalError):
            one.step([group(last, last)], has_credit=False)
        assert one.solved == solved
