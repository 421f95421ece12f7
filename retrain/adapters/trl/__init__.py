"""TRL's GRPO on this machine: CUDA, or the CPU as the embedded default."""
