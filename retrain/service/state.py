"""What the service is told, and what it remembers while it runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is heavy, and Settings are made without
    from retrain.service.jobs import Lane
    from retrain.service.store import Place
    from retrain.service.trainer import Trainer, Tuning


@dataclass(frozen=True, slots=True)
class Settings:
    """What the service is told when it starts."""

    model: str = "tiny"
    """`tiny`, a local folder, or a Hugging Face id: the one base model that is served."""
    folder: Path | None = None
    """Checkpoints; None takes a temporary folder that goes with the service."""
    api_key: str | None = field(default=None, repr=False)
    """What clients must send; None asks for nothing."""
    device: str | None = None
    """None: cuda where there is one, else cpu."""
    threads: int = 1
    """CPU threads of the trainer, and of each sampler."""
    max_live_samplers: int = 4
    """Snapshots whose weights are in memory at once for sampling."""
    max_rows: int = 256
    """Completions that one sampler decodes at once."""
    session_ttl: float = 900.0
    """Seconds of silence that end a session."""
    snapshot_ttl: float = 3600.0
    """Seconds without a sample that end a snapshot which only a sampling session knows."""
    gap_timeout: float = 300.0
    """Seconds that a numbered request waits for the missing number before it."""
    long_poll: float = 30.0
    """Seconds that a Tinker future is waited for in one request."""
    max_body: int = 256 * 2**20
    """Bytes of one request, decompressed."""


@dataclass(slots=True, eq=False)
class Session:
    id: str
    models: Lane
    seen: float
    """Last sign of life, on the monotonic clock."""
    owned: dict[str, Model | SamplingSession] = field(default_factory=dict)
    finished: bool = False


@dataclass(slots=True, eq=False)
class Model:
    id: str
    session: Session
    lane: Lane
    tuning: Tuning
    metadata: Mapping[str, Any]  # the client's own JSON
    created_at: float = field(default_factory=time.time)
    trainer: Trainer | None = None
    """Touched in the trainers' thread alone; None until it's built there."""


@dataclass(slots=True, eq=False)
class SamplingSession:
    id: str
    session: Session
    lane: Lane
    place: Place | None
    """The snapshot that it samples; None is the base model."""
    path: str | None = None
    """As the client named it; None for the base model, and for a snapshot without a name."""
    used: float = field(default_factory=time.monotonic)
    """Last sample, on the monotonic clock."""
