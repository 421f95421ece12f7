"""The older retrain's GRPO trainers, one module per backend."""

from retrain.trainer.grpo.trl import GRPOTrainer, GRPOTrainerAdapter

__all__ = ["GRPOTrainer", "GRPOTrainerAdapter"]
