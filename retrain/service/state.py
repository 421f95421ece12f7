"""The settings of the service, and its sessions and models."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is heavy, and ServiceSettings need none
    from retrain.service.jobs import Lane
    from retrain.service.store import CheckpointPlace
    from retrain.service.trainer import Trainer
    from retrain.service.tuning import Tuning
    from retrain.vllm.options import VllmOptions


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """How to run the service."""

    model: str = "tiny"
    """`tiny`, a local folder, or a Hugging Face id: the one base model that is served."""
    folder: Path = Path("service")
    """For checkpoints."""
    api_key: str | None = field(default=None, repr=False)
    """The key that clients must send; None requires no key."""
    hosts: tuple[str, ...] | None = None
    """The names that a request may address in its Host header; None checks no name."""
    device: str | None = None
    """None is cuda if available, else cpu."""
    threads: int = 1
    """CPU threads of the trainer, and of each sampler."""
    vllm: VllmOptions | None = None
    """The vLLM servers that sample; None is the local sampler."""
    max_live_samplers: int = 4
    """Snapshots in memory at once for sampling."""
    session_ttl: float = 900.0
    """Seconds of silence that end a session."""
    snapshot_ttl: float = 3600.0
    """Seconds without a sample after which an unnamed snapshot is deleted."""
    gap_timeout: float = 300.0
    """Seconds that a numbered request waits for a missing lower number."""
    long_poll: float = 30.0
    """Seconds that one request waits for a Tinker future."""
    max_body: int = 256 * 2**20
    """Bytes of a decompressed request."""
    max_values: int = 2**24
    """Numbers in a request, or in the result of a sample request; each takes about 32 bytes."""
    max_samples: int = 1024
    """Completions of one request."""
    max_top: int = 128
    """Tokens of one position: of top-k log-probs, and of a training target."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """The limits of the HTTP server."""

    header_timeout: float = 20.0
    """Seconds in which the head of a request must arrive."""
    body_timeout: float = 60.0
    """Seconds in which its body must arrive, and one more for each 1000 bytes."""
    max_connections: int = 4096
    shutdown: int = 10
    """Seconds that running requests may take after a signal."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """What one request may ask for, by the model and by the settings."""

    vocabulary: int
    context: int | None
    values: int
    samples: int
    top: int


@dataclass(slots=True, eq=False)
class ServiceSession:
    id: str
    models: Lane
    seen: float
    """Time of the last request, on the monotonic clock."""
    finished: bool = False


@dataclass(slots=True, eq=False)
class Model:
    id: str
    session: ServiceSession
    lane: Lane
    tuning: Tuning
    metadata: Mapping[str, Any]  # the client's own JSON
    created_at: float = field(default_factory=time.time)
    trainer: Trainer | None = None
    """Used only in the trainers' thread; None until it is built there."""


@dataclass(slots=True, eq=False)
class SamplerSession:
    id: str
    session: ServiceSession
    lane: Lane
    place: CheckpointPlace | None
    """The snapshot to sample; None is the base model."""
    path: str | None = None
    """The client's path; None for the base model and for an unnamed snapshot."""
    used: float = field(default_factory=time.monotonic)
    """Time of the last sample, on the monotonic clock."""
