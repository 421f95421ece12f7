"""What both ends of a transfer of weights over a process group share: the group, and the packing.

A bucket is one byte tensor with several weights, broadcast at once. Rank 0 is the trainer, the
ranks above are the workers of the servers. A server's environment runs this file too, beside
`worker.py`, so it imports torch and the standard library only.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from typing import Any

import torch
from torch import Tensor

dist: Any = torch.distributed  # it exports its types through star imports, or not at all

EXTENSION = "retrain.vllm.worker.Extension"
"""The class for vLLM's `--worker-extension-cls`."""
ALIGNMENT = 16
"""Bytes; the position of a weight in a bucket must be a multiple of its element's size."""


@dataclass(frozen=True)
class Bucket:
    """The weights in one broadcast, in the order of their bytes."""

    names: Sequence[str]
    dtypes: Sequence[str]
    """Names of torch types, such as `bfloat16`."""
    shapes: Sequence[Sequence[int]]

    def spans(self) -> Iterator[tuple[str, torch.dtype, Sequence[int], int, int]]:
        """Each weight's name, type, shape, and its first and last byte in the bucket."""
        first = 0
        for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True):
            kind = getattr(torch, dtype)
            size = prod(shape) * kind.itemsize
            yield name, kind, shape, first, first + size
            first += -(-size // ALIGNMENT) * ALIGNMENT

    @property
    def size(self) -> int:
        """Bytes."""
        return max((last for *_, last in self.spans()), default=0)

    def pack(self, weights: Mapping[str, Tensor], device: torch.device) -> Tensor:
        """The bucket's bytes; `weights` may have other types, which are converted."""
        packed = torch.zeros(self.size, dtype=torch.uint8, device=device)
        for name, dtype, shape, first, last in self.spans():
            packed[first:last].view(dtype).view(list(shape)).copy_(weights[name])
        return packed

    def unpack(self, packed: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Names and weights, which share the bucket's memory."""
        for name, dtype, shape, first, last in self.spans():
            yield name, packed[first:last].view(dtype).view(list(shape))


def join(
    host: str,
    port: int,
    rank: int,
    world_size: int,
    backend: str,
    seconds: float,
    listener: int | None = None,
) -> Any:  # a process group; its Python class has few types
    """Join the group of `world_size` ranks that meets at `host:port`, with `gloo` or `nccl`.

    `seconds` limits the meeting and each broadcast. Rank 0 gives the descriptor of a socket that
    listens there. Raises RuntimeError (torch's DistError too) if the others don't come.
    """
    limit = timedelta(seconds=seconds)
    meeting: Any = dist.TCPStore(
        host,
        port,
        world_size,
        is_master=listener is not None,
        timeout=limit,
        wait_for_workers=False,
        master_listen_fd=listener,
    )
    store = dist.PrefixStore("retrain-weights", meeting)
    if backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit
        return dist.ProcessGroupNCCL(store, rank, world_size, nccl)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._timeout = limit
    own = host if rank == 0 else address_towards(host)
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    return dist.ProcessGroupGloo(store, rank, world_size, gloo)


def broadcast(group: Any, packed: Tensor) -> None:
    """Send from rank 0 to all; returns when this rank is done. Raises RuntimeError."""
    group.broadcast([packed], dist.BroadcastOptions()).wait()
    if packed.device.type != "cpu":  # NCCL's wait is the stream's, not the thread's
        torch.accelerator.synchronize()


def address_towards(host: str) -> str:
    """This machine's own address on the way to `host`; nothing is sent."""
    family, kind, protocol, _, place = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(place)
        return str(probe.getsockname()[0])
