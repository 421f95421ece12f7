"""Checkpoints, crashes and resumes: no prompt is lost or trained twice, whatever happens."""

import asyncio
import io
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext, suppress
from itertools import cycle
from pathlib import Path

import numpy
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.errors import CheckpointError, ConfigError
from retrain.observe.callbacks import Callback
from retrain.observe.console import Console
from retrain.observe.journal import read_lines
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.pipeline import train
from retrain.pipeline.checkpoint import MANIFEST, Checkpoints, group_from_json, group_to_json
from retrain.pipeline.ledger import Ledger
from retrain.prompts import epoch_order
from retrain.report.page import digest
from retrain.types import Completion, Group, Prompt, Ticket, Trajectory, Turn
from tests.pipe_kit import parts_with, rollouts_of

STEPS = 12


class Dies(MockAdapter):
    """Raises at the nth call of an adapter method: a crash at that point of the run."""

    class Crash(BaseException):
        """Not an Exception: nothing of the pipe may handle it."""

    calls = 0
    fatal = 0

    def _count(self):
        self.calls += 1
        if self.calls == self.fatal:
            raise self.Crash

    async def update(self, batch):
        self._count()
        metrics = await super().update(batch)
        self._count()
        return metrics

    async def publish(self):
        self._count()
        return await super().publish()

    async def save(self, folder):
        state = await super().save(folder)
        self._count()
        return state


def config_in(folder, **changes):
    train_keys = {"total_train_steps": STEPS, **changes.pop("train", {})}
    return mock_config(folder, train=train_keys, checkpoint={"every": 3}, **changes)


def trained(folder) -> Counter:
    """How often each ticket was trained, by the events that survive."""
    updates = [e for e in surviving(read_events(folder)) if e["event"] == "update"]
    return Counter(ticket for event in updates for ticket in event["tickets"])


def steps(folder) -> dict[str, int]:
    """The step that trained each ticket."""
    updates = [e for e in surviving(read_events(folder)) if e["event"] == "update"]
    return {ticket: event["step"] for event in updates for ticket in event["tickets"]}


def fates_of(folder) -> dict[str, tuple[int | None, str | None]]:
    """The step that trained each group of rollouts.jsonl, and why it was dropped."""
    return {
        row["ticket"]: (row["step"], row.get("dropped"))
        for row in rollouts_of(folder)
        if not row["ticket"].startswith("-1.")
    }


@pytest.mark.parametrize("fatal", [1, 2, 3, 6, 9, 10, 11, 14, 20, 21, 31])
async def test_p1_no_prompt_is_lost_or_trained_twice_when_a_run_dies_and_is_resumed(
    tmp_path, fatal
):
    config = config_in(tmp_path, staleness={"target": 1, "max": 2})
    adapter = Dies(MockOptions(), config)
    adapter.fatal = fatal
    with pytest.raises(BaseException, match=r"Crash|unhandled"):
        await train(config, parts=parts_with(config, adapter))
    result = await train(config, resume=True)
    assert result.total_steps == STEPS
    counts = trained(tmp_path)
    assert max(counts.values()) == 1
    issued = {e["ticket"] for e in surviving(read_events(tmp_path)) if e["event"] == "issued"}
    assert sorted(counts) == sorted(issued), "all that was issued was trained"
    first = [f"0.{row}.0" for row in epoch_order(0, 8, 0, True)]
    assert set(first) <= set(counts), "the first epoch is whole"
    assert [row["step"] for row in read_metrics(tmp_path)] == list(range(1, STEPS + 1))
    assert [row["step"] for row in result.history] == list(range(1, STEPS + 1))


async def test_a_resumed_run_trains_the_same_batches_as_one_that_was_not_stopped(tmp_path):
    batches = {}
    for name in ("whole", "parts"):
        changes = {"staleness": {"target": 0}, "train": {"order": "in_order"}}
        config = config_in(tmp_path / name, **changes)
        seen = []
        for fatal in (0,) if name == "whole" else (17, 0):
            adapter = Dies(MockOptions(), config)
            adapter.fatal, adapter.keep_batches = fatal, STEPS
            resume = bool(seen)
            crash = (
                pytest.raises(BaseException, match=r"Crash|unhandled") if fatal else nullcontext()
            )
            with crash:
                await train(config, resume=resume, parts=parts_with(config, adapter))
            seen.append(adapter.batches)
        batches[name] = seen
    [whole] = batches["whole"]
    died, resumed = batches["parts"]
    assert died == whole[: len(died)]
    assert resumed == whole[3:], "from the checkpoint of step 3 on"


class DiesInEvaluation(MockAdapter):
    """Dies when it plays the held-out prompt `z=` with the weights of a version."""

    fatal = -1

    async def sample(self, prompt_ids, params, n=1):
        if prompt_ids[0] == ord("z") and self.version == self.fatal:
            raise Dies.Crash
        return await super().sample(prompt_ids, params, n)


def evaluated(folder):
    """What a run has of its evaluations: events, rows, rollouts and the best checkpoint."""
    found = [e for e in surviving(read_events(folder)) if e["event"] == "eval"]
    rows = [row for row in read_lines(folder / "metrics.jsonl") if "eval/step" in row]
    return {
        "events": [(e["eval/step"], e["eval/reward/mean"]) for e in found],
        "rows": [row["eval/step"] for row in rows],
        "rollouts": sorted(
            (r["step"], r["ticket"]) for r in rollouts_of(folder) if r["ticket"].startswith("-1.")
        ),
        "best": Checkpoints(folder / "checkpoints").best().name,
    }


@pytest.mark.parametrize("fatal", [4, 6, STEPS])
async def test_an_evaluation_that_was_cut_off_is_done_again(tmp_path, fatal):
    for name, version in (("whole", None), ("parts", fatal)):
        config = config_in(
            tmp_path / name,
            backend={"type": "benchmarks.mock_engine:MockOptions", "update": 0.01},
            staleness={"target": 0},
            train={"order": "in_order"},
            eval={"prompts": {"type": "list", "rows": [{"prompt": "z=", "answer": "zzzz"}]},
                  "every": 2, "samples": 1},
        )  # fmt: skip
        adapter = DiesInEvaluation(MockOptions(**config.backend.arguments), config)
        adapter.fatal = version
        with pytest.raises(BaseException, match=r"Crash|unhandled") if version else nullcontext():
            await train(config, parts=parts_with(config, adapter))
        if version:
            await train(config, resume=True)
    whole, parts = evaluated(tmp_path / "whole"), evaluated(tmp_path / "parts")
    assert [step for step, _ in whole["events"]] == [0, 2, 4, 6, 8, 10, 12] == whole["rows"]
    assert parts == whole


async def test_after_a_resume_the_files_have_each_step_and_each_rollout_once(tmp_path):
    config = config_in(tmp_path, staleness={"target": 3, "max": 6}, rollout={"slots": 3})
    adapter = Dies(MockOptions(), config)
    adapter.fatal = 18  # in step 5: the checkpoint is of step 3
    with pytest.raises(BaseException, match=r"unhandled|Crash"):
        await train(config, parts=parts_with(config, adapter))
    written = {
        name: list(read_lines(tmp_path / f"{name}.jsonl")) for name in ("metrics", "rollouts")
    }
    log = (tmp_path / "events.jsonl").read_bytes()
    await train(config, resume=True)
    assert (tmp_path / "events.jsonl").read_bytes().startswith(log)
    metrics = list(read_lines(tmp_path / "metrics.jsonl"))
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    rollouts = [(row["ticket"], row["index"]) for row in rollouts_of(tmp_path)]
    assert len(set(rollouts)) == len(rollouts)
    assert fates_of(tmp_path) == {ticket: (step, None) for ticket, step in steps(tmp_path).items()}
    for name, before in written.items():
        voided = list(read_lines(tmp_path / "voided" / f"{name}.1.jsonl"))
        assert voided
        assert before == before[: -len(voided)] + voided
        assert list(read_lines(tmp_path / f"{name}.jsonl"))[: -len(voided)][:1] == before[:1]


KILLED = """
import asyncio, sys
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.pipeline import train
ROWS = [{"prompt": "a=", "answer": "aaaa"}, {"prompt": "b=", "answer": "bbbb"}]
config = mock_config(
    Path(sys.argv[1]),
    backend={"type": "benchmarks.mock_engine:MockOptions", "latency": 0.01},
    train={"total_train_steps": 30},
    staleness={"target": 1, "max": 2},
    checkpoint={"every": 4},
    eval={"prompts": {"type": "list", "rows": ROWS}, "every": 6, "samples": 1},
)
asyncio.run(train(config, resume=sys.argv[2] == "resume"))
"""


@pytest.mark.slow
def test_p1_holds_when_the_process_is_killed_again_and_again(tmp_path):
    folder = tmp_path / "run"

    def start(how):
        command = [sys.executable, "-c", KILLED, str(folder), how]
        return subprocess.Popen(command, cwd=Path(__file__).parent.parent)

    def killed(process, lines):
        metrics = folder / "metrics.jsonl"
        while process.returncode is None:  # the moment of the kill is not to be regular
            if metrics.exists() and metrics.read_bytes().count(b"\n") >= lines:
                process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=0.001)

    killed(start("new"), 7)
    for lines in (13, 20, 27):
        killed(start("resume"), lines)
    assert start("resume").wait() == 0
    counts = trained(folder)
    assert len(counts) == 30 * 4
    assert max(counts.values()) == 1
    rows = [row for row in read_lines(folder / "metrics.jsonl") if "loss" in row]
    assert [row["step"] for row in rows] == list(range(1, 31))
    rollouts = [(row["ticket"], row["index"], row["step"]) for row in rollouts_of(folder)]
    assert max(Counter(rollouts).values()) == 1
    dropped = {
        e["ticket"]: (None, e["cause"])
        for e in surviving(read_events(folder))
        if e["event"] == "dropped"
    }
    done = {ticket: (step, None) for ticket, step in steps(folder).items()}
    assert fates_of(folder) == done | dropped
    assert evaluated(folder)["rows"] == [0, 6, 12, 18, 24, 30]
    assert len(evaluated(folder)["rollouts"]) == 6 * 2


@pytest.mark.parametrize("damage", ["manifest gone", "file cut", "file changed", "half deleted"])
async def test_p2_a_torn_checkpoint_is_detected_and_the_one_before_it_used(tmp_path, damage):
    config = config_in(tmp_path)
    await train(config)
    newest = tmp_path / "checkpoints" / f"step_{STEPS}"
    victim = newest / "adapter" / "skill.txt"
    if damage == "manifest gone":
        (newest / MANIFEST).unlink()
    elif damage == "file cut":
        victim.write_text(victim.read_text()[:-1])
    elif damage == "file changed":
        victim.write_text(victim.read_text()[:-1] + "7")
    else:
        shutil.rmtree(newest / "adapter")
    longer = config_in(tmp_path, train={"total_train_steps": STEPS + 3})
    result = await train(longer, resume=True)
    log = list(read_events(tmp_path))
    assert [e["from_step"] for e in log if e["event"] == "resumed"] == [STEPS - 3]
    assert any(e["event"] == "incomplete" and f"step_{STEPS}" in e["checkpoint"] for e in log)
    assert result.total_steps == STEPS + 3
    assert max(trained(tmp_path).values()) == 1


async def test_a_checkpoint_that_fails_leaves_the_one_before_it(tmp_path):
    class Full(MockAdapter):
        async def save(self, folder):
            if self.version > 3:
                raise OSError(28, "No space left on device")
            return await super().save(folder)

    config = config_in(tmp_path)
    with pytest.raises(CheckpointError, match=r"step_6: .*No space"):
        await train(config, parts=parts_with(config, Full(MockOptions(), config)))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    assert checkpoints.steps() == [3]
    assert checkpoints.newest() is not None
    assert not list((tmp_path / "checkpoints").glob(".*"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithm": {"group_size": 2}}, r"algorithm\.group_size: was 4.*2\."),
        ({"model": "other"}, "model: was 'tiny'.*'other'"),
        ({"train": {"groups_per_step": 2}}, r"train\.groups_per_step: was 4.*2"),
    ],
)
async def test_another_model_or_algorithm_is_refused_on_resume(tmp_path, change, message):
    await train(config_in(tmp_path))
    changed = config_in(tmp_path, **change)
    parts = parts_with(config_in(tmp_path), MockAdapter(MockOptions(), changed))
    with pytest.raises(ConfigError, match=message):
        await train(changed, resume=True, parts=parts)


async def test_what_a_resume_lets_pass_is_told(tmp_path):
    match, printed = {"type": "slot_match"}, io.StringIO()
    await train(config_in(tmp_path, rewards=[match]))
    longer = config_in(
        tmp_path,
        rewards=[{**match, "weight": 2.0}],
        sampling={"temperature": 0.5},
        train={"total_train_steps": STEPS + 1},
    )
    await train(longer, resume=True, callbacks=[Console(printed)])
    [resumed] = [e for e in read_events(tmp_path) if e["event"] == "resumed"]
    changed = ["rewards.0.weight", "sampling.temperature", "train.total_train_steps"]
    assert resumed["changed"] == changed
    keys = ", ".join(changed)
    assert f"changed since the checkpoint: {keys}\n" in printed.getvalue()
    assert any(
        f"from step {STEPS}, changed: {keys}" in line for line in digest(tmp_path)["history"]
    )


async def test_other_rows_of_the_same_source_are_told_at_a_resume(tmp_path, monkeypatch):
    (tmp_path / "drawn.py").write_text(
        "import os\ndef drawn(): yield from [os.environ['LETTER'] + '='] * 4\n"
    )
    prompts = {"type": f"{tmp_path}/drawn.py", "map": {"answer": "prompt"}}
    for letter, steps, expected in (("a", 3, 0), ("a", 6, 0), ("b", 9, 1)):
        monkeypatch.setenv("LETTER", letter)
        config = config_in(tmp_path / "run", prompts=prompts, train={"total_train_steps": steps})
        await train(config, resume=steps > 3)
        faults = [e for e in read_events(tmp_path / "run") if e["event"] == "fault"]
        assert len(faults) == expected
    assert "trains on other prompts" in faults[0]["error"]


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
    group = Group(prompt, [trajectory])
    saved = json.loads(json.dumps(group_to_json(group)))
    assert group_from_json(saved, lambda ticket: prompt) == group


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
