"""The pipe: its stages, the state of a run, what it records, and its checkpoints."""

from retrain.pipeline.stages import train

__all__ = ["train"]
