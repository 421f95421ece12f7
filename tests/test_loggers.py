"""Loggers: they get finite rows in order, and whatever they do, the run goes on."""

from __future__ import annotations

import json
import logging
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.errors import ConfigError
from retrain.observe.callbacks import Callbacks
from retrain.observe.loggers import Logger
from retrain.observe.loggers.tensorboard import TensorBoardLogger
from retrain.observe.loggers.trackio import TrackioLogger
from retrain.observe.loggers.wandb import WandbLogger
from retrain.observe.run_dir import RunDirectory
from tests.observed import ObservedRun
from tests.run_dir_kit import config

ROWS = [{"step": 1, "loss": 0.5}, {"step": 2, "loss": math.nan, "entropy": 1.5}]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ObservedRun]:
    with RunDirectory.open(tmp_path / "maths", config()) as run_dir:
        yield ObservedRun(run_dir, config(environment={"type": "x", "api_key": "s3cret"}))


class Recording(Logger):
    def __init__(self) -> None:  # none of Logger's own: it needn't be called
        self.seen: list[Any] = []

    def open(self, trainer: Any) -> None:
        self.seen.append(("open", threading.current_thread() is not threading.main_thread()))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.seen.append((step, metrics))

    def close(self) -> None:
        self.seen.append("close")


class FailingAt(Recording):
    def __init__(self, hook: str) -> None:
        super().__init__()
        self.hook = hook

    def open(self, trainer: Any) -> None:
        self._fail("open")

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self._fail("log")

    def close(self) -> None:
        self._fail("close")

    def _fail(self, hook: str) -> None:
        self.seen.append(hook)
        if hook == self.hook:
            raise ConnectionError("no route to the service")


class Hanging(Recording):
    close_seconds = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.release = threading.Event()

    def log(self, step: int, metrics: dict[str, float]) -> None:
        self.release.wait()


async def test_a_logger_gets_finite_numbers_in_order_in_its_own_thread(run: ObservedRun) -> None:
    class Evaluated(Recording):
        def on_train_begin(self, trainer: Any) -> None:
            super().on_train_begin(trainer)
            self.on_eval_end(trainer, 2, {"eval/pass@4": 0.5, "reward": 1.0})

    logger = Evaluated()
    await run.play(Callbacks([logger]), ROWS)
    evaluation = (2, {"eval/pass@4": 0.5, "eval/reward": 1.0})
    rows = [(1, {"loss": 0.5}), (2, {"entropy": 1.5})]
    assert logger.seen == [("open", True), evaluation, *rows, "close"]
    assert not [t for t in threading.enumerate() if t.name == "retrain-Evaluated"]


@pytest.mark.parametrize("hook", ["open", "log", "close"])
async def test_a_logger_that_raises_is_disabled_with_one_warning(
    run: ObservedRun, caplog: pytest.LogCaptureFixture, hook: str
) -> None:
    logger = FailingAt(hook)
    with caplog.at_level(logging.WARNING):
        await run.play(Callbacks([logger]), ROWS)
    (warning,) = caplog.messages
    assert "ConnectionError" in warning
    assert logger.seen[-1] == hook
    assert logger.seen.count("log") <= (1 if hook == "log" else 2)
    assert isinstance(logger.failure, ConnectionError)


async def test_a_logger_that_hangs_is_left_behind(
    run: ObservedRun, caplog: pytest.LogCaptureFixture
) -> None:
    logger = Hanging()
    with caplog.at_level(logging.WARNING):
        await run.play(Callbacks([logger]), ROWS)
    logger.release.set()
    assert "Hanging" in caplog.text


async def test_rows_that_a_slow_service_cannot_take_are_counted(
    run: ObservedRun, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.observe.loggers.base.QUEUE_ROWS", 2)
    logger = Hanging()
    with caplog.at_level(logging.WARNING):
        await run.play(Callbacks([logger]), [{"step": step} for step in range(1, 11)])
    logger.release.set()
    assert logger.lost >= 7
    assert f"dropped {logger.lost} rows" in caplog.text


async def test_a_run_that_never_began_closes_its_loggers_quietly(run: ObservedRun) -> None:
    logger = Recording()
    await logger.on_train_end(run, None)  # type: ignore[arg-type]  # not looked at
    assert logger.seen == []


class NeedsALibrary(WandbLogger):
    library = "no_such_library_at_all"
    install = "no-such-library"


def test_a_missing_library_is_named_before_the_run_begins() -> None:
    with pytest.raises(ConfigError, match="no_such"):
        NeedsALibrary()


FAKE_LIBRARY = """
import json, pathlib
class _Run:
    id = "r1"
    def log(self, metrics, step): note("log", metrics, step)
    def finish(self): note("finish")
def note(*words):
    with open(pathlib.Path(__file__).with_suffix(".notes"), "a") as file:
        print(json.dumps(words), file=file)
def init(**settings):
    note("init", settings)
    return _Run()
class SummaryWriter:
    def __init__(self, folder, **keys): note("writer", folder, *keys.items())
    def add_scalar(self, key, value, step): note("scalar", key, value, step)
    def close(self): note("close")
"""


@pytest.fixture
def library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Path]:
    """A module that stands in for a tracking library, and notes what it is asked."""
    (tmp_path / f"{request.param}.py").write_text(FAKE_LIBRARY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield tmp_path / f"{request.param}.notes"
    sys.modules.pop(request.param, None)


def notes(library: Path) -> list[Any]:
    return [json.loads(line) for line in library.read_text().splitlines()]


@pytest.mark.parametrize("library", ["tensorboardX"], indirect=True)
async def test_tensorboard_gets_scalars_in_the_run_directory(
    run: ObservedRun, library: Path
) -> None:
    await run.play(Callbacks([TensorBoardLogger()]), ROWS)
    assert notes(library) == [
        ["writer", str(run.run_dir.path / "tensorboard")],
        ["scalar", "loss", 0.5, 1],
        ["scalar", "entropy", 1.5, 2],
        ["close"],
    ]


@pytest.mark.parametrize(
    ("library", "logger_class", "expected"),
    [
        ("tensorboardX", TensorBoardLogger, ["purge_step", 3]),
        ("wandb", WandbLogger, {"id": "r1", "resume": "allow"}),
    ],
    indirect=["library"],
)
async def test_a_resumed_run_doesnt_show_its_steps_twice(
    run: ObservedRun, library: Path, logger_class: type[Logger], expected: Any
) -> None:
    await run.play(Callbacks([logger_class()]), ROWS)
    begun = len(notes(library))
    run.run_dir.resumed, run.step = True, 2
    await run.play(Callbacks([logger_class()]), [])
    (_, *opened), *_ = notes(library)[begun:]
    if isinstance(expected, dict):
        assert expected.items() <= opened[0].items()
    else:
        assert opened[1] == expected


@pytest.mark.parametrize(
    ("library", "logger_class"),
    [("wandb", WandbLogger), ("trackio", TrackioLogger)],
    indirect=["library"],
)
async def test_trackers_get_the_configuration_and_every_row(
    run: ObservedRun, library: Path, logger_class: type[WandbLogger]
) -> None:
    await run.play(Callbacks([logger_class(project="rl", group="g1")]), ROWS)
    (init, settings), *rest = notes(library)
    assert init == "init"
    assert (settings["project"], settings["name"], settings["group"]) == ("rl", "maths", "g1")
    assert settings["config"]["environment"] == {"type": "x", "api_key": "(hidden)"}
    assert rest == [["log", {"loss": 0.5}, 1], ["log", {"entropy": 1.5}, 2], ["finish"]]
