"""The vLLM servers of a run: which are up, what is in flight at each, and how one comes back.

A server that fails a request is taken out, and the request goes to another. It comes back only with
the present weights: restarted first if it is the run's own process, else once it answers again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from retrain.errors import AdapterError, ConfigError, RunError
from retrain.supervision.sharing import Capacity
from retrain.vllm.client import VllmClient
from retrain.vllm.publish import Publisher, PublishError
from retrain.vllm.routing import Router
from retrain.vllm.server import VllmServer
from retrain.wire.refusals import RemoteError

if TYPE_CHECKING:
    from torch import Tensor

    from retrain.engine.weights import LoraWeights

State = Literal["up", "out", "gone"]
"""`out`: it is being brought back; `gone`: it can't come back."""
SHORT = 20.0
FIRST_PAUSE, LONGEST_PAUSE = 0.2, 10.0
"""Seconds between two attempts to bring a server back."""
ALL = 1 << 30
"""Units of a gate: a request alone takes all of them, another one takes one."""
log = logging.getLogger(__name__)


@dataclass(eq=False)
class Member:
    """One server of the fleet."""

    number: int
    client: VllmClient
    process: VllmServer | None = None
    gate: Capacity | None = None
    """Of a server that takes adapters: vLLM 0.32 computes the logits of a scored prompt with the
    adapters of other requests of the batch, so a prompt must be scored alone."""
    state: State = "up"
    restarts: int = 0
    """How often its process was restarted."""
    error: Exception | None = None
    """Why it is out."""
    lost_at: float = 0.0
    """When it was taken out, on the loop's clock."""


class Fleet:
    """The servers of a run; `open` starts no server and publishes nothing."""

    def __init__(
        self,
        members: Sequence[Member],
        publisher: Publisher,
        *,
        check: Callable[[VllmClient], Awaitable[object]],
        restarts: int = 3,
        outage_seconds: float = 600.0,
    ) -> None:
        """`check` raises AdapterError or ConfigError if a server doesn't fit the run.

        If no server is up for `outage_seconds`, calls fail.
        """
        self.members = list(members)
        self.publisher = publisher
        self.router = Router(len(self.members))
        self.report: Callable[..., None] = lambda state, **fields: None
        """Called with `lost`, `back` or `given up`, and with what an event of it says."""
        self._check, self._restarts, self._outage_seconds = check, restarts, outage_seconds
        self._published = False
        self._changed = asyncio.Event()
        self._changing = asyncio.Lock()
        self._recoveries: set[asyncio.Task[None]] = set()
        self._lost_at = self._until = 0.0
        """When the last server was lost, and until when calls wait for one."""

    @property
    def up(self) -> list[Member]:
        """The servers that take requests."""
        return [member for member in self.members if member.state == "up"]

    @property
    def failed(self) -> bool:
        """Whether no server is left that could come back."""
        return all(member.state == "gone" for member in self.members)

    async def close(self) -> None:
        """Stop recoveries, close the connections, and end the run's own servers."""
        for recovery in list(self._recoveries):
            recovery.cancel()
        if self._recoveries:
            await asyncio.wait(self._recoveries)
        await self.publisher.close()
        for member in self.members:
            member.state = "gone"
            member.error = member.error or AdapterError("the sampler is closed")
            await member.client.close()
        self._notify()
        processes = [member.process for member in self.members if member.process is not None]
        await asyncio.gather(*(process.close() for process in processes))

    # --- requests

    async def choose(self, prompt_ids: Sequence[int]) -> Member:
        """The server for a request with this prompt; waits while none is up.

        Raises AdapterError when none has been up for `outage_seconds`, or none can come back.
        """
        await self.available()
        candidates = [member.number for member in self.up]
        return self.members[self.router.choose(prompt_ids, candidates)]

    @asynccontextmanager
    async def turn(self, member: Member, rows: int, *, alone: bool) -> AsyncIterator[VllmClient]:
        """A request of `rows` at a server, `alone` if the server mustn't mix it with others."""
        self.router.rows[member.number] += rows
        try:
            taken = ALL if alone else 1
            async with member.gate.take(taken) if member.gate else nullcontext():
                yield member.client
        finally:
            self.router.rows[member.number] -= rows

    async def available(self) -> None:
        """Wait until a server is up; raises as `choose`."""
        while not self.up:
            if self.failed:
                raise self._lost("can't be restarted")
            try:
                async with asyncio.timeout_at(self._until):
                    await self._changed.wait()
            except TimeoutError:
                seconds = self._until - self._lost_at
                raise self._lost(f"has not answered for {seconds:.3g} s") from None

    def stop_waiting(self) -> None:
        """The run is shutting down: wait at most `SHORT` seconds for a server from now on."""
        self._outage_seconds = min(self._outage_seconds, SHORT)
        self._until = min(self._until, asyncio.get_running_loop().time() + self._outage_seconds)
        self._notify()

    def take_out(self, member: Member, client: VllmClient, error: Exception) -> None:
        """Send no more requests to a server until it has the present weights again.

        `client` is the one that failed: a server that came back meanwhile stays.
        """
        if member.state != "up" or client is not member.client:
            return
        member.state, member.error = "out", error
        member.lost_at = asyncio.get_running_loop().time()
        if not self.up:
            self._lost_at = member.lost_at
            self._until = self._lost_at + self._outage_seconds
        self.router.forget(member.number)
        self._notify()
        recovery = asyncio.create_task(self._recover(member), name=f"recover {member.client.url}")
        self._recoveries.add(recovery)
        recovery.add_done_callback(self._recoveries.discard)

    # --- weights

    async def publish(self, weights: Mapping[str, Tensor] | LoraWeights, version: int) -> None:
        """Serve the weights at every server that is up; the others get them when they return.

        Raises AdapterError if no server can serve them, or if one rejects the first weights of all:
        it serves another model.
        """
        async with self._changing:
            clients = {member.client: member for member in self.up}
            try:
                await self.publisher.publish(list(clients), weights, version)
            except PublishError as error:
                for client, cause in error.failed.items():
                    answered = isinstance(cause, RemoteError) and cause.status is not None
                    if not self._published and answered and await client.health():
                        raise AdapterError(
                            f"the vLLM server {client.url} rejects the weights of the model that "
                            f"is trained: {cause}. Start it with the run's `model`"
                        ) from cause
                    self.take_out(clients[client], client, cause)
        await self.available()
        self._published = True

    async def retire(self, version: int) -> None:
        """An older version is no longer sampled."""
        async with self._changing:
            await self.publisher.retire([member.client for member in self.up], version)

    # --- recovery

    async def _recover(self, member: Member) -> None:
        """Bring a server back, with growing pauses; gives up when its restarts are used up."""
        await self._report_loss(member)
        pause = FIRST_PAUSE
        damaged = not await member.client.health()
        while True:
            try:
                if member.process is not None and (damaged or member.process.failed):
                    await self._restart(member, member.process)
                await self._check(member.client)
                async with self._changing:
                    await self.publisher.bring_up(member.client)
                    member.state, member.error = "up", None
                break
            except (AdapterError, ConfigError) as error:
                member.error = error
                damaged = True
                if member.state == "gone":
                    break
                log.debug("vLLM server %s is still unavailable: %s", member.client.url, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_PAUSE)
        self._notify()
        if member.state == "up":
            log.warning("vLLM server %s is back, with the current weights", member.client.url)
            self._report(member, "back")
        else:
            log.warning("giving up on vLLM server %s: %s", member.client.url, member.error)
            self._report(member, "given up", error=str(member.error))

    async def _report_loss(self, member: Member) -> None:
        error = str(member.error)
        if member.process is not None and (ended := await member.process.ended()):
            left = member.restarts < self._restarts
            restart = f"restart {member.restarts + 1} of {self._restarts}" if left else "no restart"
            error = f"{ended}; {restart}"
        log.warning("vLLM server %s removed from use: %s", member.client.url, error)
        self._report(member, "lost", error=error)

    def _report(self, member: Member, state: str, **fields: object) -> None:
        """`up` is how many servers take requests, `seconds` how long this one has been out."""
        seconds = asyncio.get_running_loop().time() - member.lost_at
        facts = {"url": member.client.url, "restarts": member.restarts, "up": len(self.up)}
        try:
            self.report(state, **facts, seconds=seconds, **fields)
        except RunError as error:  # a full disk ends the run, but not from here
            log.warning("%s", error)

    async def _restart(self, member: Member, process: VllmServer) -> None:
        if member.restarts >= self._restarts:
            member.state = "gone"
            raise AdapterError(
                f"it died after {member.restarts} restarts, the limit of sampler.restarts. "
                f"Its last lines:\n{process.last_lines()}"
            )
        member.restarts += 1
        url = await process.start()
        await member.client.close()
        member.client = VllmClient(url)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _lost(self, what: str) -> AdapterError:
        names = ", ".join(member.client.url for member in self.members)
        reasons = {str(member.error) for member in self.members if member.error is not None}
        ours = any(member.process is not None for member in self.members)
        advice = "fix the cause" if ours else "start the server again"
        return AdapterError(
            f"no vLLM server is left: {names} {what} ({'; '.join(sorted(reasons))}). "
            f"To continue from the last checkpoint, {advice} and run again with --resume"
        )
