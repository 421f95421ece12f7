"""Weaver: a typed async client of its REST protocol, and the adapter on top of it.

`WeaverClient` is usable by itself; nothing here imports torch, and httpx only when it connects.
"""

from retrain.adapters.weaver.client import WeaverClient
from retrain.adapters.weaver.wire import TrainingRow
from retrain.protocols.training import AdamParams, LoraConfig
from retrain.sampler import SamplingParams

__all__ = ["AdamParams", "LoraConfig", "SamplingParams", "TrainingRow", "WeaverClient"]
