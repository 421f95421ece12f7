"""The trainers of NeMo RL's page as presets of a run."""
