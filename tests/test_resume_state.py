"""What a cancelled or killed run leaves for its resume: groups, tickets and files."""

import asyncio
import io
import json
import os
import subprocess
import sys
import threading
import time
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.mock_engine import MockAdapter, MockOptions
from retrain.observe.callbacks import Callback
from retrain.observe.console import Console
from retrain.observe.run_dir import read_events
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints, group_from_json, group_to_json
from retrain.pipeline.ledger import Ledger
from retrain.prompts import epoch_order
from retrain.report.page import digest
from retrain.types import Completion, Group, Prompt, Ticket, Trajectory, Turn
from tests.pipe_kit import parts_with
from tests.resume_kit import STEPS, Dies, config_in, fates_of, steps, trained


async def test_p10_cancelling_a_run_checkpoints_at_the_step_boundary(tmp_path):
    class SlowUpdate(MockAdapter):
        under_way = asyncio.Event()

        async def update(self, batch):
            if self.version == 4:
                self.under_way.set()
                await asyncio.sleep(0.05)
            return await super().update(batch)

    config = config_in(tmp_path)
    adapter = SlowUpdate(MockOptions(), config)
    running = asyncio.create_task(train(config, parts=parts_with(config, adapter)))
    await adapter.under_way.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    found = Checkpoints(tmp_path / "checkpoints").newest()
    assert found is not None
    assert found[1].step == 5, "the step under way was finished and saved"
    result = await train(config, resume=True)
    assert result.total_steps == STEPS
    assert max(trained(tmp_path).values()) == 1


class Waiting(Callback):
    """Says when the learner begins to wait for its first batch."""

    def __init__(self):
        self.begun = asyncio.Event()

    def on_step_begin(self, trainer, step):
        self.begun.set()


async def test_p10_cancelling_while_waiting_for_rollouts_doesnt_wait_for_them(tmp_path):
    config = config_in(
        tmp_path, backend={"type": "benchmarks.mock_engine:MockOptions", "latency": 3600}
    )
    waiting = Waiting()
    running = asyncio.create_task(train(config, callbacks=[waiting]))
    await waiting.begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await running
    assert Checkpoints(tmp_path / "checkpoints").steps() == [0]


async def test_finished_groups_that_no_step_has_taken_are_saved_and_trained_after_a_resume(
    tmp_path,
):
    config = config_in(tmp_path, staleness={"target": 3, "max": 6})
    adapter = Dies(MockOptions(), config)
    adapter.fatal = 11  # in the first step after the checkpoint of step 3
    with pytest.raises(BaseException, match=r"unhandled|Crash"):
        await train(config, parts=parts_with(config, adapter))
    found = Checkpoints(tmp_path / "checkpoints").newest()
    assert found is not None
    kept = {group["ticket"] for group in found[1].groups}
    assert kept
    left = {t: fate for t, fate in fates_of(tmp_path).items() if t not in steps(tmp_path)}
    assert kept <= set(left)
    assert set(left.values()) == {(None, None)}, "at the end, what no step has trained is written"
    await train(config, resume=True)
    assert fates_of(tmp_path) == {ticket: (step, None) for ticket, step in steps(tmp_path).items()}
    log = list(read_events(tmp_path))
    resumed = next(i for i, e in enumerate(log) if e["event"] == "resumed")
    again = {e["ticket"] for e in log[resumed:] if e["event"] == "rollout"}
    assert not kept & again, "what was finished is not sampled again"
    assert kept <= set(trained(tmp_path))


def test_a_group_survives_the_way_through_json():
    prompt = Prompt("1.2.3", [{"role": "user", "content": "?"}], "a", {"k": 1})
    completion = Completion([1, 2], [-0.1, -1 / 3], "x", "stop", 4, (4, 5))
    turn = Turn([5, 6], completion, [{"role": "user", "content": "o"}], answer="", reasoning="x")
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    trajectory = Trajectory(
        prompt, [turn], {"r": 0.1}, {"n": 1}, "ok", 0.1, [{"role": "user", "content": "?"}], (tool,)
    )
    second = replace(trajectory, prompt=replace(prompt, index=1), index=1)
    group = Group(prompt, [trajectory, second])
    saved = json.loads(json.dumps(group_to_json(group)))
    again = group_from_json(saved, lambda ticket: prompt)
    assert again == group
    assert [t.prompt.index for t in again.trajectories] == [0, 1]


ROWS = (
    "a manifest of null", "a manifest of a list", "files as a list", "a path outside",
    "an unreadable run.json", "a folder step_²", "a partial checkpoint", "all checkpoints torn",
    "no checkpoints folder", "the run directory deleted", "checkpoints is a file",
    "events.jsonl deleted",
)  # fmt: skip


def test_damaged_run_directories():
    """A few rows of the table; `python -m tests.chaos.damage` plays all."""
    command = [sys.executable, "-m", "tests.chaos.damage", *ROWS]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent.parent, check=False
    )
    assert done.returncode == 0, done.stdout
    assert f"{len(ROWS)} of {len(ROWS)} " in done.stdout


async def test_a_run_that_was_killed_before_its_first_checkpoint_begins_again(tmp_path):
    config = config_in(tmp_path)
    adapter = Dies(MockOptions(), config)
    adapter.fatal = 3  # in step 2
    with pytest.raises(BaseException, match=r"Crash|unhandled"):
        await train(config, parts=parts_with(config, adapter))
    out = io.StringIO()
    result = await train(config, callbacks=[Console(out)], resume=True)
    assert result.total_steps == STEPS
    assert ", from the start: no checkpoint found" in out.getvalue()


async def test_the_log_is_on_the_disk_before_a_checkpoint_counts(tmp_path, monkeypatch):
    synced, fsync = {}, os.fsync

    def seen(descriptor):
        """Keep what the disk has of a file, while there is no checkpoint."""
        fsync(descriptor)
        if not list((tmp_path / "checkpoints").glob("step_*")):
            inode = os.fstat(descriptor).st_ino
            for name in ("events.jsonl", "metrics.jsonl", "rollouts.jsonl"):
                if (tmp_path / name).stat().st_ino == inode:
                    synced[name] = (tmp_path / name).read_text()
            synced.update({"folder": ""} if inode == tmp_path.stat().st_ino else {})

    monkeypatch.setattr(os, "fsync", seen)
    await train(config_in(tmp_path, train={"total_train_steps": 3}))
    assert set(synced) == {"events.jsonl", "metrics.jsonl", "rollouts.jsonl", "folder"}
    assert '{"event":"snapshot"' in synced["events.jsonl"]
    assert synced["metrics.jsonl"].count("\n") == 3
    assert '"step":3' in synced["rollouts.jsonl"]


async def test_a_wall_clock_that_jumps_expires_nothing(tmp_path, monkeypatch):
    now, years = time.time, 30 * 365 * 86400
    jumps = cycle((0, years, -years))
    monkeypatch.setattr(time, "time", lambda: now() + next(jumps))
    limits = {"stall": 20, "blocked": 20, "outage": 20}
    result = await train(config_in(tmp_path, deadlines=limits, staleness={"target": 1}))
    assert (result.status, result.total_steps) == ("completed", STEPS)
    assert digest(tmp_path)["status"] == "completed"


@given(st.lists(st.sampled_from(["issue", "train", "reissue", "save", "crash"]), max_size=60))
@example([*["issue"] * 6, "reissue", "save", "crash"])
@settings(deadline=None)
def test_the_ledger_loses_no_ticket_and_gives_none_out_twice(moves):
    def order(epoch):
        return epoch_order(epoch, 5, 0, True)

    ledger, done = Ledger(order, 5), set()
    saved = (ledger.state(), set())
    for move in moves:
        if move == "issue":
            ticket = ledger.issue()
            assert ticket not in done
            assert list(ledger.open).count(ticket) == 1
        elif move == "train" and ledger.open:
            ticket = next(iter(ledger.open))
            ledger.retire([ticket])
            assert ticket not in done
            done.add(ticket)
        elif move == "reissue" and ledger.open:
            again = ledger.reissue(next(reversed(ledger.open)))
            done.add(again._replace(attempt=again.attempt - 1))
        elif move == "save":
            saved = (json.loads(json.dumps(ledger.state())), set(done))
        elif move == "crash":
            ledger, done = Ledger(order, 5), set(saved[1])
            ledger.restore(saved[0])
    for _ in range(len(moves) + 5):  # as many as may be open, and an epoch
        ledger.issue()
    rows = {(t.epoch, t.row) for t in done | set(ledger.open) if t.epoch == 0}
    assert rows == {(0, row) for row in range(5)}, "every row of the first epoch was given out"


async def test_a_long_epoch_is_ordered_in_a_thread_also_after_a_checkpoint_at_its_end():
    threads = []

    def order(epoch):
        threads.append(threading.current_thread())
        return numpy.arange(2)  # no sequence has a truth value of its own

    ledger = Ledger(order, 1_000_000)
    for restored in False, True:
        if restored:
            ledger.restore({**ledger.state(), "open": [], "again": []})
        for _ in range(2):
            await ledger.ready()
            ledger.issue()
    assert [str(ticket) for ticket in ledger.open] == ["1.0.0", "1.1.0"]
    assert len(threads) == 3  # the first epoch twice
    assert threading.main_thread() not in threads


def test_a_ticket_that_is_not_open_cant_be_retired():
    with pytest.raises(KeyError):
        Ledger(lambda epoch: [0], 1).retire([Ticket(0, 0)])
