"""The console: lines, the live display, the closing summary, and ends of pipes."""

from __future__ import annotations

import io
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from retrain.observe.callbacks import Callbacks, TrainingResult
from retrain.observe.console import Console, QuietStream
from retrain.observe.progress import (
    NEXT,
    RunProgress,
    clock_text,
    closing,
    number,
    short,
    sparkline,
)
from retrain.observe.run_dir import RunDirectory, Tally
from tests.observed import ObservedRun
from tests.run_dir_kit import config


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class TerminalFile(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ObservedRun]:
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        yield ObservedRun(run_dir)


@pytest.fixture
def _colours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.delenv("NO_COLOR", raising=False)


def rows(count: int) -> list[dict[str, float]]:
    return [{"step": i, "reward/mean": i / count, "loss": 0.5} for i in range(1, count + 1)]


async def test_without_a_terminal_the_first_and_the_last_step_have_their_lines(
    run: ObservedRun,
) -> None:
    out = io.StringIO()
    await run.play(Callbacks([Console(out, clock=Clock())]), rows(4))
    lines = out.getvalue().splitlines()
    steps = [line.split("  ")[0] for line in lines if line.startswith("step ")]
    assert steps == ["step 1/4", "step 4/4"]
    assert "\x1b" not in out.getvalue()
    assert any("grpo on trl, model tiny: 4 steps of 8 groups x 8 rollouts" in x for x in lines)


async def test_lines_come_every_few_seconds(run: ObservedRun) -> None:
    out, clock = io.StringIO(), Clock()
    console = Console(out, every_seconds=5.0, clock=clock)
    console.on_train_begin(run)
    for row in rows(6):
        clock.now += 2.0
        console.on_step_end(run, int(row["step"]), row)
    steps = [line.split("  ")[0] for line in out.getvalue().splitlines() if "reward" in line]
    assert steps == ["step 1/4", "step 4/4"]  # at 2 s and at 8 s
    assert "0:00 left" in out.getvalue()


async def test_missing_metrics_are_left_out(run: ObservedRun) -> None:
    out = io.StringIO()
    await run.play(Callbacks([Console(out)]), [{"step": 1, "entropy": math.nan}])
    assert "step 1/4  0:0" in out.getvalue()


async def test_a_run_that_fails_before_its_first_step_still_says_where_it_is(
    run: ObservedRun,
) -> None:
    out = io.StringIO()
    result = TrainingResult("failed", 0, 0, run.run_dir.path)
    Console(out).on_train_end(run, result)
    assert not out.getvalue(), "the start failed, which leaves nothing to name"
    run.run_dir.begun = True
    Console(out).on_train_end(run, result)
    assert out.getvalue().startswith("failed      0 steps")
    assert f"files       {run.run_dir.path}" in out.getvalue()


async def test_evaluations_and_checkpoints_are_mentioned(run: ObservedRun) -> None:
    out = io.StringIO()
    console = Console(out)
    console.on_train_begin(run)
    found = {"eval/pass@4": 0.5, "eval/rollouts/ok": 8, "eval/rollouts/failed": 0, "eval/step": 2}
    console.on_eval_end(run, 2, {**found, "eval/reward/mean": 0.25})
    console.on_checkpoint(run, 2, run.run_dir.checkpoints / "step_2")
    assert "step 2  evaluation: reward/mean 0.250  pass@4 0.500\n" in out.getvalue()
    assert "checkpoints/step_2" in out.getvalue()


@pytest.mark.usefixtures("_colours")
async def test_on_a_terminal_the_display_is_live_and_leaves_no_thread(run: ObservedRun) -> None:
    out = TerminalFile()
    run.run_dir.tally.outcomes.update(ok=12, timeout=1)
    await run.play(Callbacks([Console(out)]), rows(4))
    assert "step 4/4" in out.getvalue()
    assert "12 scored" in out.getvalue()
    assert "completed" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue(), "the cursor must be shown again"


@pytest.mark.usefixtures("_colours")
async def test_a_live_display_says_that_the_run_is_stopping(run: ObservedRun) -> None:
    out = TerminalFile()
    console = Console(out)
    assert not console.announce("stopping"), "nothing is drawn yet: a line on stderr stays"
    console.on_train_begin(run)
    assert console.announce("stopping soon")
    result = TrainingResult("interrupted", 0, 0, run.run_dir.path)
    console.on_train_end(run, result)
    assert "stopping soon" in out.getvalue()
    assert not console.announce("stopping"), "the display has ended"


async def test_a_resumed_run_says_which_checkpoints_it_passed_over(tmp_path: Path) -> None:
    with RunDirectory.open(tmp_path / "run", config()):
        pass
    with RunDirectory.open(tmp_path / "run", config(), resume=True) as run_dir:
        run_dir.tally.errors["checkpoint passed over, since it isn't whole: step_4"] += 1
        out = io.StringIO()
        Console(out).on_train_begin(ObservedRun(run_dir))
    assert "from the start: no checkpoint found" in out.getvalue()
    assert "step_4" in out.getvalue()


@pytest.mark.usefixtures("_colours")
async def test_a_dumb_terminal_gets_lines(
    run: ObservedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    out = TerminalFile()
    await run.play(Callbacks([Console(out)]), rows(1))
    assert "step 1/4  reward 1.000" in out.getvalue()
    assert "\x1b[?25" not in out.getvalue()


async def test_the_first_error_of_a_kind_is_shown_at_once(run: ObservedRun) -> None:
    out = io.StringIO()
    Console(out).on_train_begin(run)
    for _ in range(2):
        run.run_dir.tally.failed("Agent.run raised KeyError: 'x' (my_agent.py:3)\nTraceback")
    assert out.getvalue().count("failed  Agent.run raised KeyError: 'x' (my_agent.py:3)\n") == 1


async def test_each_seat_has_its_reward(run: ObservedRun) -> None:
    out = io.StringIO()
    run.run_dir.tally.seats.update(("X", "O"))
    scored = [{**row, "reward/X/mean": 0.75, "reward/O/mean": -0.75} for row in rows(1)]
    await run.play(Callbacks([Console(out)]), scored)
    assert "reward 1.000  reward O -0.750  reward X 0.750  loss" in out.getvalue()


async def test_markup_and_control_characters_are_shown_and_not_obeyed(run: ObservedRun) -> None:
    out = io.StringIO()
    run.run_dir.tally.errors["[/bold] a\x1b]0;title\x07 \x1b[2J\r\x9b1A\u202eb"] = 3
    await run.play(Callbacks([Console(out)]), rows(1))
    shown = "3 x [/bold] a\\x1b]0;title\\x07 \\x1b[2J\\r\\x9b1A\\u202eb\n"
    assert shown in out.getvalue()


async def test_a_file_that_was_closed_does_not_end_the_run(run: ObservedRun) -> None:
    out = io.StringIO()
    console = Console(out)
    console.on_train_begin(run)
    out.close()
    console.on_step_end(run, 1, rows(1)[0])


def test_a_broken_pipe_leaves_no_error_behind() -> None:
    script = (
        "import sys; from retrain.observe.console import QuietStream\n"
        "stream = QuietStream(sys.stdout)\n"
        "sys.stdin.readline()\n"
        "stream.write('x' * 100_000); stream.flush(); stream.write('y'); stream.flush()\n"
        "print('z'); sys.stderr.write(f'gone {stream.gone}')\n"
    )
    reader, writer = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(writer)
        os.close(reader)
        _, errors = process.communicate("go\n", timeout=60)
    assert (errors, process.returncode) == ("gone True", 0)


def test_the_summary_tells_causes_and_what_to_do_next(tmp_path: Path) -> None:
    (tmp_path / "checkpoints/step_5").mkdir(parents=True)
    (tmp_path / "events.jsonl").touch()
    (tmp_path / "report.html").touch()
    tally = Tally()
    tally.outcomes.update(ok=990, timeout=10)
    tally.errors["environment 'echo' timed out"] = 10
    tally.drops.update(stale=3, failed=1)
    tally.memory = {"ram": 5 * 10**8}
    rewards = [*[0.0] * 3, *[0.5] * 24, *[0.9] * 3]
    history = [{"reward/mean": reward, "rollouts/ok": 40} for reward in rewards]
    best, final = tmp_path / "checkpoints/step_5", tmp_path / "final"
    result = TrainingResult("interrupted", 30, 1, tmp_path, history[-1], history, best, final)
    assert closing(result, tally, 75.0) == [
        ("interrupted", "30 steps in 1:15"),
        ("reward", "0.000 in the first tenth -> 0.900 in the last (+0.900)"),
        ("rollouts", "990 scored, 10 failed"),
        ("", "10 x environment 'echo' timed out"),
        ("dropped", "groups: 3 stale, 1 failed"),
        ("memory", "0.50 GB in RAM at the peak"),
        ("files", str(tmp_path)),
        ("model", str(final)),
        ("best", str(best)),
        ("report", str(tmp_path / "report.html")),
        ("next", NEXT),
    ]
    elsewhere = replace(result, model="tinker://a/weights/b")
    assert ("model", "tinker://a/weights/b") in closing(elsewhere, tally, 75.0)


@pytest.mark.parametrize(("steps", "rollouts"), [(29, 40), (30, 33)])
def test_a_run_too_short_for_a_trend_claims_none(tmp_path: Path, steps, rollouts) -> None:
    history = [{"reward/mean": step / 10, "rollouts/ok": rollouts} for step in range(steps)]
    result = TrainingResult("completed", steps, 1, tmp_path, history[-1], history)
    [text] = [text for label, text in closing(result, Tally(), 1.0) if label == "reward"]
    assert "->" not in text
    assert text.startswith(f"{(steps - 1) / 20:.3f} ")


def test_the_summary_has_the_first_the_best_and_the_last_evaluation(tmp_path: Path) -> None:
    def shown(*scores: tuple[int, float], key="eval/reward/mean", n="eval/rollouts/ok") -> str:
        found = [{"eval/step": float(step), key: score, n: 24.0} for step, score in scores]
        result = TrainingResult("completed", 12, 1, tmp_path, evaluations=found)
        [text] = [text for label, text in closing(result, Tally(), 1.0) if label == "eval"]
        return text

    assert shown((0, 0.375), (6, 0.417), (12, 0.4)) == (
        "0.375 before training -> 0.417 at step 6 (best) -> 0.400 at step 12 (last), n=24"
    )
    assert (
        shown((0, 0.3), (6, 0.4)) == "0.300 before training -> 0.400 at step 6 (best, last), n=24"
    )
    assert (
        shown((0, 0.3), (6, 0.1)) == "0.300 before training (best) -> 0.100 at step 6 (last), n=24"
    )
    assert shown((0, 0.5)) == "0.500 before training, n=24"
    by_loss = shown((0, 3.0), (2, 1.0), (4, 2.0), key="eval/loss", n="eval/rows/ok")
    assert "step 2" in by_loss


def test_time_left_follows_the_pace_of_the_latest_steps() -> None:
    clock = Clock()
    progress = RunProgress(100, clock=clock)
    assert progress.seconds_left is None
    clock.now += 60.0  # the first step warms up
    progress.add(1, {})
    assert progress.seconds_left == pytest.approx(60.0 * 99)
    for step in range(2, 41):
        clock.now += 2.0
        progress.add(step, {})
    assert progress.seconds_left == pytest.approx(2.0 * 60)


def test_the_trend_compares_the_latest_steps_with_those_before() -> None:
    progress = RunProgress(100)
    for step, reward in enumerate([0.0, 0.0, 1.0, 0.5], 1):
        progress.add(step, {"reward/mean": reward})
    assert progress.trend == pytest.approx(0.75)


def test_signs_that_the_terminal_lacks_are_replaced() -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    stream = QuietStream(out)
    stream.write("reward ▇ 0.5")
    stream.flush()
    assert out.buffer.getvalue() == b"reward ? 0.5"  # type: ignore[attr-defined]  # a BytesIO
    assert not stream.gone


def test_numbers_keep_their_meaning_in_few_characters() -> None:
    assert [sparkline(x, 2) for x in ([], [0.5], [0.0, 1.0], [0.0, 0.0, 1.0, 1.0])] == [
        "", "▁", "▁█", "▁█"
    ]  # fmt: skip
    values = (0.0, 0.5, 1e-5, -12.25, 1e6, math.nan)
    shown = ["0.000", "0.500", "1.00e-05", "-12.250", "1.00e+06", "nan"]
    assert [number(x) for x in values] == shown
    assert [short(x) for x in (950, 12_345, 4.5e6, 2e9)] == ["950", "12.3k", "4.5M", "2.0G"]
    assert [clock_text(x) for x in (0, 61.2, 3661)] == ["0:00", "1:01", "1:01:01"]


def test_in_a_notebook_the_steps_are_one_line_that_changes(
    run: ObservedRun, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[tuple[str, bool]] = []

    class Cell:
        def update(self, data: dict[str, str], *, raw: bool) -> None:
            shown.append((data["text/plain"].split("  ")[0], True))

    def display(data: dict[str, str], *, raw: bool, display_id: bool) -> Cell:
        shown.append((data["text/plain"].split("  ")[0], False))
        return Cell()

    python, kernel = ModuleType("IPython"), SimpleNamespace(kernel=object())
    python.get_ipython = lambda: kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", python)
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))
    console = Console()
    console.on_train_begin(run)
    for step in (1, 2, 3):
        console.on_step_end(run, step, {"reward/mean": 0.5})
    assert shown == [("step 1/4", False), ("step 2/4", True), ("step 3/4", True)]
    printed = capsys.readouterr().out
    assert "run directory" in printed
    assert "step 1" not in printed
    del kernel.kernel  # the terminal of IPython
    Console().on_step_end(run, 1, {"reward/mean": 0.5})
    assert len(shown) == 3
