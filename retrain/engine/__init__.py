"""Torch, shared by the TRL adapter and the local service: sampler, losses, models, weights."""
