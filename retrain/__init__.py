"""`retrain`: RL post-training for language models as one asyncio program."""
