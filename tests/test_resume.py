"""Resuming: no prompt is lost or trained twice, and what changed is checked."""

import io
import shutil
import subprocess
import sys
from collections import Counter
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions
from retrain.errors import CheckpointError
from retrain.observe.console import Console
from retrain.observe.journal import read_lines
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.pipeline import train
from retrain.pipeline.checkpoint import MANIFEST, Checkpoints
from retrain.prompts import epoch_order
from retrain.report.page import digest
from tests.pipe_kit import parts_with, rollouts_of
from tests.resume_kit import STEPS, Dies, config_in, fates_of, steps, trained


@pytest.mark.parametrize("fatal", [1, 3, 6, 10, 11, 20, 31])
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
    for letter, count, expected in (("a", 3, 0), ("a", 6, 0), ("b", 9, 1)):
        monkeypatch.setenv("LETTER", letter)
        config = config_in(tmp_path / "run", prompts=prompts, train={"total_train_steps": count})
        await train(config, resume=count > 3)
        faults = [e for e in read_events(tmp_path / "run") if e["event"] == "fault"]
        assert len(faults) == expected
    assert "trains on other prompts" in faults[0]["error"]
