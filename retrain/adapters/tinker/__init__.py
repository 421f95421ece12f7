"""Tinker: a typed async client of its protocol, and the adapter that trains with it.

Importing this package loads no httpx; making a client does.
"""

from __future__ import annotations

from retrain.adapters.tinker.client import TinkerClient
from retrain.adapters.tinker.sampling import SamplingClient
from retrain.adapters.tinker.training import TrainingClient
from retrain.sampler import SamplingParams
from retrain.wire.tinker.values import (
    Datum,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    Tensor,
)
from retrain.wire.training import AdamParams, LoraConfig

__all__ = [
    "AdamParams",
    "Datum",
    "ForwardBackwardOutput",
    "LoraConfig",
    "SampleResult",
    "SampledSequence",
    "SamplingClient",
    "SamplingParams",
    "Tensor",
    "TinkerClient",
    "TrainingClient",
]
