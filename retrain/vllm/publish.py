"""Publisher: gives the weights of a run to its vLLM servers, one version after the other.

A server whose update failed, or was cancelled, is unusable: layers of it have no weights. Its
label then is `UNKNOWN`, so that no completion of it counts as one of a version, and it must be
brought up again. A server that was paused is resumed in any case.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress

from retrain.engine.weights import LoraWeights
from retrain.errors import AdapterError
from retrain.vllm.client import VllmClient
from retrain.vllm.delivery import Delivery, Failures, Weights, each, while_alive
from retrain.vllm.options import InFlight

UNKNOWN = "unknown"
"""The label of weights that no version is."""
RESUME_SECONDS = 60.0
"""How long `close` waits until paused servers have been resumed."""


class PublishError(AdapterError):
    """Servers that did not get the weights; each needs to be brought up again."""

    def __init__(self, failed: Mapping[VllmClient, Exception]) -> None:
        self.failed = failed
        super().__init__("; ".join(f"{server.url}: {error}" for server, error in failed.items()))


class Publisher:
    """Publishes by one `delivery`, or adapters by another; what happens to running requests
    meanwhile is `in_flight`.

    `seconds` limits the update of a server, its pause included. One call runs at a time.
    """

    def __init__(
        self,
        delivery: Delivery,
        adapters: Delivery | None = None,
        *,
        in_flight: InFlight = "recompute",
        seconds: float = 600.0,
    ) -> None:
        self._delivery, self._adapters = delivery, adapters or delivery
        self._in_flight, self._seconds = in_flight, seconds
        self._met: dict[Delivery, set[VllmClient]] = {}
        """The servers that each delivery which has published knows."""
        self._resuming: set[asyncio.Task[None]] = set()

    async def publish(self, servers: Sequence[VllmClient], weights: Weights, version: int) -> None:
        """Serve the weights at all of these servers, and keep them for `bring_up`.

        Raises PublishError if some servers failed; the others serve the weights. Raises
        AdapterError, and changes no server, if the weights don't fit the model or can't be written.
        """
        delivery = self._adapters if isinstance(weights, LoraWeights) else self._delivery
        met = self._met.get(delivery, set())
        failures = await each([s for s in servers if s not in met], delivery.meet)
        await delivery.prepare(weights, version)
        self._met[delivery] = met | set(servers) - failures.keys()
        failures |= await self._switch(delivery, [s for s in servers if s not in failures])
        if failures:
            raise PublishError(failures)

    async def bring_up(self, server: VllmClient) -> None:
        """Give a server all weights that are served now; raises AdapterError if it failed.

        The server may be new or restarted, or its last publish may have failed.
        """
        if not self._met:
            raise AdapterError(f"{server.url}: nothing is published yet")
        for delivery, met in self._met.items():
            failures = await each([server], delivery.meet) or await self._switch(delivery, [server])
            if failures:
                raise PublishError(failures)
            met.add(server)

    async def retire(self, servers: Sequence[VllmClient], version: int) -> None:
        """An older version is no longer sampled: free what the servers and the disk hold of it."""
        await self._adapters.retire(servers, version)

    async def close(self) -> None:
        """Free files and connections, once paused servers have been resumed."""
        if self._resuming:
            await asyncio.wait(self._resuming, timeout=RESUME_SECONDS)
        for task in self._resuming:
            task.cancel()
        for delivery in {self._delivery, self._adapters}:
            await delivery.close()

    async def _switch(self, delivery: Delivery, servers: Sequence[VllmClient]) -> Failures:
        if not servers:
            return {}
        batches = [list(servers)] if delivery.together else [[server] for server in servers]
        found = await asyncio.gather(*(self._update(delivery, batch) for batch in batches))
        return {server: error for failures in found for server, error in failures.items()}

    async def _update(self, delivery: Delivery, servers: list[VllmClient]) -> Failures:
        """Pause, deliver, and resume."""
        failures: Failures = {}
        unusable = set(servers)
        try:
            async with asyncio.timeout(self._seconds):
                if delivery.pauses:
                    unusable = set()
                    failures = await each(servers, lambda server: server.pause(self._in_flight))
                paused = [server for server in servers if server not in failures]
                unusable = set(servers)
                failures |= await delivery.deliver(paused)
            unusable = set(failures)
        except TimeoutError:
            late = AdapterError(f"the weights did not arrive within {self._seconds:g} s")
            failures = {server: failures.get(server, late) for server in servers}
        finally:
            if delivery.pauses:
                failures |= await self._resume(servers, unusable)
        return failures

    async def _resume(self, servers: list[VllmClient], unusable: set[VllmClient]) -> Failures:
        """Resume all, in a task that outlives a cancellation; waits for the usable ones."""
        failures: Failures = {}

        async def resume(server: VllmClient) -> None:
            if server in unusable:
                if not await server.health():
                    return
                with suppress(AdapterError):
                    await server.set_version(UNKNOWN)
            try:
                await while_alive(server, server.resume())
            except AdapterError as error:
                failures[server] = error

        tasks = {}
        for server in servers:
            task = tasks[server] = asyncio.create_task(resume(server), name=f"resume {server.url}")
            self._resuming.add(task)
            task.add_done_callback(self._resuming.discard)
        if awaited := [task for server, task in tasks.items() if server not in unusable]:
            await asyncio.wait(awaited)
        return failures
