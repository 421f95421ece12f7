"""Trainer objects on top of the pipe: NeMo RL's API here, others in `grpo` and `nexrl`.

    trainer = GRPOTrainer.from_pretrained("tiny", num_prompts_per_step=8)
    result = trainer.fit(dataset="data/echo.jsonl", reward_fn=my_reward, max_steps=100)

Importing this package loads no torch.
"""

from retrain.observe.callbacks import Callback, TrainingResult
from retrain.trainer.base import BaseTrainer
from retrain.trainer.nemo.environments import EnvironmentInterface, EnvironmentReturn
from retrain.trainer.nemo.presets import DPOTrainer, GRPOTrainer, RLOOTrainer, SFTTrainer
from retrain.trainer.nemo.scoring import batched
from retrain.trainer.registry import (
    create_trainer,
    get_algorithm,
    list_algorithms,
    register_algorithm,
)

__all__ = [
    "BaseTrainer",
    "Callback",
    "DPOTrainer",
    "EnvironmentInterface",
    "EnvironmentReturn",
    "GRPOTrainer",
    "RLOOTrainer",
    "SFTTrainer",
    "TrainingResult",
    "batched",
    "create_trainer",
    "get_algorithm",
    "list_algorithms",
    "register_algorithm",
]
