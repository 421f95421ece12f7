"""The fastest way for all weights: a broadcast over a torch process group.

Rank 0 is this process, in a daemon thread, since a broadcast to a dead peer may hang. A server that
fails is left out, and the others get all weights again over a new group.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import traceback
import urllib.parse
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from torch import Tensor

from retrain.supervision.threads import DaemonPool
from retrain.vllm.checkpoint import parts, sent_type
from retrain.vllm.client import VllmClient
from retrain.vllm.delivery import Failures, Weights, WholeDelivery, while_alive
from retrain.vllm.options import is_here
from retrain.vllm.transfer import Bucket, address_towards, broadcast, join

BUCKET_BYTES = 256 << 20
SECONDS = 60.0
"""Limit of a meeting and of the broadcast of one bucket."""
GRACE = 10.0
"""Seconds after that limit in which a server must have answered."""
log = logging.getLogger(__name__)


class GroupDelivery(WholeDelivery):
    """Keeps the present weights, which must not change before the next `prepare`.

    NCCL connects the ranks if the weights are on a CUDA device, and gloo if not, or if NCCL failed.
    """

    together = True

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = BUCKET_BYTES,
        seconds: float = SECONDS,
    ) -> None:
        super().__init__(model, dtype)
        self._backend = ""
        self._bucket_bytes, self._seconds = bucket_bytes, seconds
        self._workers: dict[VllmClient, int] = {}
        self._weights: Mapping[str, Tensor] = {}
        self._group: Any = None  # a torch process group
        self._members: list[VllmClient] = []
        self._threads = DaemonPool(4, "retrain-transfer")

    async def meet(self, server: VllmClient) -> None:
        await super().meet(server)
        self._workers[server] = await server.world_size()
        if server in self._members:
            self._leave()

    async def prepare(self, weights: Weights, version: int) -> None:
        self._weights, _ = await self._complete(weights)
        self._version = version

    async def _load(self, servers: Sequence[VllmClient]) -> Failures:
        failures: Failures = {}
        alive, tries = list(servers), 2
        while alive:
            found = await self._attempt(alive)
            if found is None:
                break
            self._leave()
            tries -= 1
            usable = await self._usable(found)
            unusable = {server: e for server, e in found.items() if server not in usable}
            if not unusable and self._nccl:  # it can't connect two processes that share a card
                reason = next(iter(found.values()))
                log.warning("the transfer over NCCL failed; trying gloo: %s", reason)
                self._backend = "gloo"
            if not unusable and tries <= 0:
                unusable = found
            failures |= unusable
            alive = [server for server in alive if server not in unusable]
        return failures

    async def close(self) -> None:
        self._leave()
        self._weights = {}
        self._threads.close()

    async def _attempt(self, servers: list[VllmClient]) -> Failures | None:
        """Send all weights; None if it worked, else why it did not, for each server."""
        try:
            if self._group is None or self._members != servers:
                await self._form(servers)
            buckets = list(parts(self._weights, self._bucket_bytes, self._dtype))
            for number, names in enumerate(buckets, 1):
                await self._send(servers, names, begin=number == 1, end=number == len(buckets))
        except _FailedError as error:
            return {server: error.failures.get(server, error) for server in servers}
        return None

    async def _form(self, servers: list[VllmClient]) -> None:
        """A new group of this process and the workers of all servers."""
        self._leave()
        far = [urllib.parse.urlsplit(s.url).hostname or "" for s in servers if not is_here(s.url)]
        own = address_towards(far[0]) if far else "127.0.0.1"
        family = socket.AF_INET6 if ":" in own else socket.AF_INET
        with socket.create_server((own, 0), family=family, backlog=1024) as listening:
            port, listener = listening.getsockname()[1], listening.detach()
        world = 1 + sum(self._workers[server] for server in servers)
        meeting = {"host": own, "port": port, "world_size": world, "seconds": self._seconds}
        meeting["backend"] = backend = "nccl" if self._nccl else "gloo"

        def init(server: VllmClient) -> Coroutine[Any, Any, None]:
            before = servers[: servers.index(server)]
            first = 1 + sum(self._workers[other] for other in before)
            return server.call("retrain_join", **meeting, first=first)

        self._group = await self._beside(
            servers, init, lambda: join(own, port, 0, world, backend, self._seconds, listener)
        )
        self._members = servers

    async def _send(
        self, servers: list[VllmClient], names: Sequence[str], *, begin: bool, end: bool
    ) -> None:
        """One bucket."""
        tensors = [self._weights[name] for name in names]
        types = [str(sent_type(tensor, self._dtype)).removeprefix("torch.") for tensor in tensors]
        bucket = Bucket(names, types, [list(tensor.shape) for tensor in tensors])
        packed = bucket.pack(
            self._weights, tensors[0].device if self._nccl else torch.device("cpu")
        )
        info = {**asdict(bucket), "begin": begin, "end": end}
        await self._beside(
            servers,
            lambda server: server.call("retrain_receive", **info),
            partial(broadcast, self._group, packed),
        )

    async def _beside(
        self,
        servers: list[VllmClient],
        call: Callable[[VllmClient], Coroutine[Any, Any, None]],
        own: Callable[[], Any],
    ) -> Any:
        """`own()` in a thread beside the same call to all servers; raises _FailedError.

        After a failure the others get the time to fail too: gloo closes their connections, or
        their own limit ends the wait.
        """
        mine = asyncio.ensure_future(self._threads.run(own))
        calls = [asyncio.ensure_future(while_alive(s, call(s))) for s in servers]
        tasks = [mine, *calls]
        try:
            await asyncio.wait(
                tasks, timeout=self._seconds + GRACE, return_when=asyncio.FIRST_EXCEPTION
            )
            if any(task.done() and task.exception() for task in tasks):
                if mine.done() and (error := mine.exception()):
                    traceback.clear_frames(error.__traceback__)
                del own
                self._leave()  # now nothing refers to the group, which closes its connections
                await asyncio.wait(calls, timeout=self._seconds + GRACE)  # `mine` may hang
            late = TimeoutError(f"no answer within {self._seconds + GRACE:g} s")
            errors = [(task.exception() if task.done() else late) for task in tasks]
        finally:
            if not all(task.done() for task in tasks):
                self._leave()  # a broadcast may be under way
            for task in tasks:
                task.cancel()
        if any(errors):
            failed = zip(servers, errors[1:], strict=True)
            raise _FailedError({s: e for s, e in failed if isinstance(e, Exception)}, errors[0])
        return mine.result()

    async def _usable(self, found: Failures) -> set[VllmClient]:
        """Servers that are alive, and that answered, so that another attempt may succeed."""
        answered = [s for s, error in found.items() if not isinstance(error, TimeoutError)]
        lives = await asyncio.gather(*(server.health() for server in answered))
        return {server for server, alive in zip(answered, lives, strict=True) if alive}

    @property
    def _nccl(self) -> bool:
        device = next(iter(self._weights.values())).device
        return self._backend != "gloo" and device.type == "cuda"

    def _leave(self) -> None:
        self._group, self._members = None, []


class _FailedError(Exception):
    """Part of a transfer failed."""

    def __init__(self, failures: Failures, own: BaseException | None) -> None:
        super().__init__(f"the transfer failed: {own}" if own else "the transfer failed")
        self.failures = failures
