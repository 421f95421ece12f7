"""The pipe: its stages, the run under way, and what survives a crash."""

from retrain.pipeline.stages import train

__all__ = [
    "train",
]
