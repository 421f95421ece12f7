"""Orders from the leader to its followers, over a process group apart from the gradients' one.

Its transport is gloo, also on CUDA, and it waits for as long as it takes: between two orders a run
samples. A leader that ends breaks the connection, and its followers notice at once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from retrain.adapters.trl.ranks.contract import Place
from retrain.errors import AdapterError, RetrainError

STOP = "stop"
"""The last order."""
COLLECTIVE_TIMEOUT = timedelta(days=7)
"""In effect none: a step that hangs is ended by the run's own deadlines, with its processes."""
POLL_SECONDS = 0.02
T = TypeVar("T")


class OutOfStepError(AdapterError):
    """The ranks can't go on together: one is lost, or failed where the others did not."""


class Order(NamedTuple):
    """What every rank does next."""

    name: str
    args: tuple[Any, ...] = ()  # whatever can be pickled
    share: Any = None  # the same, for this rank only


class Ranks:
    """This process among those that train together; its methods belong to one thread.

    Every rank makes one at the same time, by `join`.
    """

    def __init__(self, place: Place | None) -> None:
        self.place = place
        self.rank, self.size = (place.rank, place.size) if place else (0, 1)
        self._group = dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT) if place else None

    def lead(self, name: str, *args: Any, shares: Sequence[Any] | None = None) -> None:
        """Send an order to all followers, of values that can be pickled.

        `shares` has one value per rank, of which a follower gets its own; that of rank 0 is unused.
        """
        if self._group is not None:
            dist.broadcast_object_list([(name, args, shares is not None)], 0, self._group)
            if shares is not None:
                dist.scatter_object_list([None], [None, *shares[1:]], 0, self._group)

    def follow(self) -> Order:
        """Wait for the leader's next order."""
        received: list[Any] = [None]
        dist.broadcast_object_list(received, 0, self._group)
        [(name, args, shared)] = received
        share: list[Any] = [None]
        if shared:
            dist.scatter_object_list(share, None, 0, self._group)
        return Order(name, args, share[0])

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, by rank, on every rank; for small ones: findings and sums."""
        if self._group is None:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._group)
        return found

    def together(self, call: Callable[[], T]) -> T:
        """Call on every rank, and raise on every rank if it failed on one.

        A rank raises its own error, an unexpected one as AdapterError, or else AdapterError with
        that of another rank. An OutOfStepError is raised at once, since the others can't meet here.
        """
        error: Exception | None = None
        try:
            result = call()
        except OutOfStepError:
            raise
        except Exception as raised:
            if lost_peer(raised):
                raise
            error = raised
            if not isinstance(raised, RetrainError):
                error = AdapterError(f"the trainer failed: {type(raised).__name__}: {raised}")
                error.__cause__ = raised
        failed = self.gather(None if error is None else str(error))
        if error is not None:
            raise error
        for rank, text in enumerate(failed):
            if text is not None:
                raise AdapterError(f"rank {rank} of {self.size} failed: {text}")
        return result

    def leave(self) -> None:
        """End this process's groups; those of the other ranks then fail."""
        if self._group is not None:
            self._group = None
            dist.destroy_process_group()


ALONE = Ranks(None)
"""The group of a process that trains alone."""


def join(
    place: Place,
    store: Any = None,  # a torch Store, which torch doesn't export to type checkers
    *,
    cuda: bool = False,
    waiting: Callable[[], None] = lambda: None,
) -> Ranks:
    """Meet the other ranks, in torch's default process group and the orders' one.

    `store` is the leader's of a crew. `waiting` is called while the leader of a crew waits for its
    followers to start, and may raise to give up. Raises AdapterError if this process is in a group
    already.
    """
    if dist.is_initialized():
        raise AdapterError(
            "this process already trains together with others; a process can take part in one "
            "such run at a time"
        )
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if cuda:
        torch.cuda.set_device(place.local_rank)
    if not place.spawned:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
        return Ranks(place)
    if store is None:
        store = open_store(place.address, place.port, place.size)
        store.set(f"ready/{place.rank}", str(os.getpid()))
    else:
        ready = [f"ready/{rank}" for rank in range(1, place.size)]
        while not store.check(ready):
            waiting()
            time.sleep(POLL_SECONDS)
    dist.init_process_group(
        backend,
        store=dist.PrefixStore(  # type: ignore[attr-defined]  # see open_store
            "retrain", store
        ),
        rank=place.rank,
        world_size=place.size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return Ranks(place)


def open_store(address: str, port: int, size: int, *, serve: bool = False) -> Any:
    """The store in which `size` ranks meet; with `serve` and port 0 the system chooses the port."""
    return dist.TCPStore(  # type: ignore[attr-defined]  # torch doesn't export it explicitly
        address, port, size, is_master=serve, wait_for_workers=False
    )


def lost_peer(error: BaseException | None) -> bool:
    """Whether an error, or its cause, says that another rank has ended or can't be reached."""
    while error is not None:
        text = str(error)
        if isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and ("gloo" in text or "NCCL" in text)
        ):
            return True
        error = error.__cause__
    return False
