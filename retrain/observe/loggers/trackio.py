"""Trackio."""

from __future__ import annotations

from retrain.observe.loggers.wandb import WandbLogger


class TrackioLogger(WandbLogger):
    """Trackio, with the same interface as wandb; its runs stay on this machine."""

    library = "trackio"
    extra = "trackio"
    takes_dir = False
