"""Tinker: a typed async client of its protocol, and the adapter that trains with it.

Importing this package loads no httpx; making a client does.
"""

from __future__ import annotations

from retrain.adapters.tinker.client import TinkerClient
from retrain.adapters.tinker.sampling import SamplingClient
from retrain.adapters.tinker.training import TrainingClient
from retrain.protocols.tinker.values import (
    Datum,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    Tensor,
)
from retrain.protocols.training import AdamParams, LoraConfig
from retrain.sampler import SamplingParams

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
