"""What a resume voids: lines are moved or cut, and none is lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from retrain.algorithms.grpo import GRPO
from retrain.algorithms.sft import SFT
from retrain.observe.journal import read_lines
from retrain.observe.rollout_lines import encoded
from retrain.observe.run_dir import RunDirectory, read_metrics, surviving
from retrain.observe.voided import cut
from retrain.pipeline.recorder import Recorder
from tests.run_dir_kit import config, group


def test_a_resume_cuts_torn_lines_off_before_it_writes(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, config()) as run_dir:
        run_dir.event("issued", ticket="0.0.0")
        run_dir.rollouts(encoded(group("ok")))
        run_dir.metrics({"step": 1})
    names = ("events.jsonl", "rollouts.jsonl", "metrics.jsonl")
    for name in names:
        with (tmp_path / name).open("ab") as file:
            file.write(b'{"event": "half a li')
    with RunDirectory.open(tmp_path, config(), resume=True) as run_dir:
        run_dir.event("resumed", from_step=1)
        run_dir.rollouts(encoded(group("ok")))
        run_dir.metrics({"step": 2})
    assert [len(list(read_lines(tmp_path / name))) for name in names] == [2, 2, 2]


VOIDED = {
    "what came after the snapshot of a checkpoint": (
        "issued:a update:1 snapshot:1 issued:b checkpoint:1 update:2 resumed:1 update:2",
        "issued:a update:1 snapshot:1 resumed:1 update:2",
    ),
    "also when the checkpoint event was lost": (
        "update:1 snapshot:1 issued:b resumed:1",
        "update:1 snapshot:1 resumed:1",
    ),
    "a newer checkpoint than the one resumed from": (
        "snapshot:1 update:2 snapshot:2 update:3 resumed:1",
        "snapshot:1 resumed:1",
    ),
    "what a second resume does again, not what the first one kept": (
        "update:1 snapshot:1 update:2 resumed:1 update:2 resumed:1",
        "update:1 snapshot:1 resumed:1",
    ),
    "everything, by a resume from the beginning": ("issued:a update:1 resumed:0", "resumed:0"),
}


@pytest.mark.parametrize("what", VOIDED)
def test_a_resume_voids(what: str) -> None:
    written, left = VOIDED[what]
    field = {"resumed": "from_step", "issued": "ticket"}
    pairs = [word.split(":") for word in written.split()]
    events = [
        {"event": kind, field.get(kind, "step"): int(value) if value.isdigit() else value}
        for kind, value in pairs
    ]
    kept = [list(event.values())[:2] for event in surviving(events)]
    assert " ".join(f"{kind}:{value}" for kind, value in kept) == left


def test_voided_lines_are_moved_and_none_is_lost(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path, config()) as run_dir:
        run_dir.metrics({"step": 1})
        sizes = run_dir.sizes()
        for again in (20, 21):
            run_dir.metrics({"step": again})
            run_dir.cut(sizes)
            run_dir.cut(sizes)
            assert read_metrics(tmp_path) == [{"step": 1}]
        run_dir.metrics({"step": 2})
    assert read_metrics(tmp_path) == [{"step": 1}, {"step": 2}]
    copies = [list(read_lines(tmp_path / "voided" / f"metrics.{n}.jsonl")) for n in (1, 2)]
    assert copies == [[{"step": 20}], [{"step": 21}]]
    assert len(list((tmp_path / "voided").iterdir())) == 2, (
        "and no file for rollouts, of which there were none"
    )


def test_a_kill_while_voided_lines_are_moved_loses_none(tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":1}\n{"step":2}\n')

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for point in ((shutil, "copyfileobj"), (Path, "rename"), (os, "truncate")):
        with monkeypatch.context() as patched:
            patched.setattr(*point, killed)
            with pytest.raises(KeyboardInterrupt):
                cut(file, 11)
        assert file.read_text() == '{"step":1}\n{"step":2}\n'
    cut(file, 11)
    assert file.read_text() == '{"step":1}\n'
    assert {p.read_text() for p in (tmp_path / "voided").glob("*.jsonl")} == {'{"step":2}\n'}


def test_a_cut_keeps_whole_lines_when_a_user_removed_one(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step":2}\n{"step":3}\n')
    cut(file, 15)
    assert file.read_text() == '{"step":2}\n'


def test_examples_that_a_resume_kept_write_no_rollouts(tmp_path: Path) -> None:
    """As in a run without a resume: the rows of the dataset are not rollouts."""
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        for algorithm, lines in ((SFT(), 0), (GRPO(), 2)):
            record = Recorder(run_dir, algorithm)
            record.keep(group("ok", "ok"))
            record.end("completed", 1)
            assert len(list(read_lines(tmp_path / "run" / "rollouts.jsonl"))) == lines
