"""The command line: exit codes, dry runs and run directories."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Self

import pytest
import yaml

import retrain
from benchmarks.mock_engine import MockAdapter, MockOptions
from retrain.cli.commands import command
from retrain.cli.run import main
from retrain.config import RunConfig, load_config
from retrain.errors import ConfigError
from retrain.pipeline.resume import in_run_dir
from retrain.supervision.locks import FolderLock
from tests.cli_kit import CONFIG, ROOT, events, written

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return written(tmp_path, monkeypatch)


def test_a_run_says_what_it_loads_and_ends_with_0_and_its_directory(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config)]) == 0
    assert capsys.readouterr().err.startswith("loading model tiny on the benchmarks.mock_engine:")
    metrics = (config.parent / "runs" / "task" / "metrics.jsonl").read_text().splitlines()
    assert len(metrics) == 3


def test_a_dry_run_prints_a_config_that_says_the_same(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), "train.seed=5", "--dry-run"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["train"]["seed"] == 5
    assert printed["algorithm"]["loss"] == "dapo"
    assert printed["backend"]["learning_rate"] == 0.1
    assert not (config.parent / "runs").exists()
    config.write_text(yaml.safe_dump(printed))
    assert load_config(config).train.seed == 5
    assert main([str(config), "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == printed


def test_an_included_config_needs_no_file(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["quickstart", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["model"] == "tiny"
    assert main(["guess_number", "--dry-run"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["environment"]["guesses"] == 3
    Path("guess_number").write_text(CONFIG)  # a file of that name comes first
    assert main(["guess_number", "--dry-run"]) == 0
    assert "guesses" not in yaml.safe_load(capsys.readouterr().out)["environment"]


def test_a_dry_run_loads_no_torch(tmp_path: Path) -> None:
    script = (
        "import sys; from retrain.cli.run import main; code = main(sys.argv[1:]);"
        "heavy = [m for m in ('torch', 'trl', 'transformers', 'datasets') if m in sys.modules];"
        "sys.exit(f'{code} {heavy}')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, QUICKSTART, "--dry-run"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    estimate, result = done.stderr.splitlines()
    assert estimate.startswith("memory: about ")
    assert result == "0 []"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.yaml"], "nowhere.yaml"),
        (["task.yaml", "train.sed=1"], "train.seed"),
        (["task.yaml", "rewards=exact_mach"], "exact_match"),
        (["task.yaml", "algorithm.mismatch=tiss"], "algorithm.mismatch.type: got 'tiss'"),
        (["task.yaml", "--resume"], "runs/task"),
        (["task.yaml", "prompts=none.jsonl"], "prompts"),
        (["task.yaml", "--dry-run", "model=./gone"], "model"),
    ],
)
def test_a_wrong_config_ends_with_2_and_a_sentence(
    config: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(arguments) == 2
    output = capsys.readouterr().err
    assert message in output
    assert "Traceback" not in output


OWN = """
from retrain import Environment, StepResult


class Guess(Environment):
    def __init__(self, tries: int = 2, words: tuple[str, ...] = ("up", "down")) -> None:
        self.tries = tries

    async def reset(self, prompt):
        return prompt.messages

    async def step(self, action):
        return StepResult([], 0.5, True, False, {})
"""


def test_a_run_resumes_from_its_own_config_and_from_a_dry_run_whatever_defaults_they_write(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "guess.py").write_text(OWN)
    own = "environment=guess.py:Guess"
    assert main([str(config), own]) == 0
    capsys.readouterr()
    assert main([str(config), own, "--dry-run"]) == 0
    full = config.parent / "full.yaml"
    full.write_text(capsys.readouterr().out)
    run_dir = config.parent / "runs" / "task"
    own_config = config.parent / "own.yaml"  # a resume writes config.yaml again
    own_config.write_text((run_dir / "config.yaml").read_text())
    plain = [str(config), own]
    for steps, again in enumerate(
        (
            [str(own_config)],
            [str(full), "--run-dir", str(run_dir)],
            [*plain, "algorithm.loss=dapo", "environment.tries=2", "backend.learning_rate=0.1"],
            [*plain, "environment.words=[up, down]", "algorithm.scale=group"],
            plain,
        ),
        4,
    ):
        assert main([*again, "--resume", f"train.total_train_steps={steps}"]) == 0
        resumed = [event for event in events(run_dir) if event["event"] == "resumed"]
        assert resumed[-1]["changed"] == ["train.total_train_steps"], again


CHANGES = {
    "algorithm.loss=ppo": "changed: algorithm.loss: was 'dapo'",
    "algorithm.group_size=2": "algorithm.group_size: was 4",
    "train.groups_per_step=3": "train.groups_per_step: was 2",
    "model=other": "model: was 'tiny'",
    "environment.tries=3": "changed: environment.tries: was 2",
    "environment.words=[up]": "environment.words: was ['up'",
    "algorithm.kl_penalty=0.1": "algorithm.kl_penalty: was 0.0",
    "algorithm.mismatch=tis": "algorithm.mismatch: was unset",
    "environment={type: single_turn}": "environment.type: was 'guess.py:Guess'",
    "environment.tries={type: x}": "environment.tries: was 2",
    "chat.arguments={type: x}": "chat.arguments.type: was unset",
    "prompts.limit=1": "prompts.limit: was unset",
}


@pytest.mark.parametrize("written", [True, False])
def test_a_real_change_is_named_whether_or_not_the_default_was_written(
    config: Path, capsys: pytest.CaptureFixture[str], written: bool
) -> None:
    (config.parent / "guess.py").write_text(OWN)
    own = ["environment=guess.py:Guess", *(["algorithm.loss=dapo"] if written else [])]
    assert main([str(config), *own]) == 0
    log = config.parent / "runs" / "task" / "events.jsonl"
    before = log.read_bytes()
    for changed, message in CHANGES.items():
        assert main([str(config), *own, changed, "--resume"]) == 2
        assert message in capsys.readouterr().err
        assert main([str(config), *own, changed, "--resume", "--dry-run"]) == 2
    assert log.read_bytes() == before


def test_paths_in_the_config_of_a_run_are_those_of_the_run(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (config.parent / "rows.jsonl").write_text('{"prompt": "a=", "answer": "aaaa"}\n')
    elsewhere = config.parent / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    arguments = ["prompts=rows.jsonl", "environment=single_turn"]
    assert main([str(config), *arguments, "--run-dir", "mine"]) == 0
    assert main(["mine/config.yaml", "--resume", "train.total_train_steps=4"]) == 0
    capsys.readouterr()
    assert main([str(config), *arguments, "--dry-run"]) == 0
    full = elsewhere / "full.yaml"
    full.write_text(capsys.readouterr().out)
    assert main(["full.yaml", "--dry-run"]) == 0


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_nobody_reads_ends_quietly(config: Path, unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "wb") as closed:
        done = subprocess.run(
            [sys.executable, "-m", "retrain.run", str(config), "--dry-run"],
            env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": unbuffered},
            stdout=closed,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_rerun_takes_a_fresh_directory_and_resume_the_last(config: Path) -> None:
    def folder(resume: bool = False) -> str:
        with in_run_dir(load_config(config), resume=resume) as placed:
            return str(placed.run_dir)

    assert folder() == "runs/task"
    assert folder() == "runs/task-2", "the first one is claimed, though it is empty"
    for name in ("task", "task-2"):
        (config.parent / "runs" / name / "events.jsonl").touch()
    assert folder() == "runs/task-3"
    assert folder(resume=True) == "runs/task-2", "the third one has no run"
    other = config.parent / "runs" / "task-8"
    other.mkdir()
    (other / "config.yaml").write_text("name: task-8\n")
    (other / "events.jsonl").touch()
    assert folder(resume=True) == "runs/task-2", "task-8 is the first run of another config"
    assert folder() == "runs/task-4"


def test_runs_that_start_at_the_same_moment_get_different_directories(config: Path) -> None:
    loaded, together = load_config(config), Barrier(4)

    def start(_: int) -> Path | None:
        together.wait()
        with in_run_dir(loaded, resume=False) as placed:
            return placed.run_dir

    with ThreadPoolExecutor(4) as threads:
        folders = list(threads.map(start, range(4)))
    assert {str(folder) for folder in folders} == {
        "runs/task", "runs/task-2", "runs/task-3", "runs/task-4"
    }  # fmt: skip


class Unopened(MockAdapter):
    """Can't be opened, after it has written into the run directory."""

    def __init__(self, options: MockOptions, config: RunConfig) -> None:
        super().__init__(options, config)
        self._config = config

    async def __aenter__(self) -> Self:
        assert self._config.run_dir is not None
        (self._config.run_dir / "service").mkdir()
        raise {"nobody/has": ConfigError, "broken": RuntimeError}[self._config.model]("no model")


class UnopenedOptions(MockOptions):
    adapter = "tests.test_cli:Unopened"


@pytest.mark.parametrize(
    ("override", "code"),
    [("rewards=[none/such.py:f]", 2), ("model=nobody/has", 2), ("model=broken", 1)],
)
def test_a_start_that_fails_leaves_no_run(
    config: Path, override: str, code: int, capfd: pytest.CaptureFixture[str]
) -> None:
    config.write_text(CONFIG.replace("benchmarks.mock_engine:Mock", "tests.test_cli:Unopened"))
    assert main([str(config), override]) == code
    said = capfd.readouterr().err
    assert "error: " in said
    assert "error.txt" not in said
    assert list((config.parent / "runs").rglob("*")) == []
    assert main([str(config), "--resume"]) == 2
    assert "runs/task" in capfd.readouterr().err
    kept = config.parent / "own"
    (kept / "data").mkdir(parents=True)
    assert main([str(config), override, "--run-dir", str(kept)]) == code
    assert not (kept / "events.jsonl").exists()
    assert (kept / "data").exists(), "what was there before stays"


def test_a_given_run_directory_is_never_shared(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(config), "--run-dir", "here"]) == 0
    capsys.readouterr()
    for dry in ([], ["--dry-run"]):
        assert main([str(config), "--run-dir", "here", *dry]) == 2
        said = capsys.readouterr().err
        assert "--resume" in said
        assert "loading model" not in said, "it is found before anything loads"
        lock = FolderLock(Path("here"))
        assert main([str(config), "--run-dir", "here", "--resume", *dry]) == 2
        lock.release()
        said = capsys.readouterr().err
        assert f"here is in use by process {os.getpid()}" in said
        assert "loading model" not in said
    assert main([str(config), "--run-dir", "here", "--resume", "--dry-run"]) == 0
    assert main([str(config), "--run-dir", "none", "--resume", "--dry-run"]) == 2
    assert main([str(config), "name=none", "--resume", "--dry-run"]) == 2
    assert capsys.readouterr().err.count("no run to resume in") == 2
    assert not Path("none").exists()


async def test_train_takes_a_file_or_a_mapping(config: Path) -> None:
    result = await retrain.train(str(config))
    assert (result.status, result.total_steps) == ("completed", 3)
    again = await retrain.train(load_config(config).model_dump())
    assert again.run_dir.name == "task-2"


def test_the_commands_are_listed_and_near_ones_suggested(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert command(["--help"]) == 0
    assert command([]) == 2
    assert "report" in capsys.readouterr().out
    assert command(["chek"]) == 2
    assert "check" in capsys.readouterr().err
    for far in ("merge", "sweep"):
        assert command([far]) == 2
        assert "did you mean" not in capsys.readouterr().err
    for option, hint in {
        "--nonsense": "unrecognized arguments: --nonsense",
        "--dryrun": "--dry-run",
        "--rum-dir": "--run-dir",
        "--resum": "--resume",  # no abbreviations
    }.items():
        with pytest.raises(SystemExit, match="2"):
            command(["run", "task.yaml", option])
        assert hint in capsys.readouterr().err.splitlines()[-1]
    assert command(["--version"]) == 0
    assert capsys.readouterr().out == f"retrain {retrain.__version__}\n"


def test_the_help_of_every_command_loads_nothing_heavy() -> None:
    script = (
        "import sys\n"
        "from contextlib import suppress\n"
        "from retrain.cli.commands import COMMANDS, command\n"
        "for name in COMMANDS:\n"
        "    with suppress(SystemExit):\n"
        "        command([name, '--help'])\n"
        "heavy = ('torch', 'transformers', 'pydantic', 'starlette', 'uvicorn', 'httpx')\n"
        "sys.exit(', '.join(m for m in heavy if m in sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.strip() == ""
    assert done.stdout.count("usage: retrain ") == 6


def test_schema_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "retrain run"


def test_report_writes_the_page_of_a_run(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(config)]) == 0
    capsys.readouterr()
    assert command(["report", "runs/task"]) == 0
    assert capsys.readouterr().out.strip() == "runs/task/report.html"
    assert command(["report", "runs/none"]) == 2
