"""Trackio."""

from __future__ import annotations

from typing import Any

from retrain.observe.callbacks import Run
from retrain.observe.loggers.wandb import WandbLogger


class TrackioLogger(WandbLogger):
    """Trackio, which keeps its runs on this machine and has wandb's face."""

    library = "trackio"
    extra = "trackio"

    def _own_settings(self, trainer: Run) -> dict[str, Any]:
        return self._settings
