"""Weaver: a typed async client of its protocol, and the adapter that trains with it.

Importing this package loads no torch and no httpx; making a client loads httpx.
"""

from retrain.adapters.weaver.client import WeaverClient
from retrain.adapters.weaver.wire import TrainingRow
from retrain.sampler import SamplingParams
from retrain.wire.training import AdamParams, LoraConfig

__all__ = ["AdamParams", "LoraConfig", "SamplingParams", "TrainingRow", "WeaverClient"]
