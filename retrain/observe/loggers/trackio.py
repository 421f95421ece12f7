"""Trackio."""

from __future__ import annotations

from retrain.observe.loggers.wandb import WandbLogger


class TrackioLogger(WandbLogger):
    """Trackio, which keeps its runs on this machine and has wandb's face."""

    library = "trackio"
    extra = "trackio"
    takes_dir = False
