"""NeMo RL's trainer API: trainers with `from_pretrained` and `fit`, as presets of a run."""

from retrain.trainer.nemo.environments import EnvironmentInterface, EnvironmentReturn
from retrain.trainer.nemo.presets import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer
from retrain.trainer.nemo.scoring import batched

__all__ = [
    "DPOTrainer",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GRPOTrainer",
    "RLOOTrainer",
    "SFTTrainer",
    "batched",
]
