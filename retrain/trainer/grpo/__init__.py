"""The older retrain's GRPO trainers, one module per backend."""
