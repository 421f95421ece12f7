"""Callbacks: order, sync and async hooks, isolation, and what happens when one raises."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from retrain.observe.callbacks import Callback, Callbacks, TrainingResult, tenths
from retrain.observe.run_dir import RunDirectory
from tests.observed import ObservedRun
from tests.run_dir_kit import config


@pytest.fixture
def run(tmp_path: Path) -> Iterator[ObservedRun]:
    with RunDirectory.open(tmp_path / "run", config()) as run_dir:
        yield ObservedRun(run_dir)


class Noting(Callback):
    def __init__(self, name: str, notes: list[Any]) -> None:
        self.name, self.notes = name, notes

    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        self.notes.append((self.name, step, dict(metrics)))
        metrics["loss"] = -1.0


class NotingLater(Noting):
    async def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        super().on_step_end(trainer, step, metrics)


class Raising(Callback):
    def on_step_end(self, trainer: Any, step: int, metrics: dict[str, float]) -> None:
        raise KeyError("reward")

    def on_train_end(self, trainer: Any, result: TrainingResult) -> None:
        raise ValueError("first")


class RaisingToo(Callback):
    called = False

    async def on_train_end(self, trainer: Any, result: TrainingResult) -> None:
        self.called = True
        raise RuntimeError("second")


async def test_hooks_run_in_order_each_with_metrics_of_its_own(run: ObservedRun) -> None:
    notes: list[Any] = []
    row = {"step": 1, "loss": 0.5}
    callbacks = Callbacks([NotingLater("a", notes), Noting("b", notes)])
    await callbacks.call("on_step_end", run, 1, row)
    assert notes == [("a", 1, row), ("b", 1, row)]
    assert row == {"step": 1, "loss": 0.5}


async def test_every_callback_hears_of_the_end_and_the_first_error_is_raised(
    run: ObservedRun, tmp_path: Path
) -> None:
    last = RaisingToo()
    with pytest.raises(ValueError, match="first"):
        await Callbacks([Raising(), last]).end(
            run, TrainingResult("completed", 0, 0, tmp_path), 60.0
        )
    assert last.called


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([], (math.nan, math.nan)),
        ([0.25], (0.25, 0.25)),
        ([0.0, 1.0], (0.0, 1.0)),
        ([i / 20 for i in range(20)], (0.025, 0.925)),
        ([math.nan, 0.5, 1.0], (0.5, 1.0)),
    ],
)
def test_tenths(rewards: list[float], expected: tuple[float, float]) -> None:
    found = tenths([{"reward/mean": reward} for reward in rewards])
    assert found == pytest.approx(expected, nan_ok=True)
