"""Torch code that the TRL adapter and the local service share: sampler, losses, models, weights."""
