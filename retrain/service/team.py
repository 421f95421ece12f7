"""The processes of the service's trainer: `retrain serve --processes N`, or a launcher's ranks.

Rank 0 is the service. It starts the others, unless a launcher such as torchrun has; they run
`follow_service`. Work on rank 0 belongs to the trainers' thread, except `start` and `end`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from retrain.engine.available import too_few_devices
from retrain.engine.models import choose_device, load_model, resolve_model
from retrain.engine.ranks.contract import Place, ignore_signals, launched
from retrain.engine.ranks.crew import Crew
from retrain.engine.ranks.group import ALONE, STOP, Ranks, join, lost_peer
from retrain.errors import AdapterError, ConfigError
from retrain.service.state import Settings
from retrain.service.trainable import ShardedBase
from retrain.service.trainer import follow

_FOLLOWER = "retrain.service.team:follow_service"


@dataclass(frozen=True, slots=True)
class Work:
    """What every rank must know to load the base model."""

    folder: str
    """Of the model, or its Hugging Face id."""
    device: str
    threads: int
    sharded: bool

    @property
    def cuda(self) -> bool:
        return self.device.startswith("cuda")

    def base(self, ranks: Ranks) -> PreTrainedModel | ShardedBase:
        """The base model as this rank holds it."""
        if not self.sharded:
            return load_model(self.folder, self.device).requires_grad_(False)
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cuda" if self.cuda else "cpu", (ranks.size,))
        return ShardedBase(partial(load_model, self.folder, "cpu"), mesh)


def work_of(settings: Settings) -> Work:
    """Raises ConfigError if the model or the device is not available."""
    device = _device(settings)
    folder = resolve_model(settings.model, Path())
    return Work(folder, device, settings.threads, settings.sharding == "full")


def _device(settings: Settings) -> str:
    """The device of the settings, or the one that is available; raises ConfigError."""
    device = settings.device or choose_device()
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter in a build without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {device} is not available: {reason}; use cpu") from error
    if settings.processes > 1 and device.startswith("cuda"):
        _check_devices(device, settings.processes)
    return device


class Team:
    """All ranks, as rank 0 sees them."""

    def __init__(self, processes: int, lost: Callable[[AdapterError], None]) -> None:
        self.ranks = ALONE
        self._processes, self._lost = processes, lost
        self._crew: Crew | None = None
        self._place: Place | None = None
        self._logs: tempfile.TemporaryDirectory[str] | None = None

    async def start(self, work: Work) -> None:
        """Start the followers, unless a launcher has; raises AdapterError."""
        if self._processes == 1:
            return
        self._place = launched()
        if self._place is None:
            self._logs = tempfile.TemporaryDirectory(prefix="retrain-serve-")
            self._crew = await Crew.start(
                self._processes, _FOLLOWER, work, folder=Path(self._logs.name), lost=self._lost
            )
            self._place = self._crew.place

    def meet(self, work: Work, waiting: Callable[[], None]) -> None:
        """Wait until all ranks are there; `waiting` may raise to give up."""
        if self._place is not None:
            store = self._crew.store if self._crew else None
            self.ranks = join(self._place, store, cuda=work.cuda, waiting=waiting)

    def stop(self) -> None:
        """Tell the followers to end."""
        self.ranks.lead(STOP)
        self.ranks.leave()

    async def loss(self) -> AdapterError | None:
        """How the first follower ended, if one did."""
        return await self._crew.loss() if self._crew else None

    async def end(self, *, at_once: bool = False) -> None:
        """End the followers that this process started."""
        if self._crew is not None:
            await (self._crew.end(0.0) if at_once else self._crew.end())
        if self._logs is not None:
            self._logs.cleanup()


def follow_service(place: Place, work: Work) -> None:
    """The life of a follower; raises AdapterError if it can't go on with the others."""
    ignore_signals()
    torch.set_num_threads(work.threads)
    ranks = join(place, cuda=work.cuda)
    try:
        follow(work.base(ranks), ranks)
    except RuntimeError as error:
        if lost_peer(error):
            raise AdapterError(f"rank {place.rank}: rank 0 or another process has ended") from error
        raise
    ranks.leave()


def _check_devices(device: str, processes: int) -> None:
    if device != "cuda":
        raise ConfigError(
            f"--device {device}: with --processes {processes} each process needs its own GPU; use "
            "cuda, and choose the GPUs with CUDA_VISIBLE_DEVICES"
        )
    place = launched()
    if problem := too_few_devices("--processes", place.local_size if place else processes):
        raise ConfigError(problem)
