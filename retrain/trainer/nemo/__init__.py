"""NeMo RL's trainer API: trainers with `from_pretrained` and `fit`, as presets of a run."""
