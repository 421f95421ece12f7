"""Further sinks of the metrics: one file per logger, found by its name."""

from retrain.observe.loggers.base import Logger

__all__ = ["Logger"]
