"""Weights & Biases."""

from __future__ import annotations

import importlib
from typing import Any

from retrain.observe.callbacks import RunFace
from retrain.observe.loggers.base import Logger
from retrain.observe.run_dir import resolved
from retrain.types import Metrics


class WandbLogger(Logger):
    """Weights & Biases; the key comes from WANDB_API_KEY or `wandb login`.

    Further keys (entity, group, tags, mode, ...) are passed to `wandb.init`.

    Args:
        project: The project to log to.
        name: The name of the run; by default the run directory's.
    """

    library = "wandb"
    extra = "wandb"
    takes_dir = True
    """Whether `init` takes the folder of its files, and the id of a run to continue."""

    def __init__(self, project: str = "retrain", name: str | None = None, **settings: Any) -> None:
        super().__init__()
        self._project, self._name_given, self._settings = project, name, settings

    def open(self, trainer: RunFace) -> None:
        wandb: Any = importlib.import_module(self.library)  # any: not a dependency of ours
        mark = trainer.run_dir.path / "wandb.id"
        again: dict[str, Any] = {}
        if trainer.run_dir.resumed and mark.is_file():  # wandb ignores rows that it has
            again = {"id": mark.read_text(encoding="utf-8"), "resume": "allow"}
        self._run = wandb.init(
            project=self._project,
            name=self._name_given or trainer.run_dir.path.name,
            config=resolved(trainer.config),
            **({"dir": str(trainer.run_dir.path)} if self.takes_dir else {})
            | again
            | self._settings,
        )
        if self.takes_dir:
            mark.write_text(str(self._run.id), encoding="utf-8")

    def log(self, step: int, metrics: Metrics) -> None:
        self._run.log(metrics, step=step)

    def close(self) -> None:
        self._run.finish()
