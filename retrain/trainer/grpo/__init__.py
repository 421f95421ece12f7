"""The older retrain's home of its GRPO trainers, one module a backend."""
