"""TensorBoard."""

from __future__ import annotations

import importlib
from typing import Any

from retrain.observe.callbacks import RunFace
from retrain.observe.loggers.base import Logger
from retrain.types import Metrics


class TensorBoardLogger(Logger):
    """Event files for TensorBoard, in the run directory's `tensorboard/`."""

    library = "tensorboardX"
    extra = "tensorboard"

    def open(self, trainer: RunFace) -> None:
        module: Any = importlib.import_module("tensorboardX")  # any: it ships no types
        again = {"purge_step": trainer.step + 1} if trainer.run_dir.resumed else {}
        self._writer = module.SummaryWriter(str(trainer.run_dir.path / "tensorboard"), **again)

    def log(self, step: int, metrics: Metrics) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()
