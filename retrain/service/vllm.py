"""vLLM servers that sample for the service: snapshots as adapters, or as weights of the model.

A LoRA that the servers can take is an adapter on the base model, and several are served side by
side. Every other snapshot, such as one of full weights, replaces the weights of the servers while
no request runs. Requests are admitted in the order in which they came.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import Tensor

from retrain.engine.losses import sequence_logprobs
from retrain.engine.vllm.checks import PROBE, check_logprobs, probe_of
from retrain.engine.vllm.client import AdapterSlots as Lora
from retrain.engine.vllm.client import VllmClient
from retrain.engine.vllm.opening import Opening, open_vllm
from retrain.engine.vllm.options import VllmOptions
from retrain.engine.weights import LoraWeights
from retrain.sampler import Tokenizer
from retrain.service.errors import ServiceError
from retrain.service.samplers import SamplerPool
from retrain.service.served import ServedSampler
from retrain.service.state import Settings
from retrain.service.store import Place
from retrain.service.thread import TrainerThread

LARGEST_RANK = 64
"""Of an adapter at servers that the service starts; one of a higher rank is merged."""
NO_LORA = Lora(rank=0, slots=0)
BASE = None
"""The key of the base model's weights."""
SAMPLE_SECONDS = 3600.0
"""The limit of one request at the servers."""
_NOTHING = object()
log = logging.getLogger(__name__)


class Snapshots(NamedTuple):
    """How snapshots are read; functions are called in a thread."""

    weights: Callable[[Place | None], Mapping[str, Tensor]]
    """All weights of the plain model, with LoRA merged; of the base model for None."""
    rank: Callable[[Place], int]
    """Of its LoRA; 0 for full weights."""
    adapter: Callable[[Place], LoraWeights]


class VllmPool:
    """Samplers of many snapshots over the same servers; belongs to one event loop."""

    def __init__(
        self,
        whole: ServedSampler,
        lora: Lora,
        snapshots: Snapshots,
        scratch: TemporaryDirectory[str],
    ) -> None:
        """`lora` are the adapters that may be live at once; `scratch` is deleted in the end."""
        self._whole, self._snapshots, self._scratch = whole, snapshots, scratch
        self._largest_rank = lora.rank
        self._adapters = SamplerPool(whole.beside, snapshots.adapter, lora.slots)
        self._ranks: dict[Place, int] = {}
        self._present: object = _NOTHING
        """The key of the weights that the servers have."""
        self._versions = itertools.count(1)
        self._turn = asyncio.Lock()
        self._users = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @asynccontextmanager
    async def use(self, key: Place | None) -> AsyncIterator[ServedSampler]:
        """The sampler of snapshot `key`, for one request.

        Raises ServiceError: 503 if the servers do not answer in time.
        """
        async with AsyncExitStack() as stack:
            async with self._turn:  # so that nothing else changes weights meanwhile
                sampler = self._whole
                if key is not BASE and await self._is_adapter(key):
                    await self._switch(BASE)
                    sampler = await stack.enter_async_context(self._adapters.use(key))
                else:
                    await self._switch(key)
                self._users += 1
                self._idle.clear()
            try:
                async with asyncio.timeout(SAMPLE_SECONDS):
                    yield sampler
            except TimeoutError:
                late = f"the vLLM servers did not answer within {SAMPLE_SECONDS:g} s"
                raise ServiceError(503, late) from None
            finally:
                self._users -= 1
                if not self._users:
                    self._idle.set()

    async def forget(self, keys: Collection[Place | None]) -> None:
        """Unload these adapters, as soon as nobody samples them."""
        await self._adapters.forget([key for key in keys if key is not BASE])

    async def close(self) -> None:
        """End the servers that the service has started, and the connections to the others."""
        try:
            await self._whole.close()
        finally:
            self._scratch.cleanup()

    @property
    def context_length(self) -> int | None:
        """Tokens of prompt and completion together, at most."""
        return self._whole.context_length

    async def _is_adapter(self, key: Place) -> bool:
        """Whether the servers can take a snapshot as an adapter."""
        if key not in self._ranks:
            self._ranks[key] = await asyncio.to_thread(self._snapshots.rank, key)
        return 0 < self._ranks[key] <= self._largest_rank

    async def _switch(self, key: Place | None) -> None:
        """Serve the weights of `key` as the model's own, once no request uses other ones."""
        if self._present == key:
            return
        weights = await asyncio.to_thread(self._snapshots.weights, key)
        await self._idle.wait()
        self._present = _NOTHING
        await self._whole.load_weights(weights, next(self._versions))
        self._present = key


async def open_pool(
    options: VllmOptions,
    settings: Settings,
    engine: TrainerThread,
    tokenizer: Tokenizer,
    snapshots: Snapshots,
) -> VllmPool:
    """A pool that serves the base model, whose log-probs have been compared with the service's.

    Raises ConfigError if a server doesn't fit, AdapterError if one can't be started or reached.
    """
    plain = engine.plain
    scratch = TemporaryDirectory(prefix="retrain-serve-")
    opening = Opening(
        engine.work.folder,
        plain,
        tokenizer,
        dtype=plain.dtype,
        scratch=Path(scratch.name),
        logs=settings.folder,
        service=True,
    )
    try:
        sampler, lora = await open_servers(options, opening, settings.max_live_samplers)
    except BaseException:
        scratch.cleanup()
        raise
    pool = VllmPool(sampler, lora, snapshots, scratch)
    try:
        text = tokenizer.encode(PROBE, add_special_tokens=False)
        probe = probe_of(text, opening.limits.vocabulary)
        expected = await asyncio.to_thread(sequence_logprobs, plain, probe, plain.device)
        async with pool.use(BASE):
            await check_logprobs(sampler, probe, expected, options.check)
    except BaseException:
        await pool.close()
        raise
    return pool


async def open_servers(
    options: VllmOptions, opening: Opening, live: int
) -> tuple[ServedSampler, Lora]:
    """A sampler over checked servers, to which nothing is published yet, and their free adapters.

    Servers that this process starts get room for `live` adapters. Raises as `open_vllm`.
    """
    wanted = options.publish in ("auto", "adapter")
    if wanted and options.python is not None:
        # On a CPU, rows of the base model need a free slot.
        opening = replace(opening, lora=Lora(LARGEST_RANK, live + 1))
    elif options.publish == "adapter":
        opening = replace(opening, lora=Lora(1, 2))
    elif wanted:
        options = options.model_copy(update={"publish": "folder"})
    sampler = await open_vllm(options, opening, ServedSampler)
    try:
        lora = await _free(sampler.fleet.up[0].client) if wanted else NO_LORA
    except BaseException:
        await sampler.close()
        raise
    return sampler, lora


async def _free(server: VllmClient) -> Lora:
    """The adapters that a server's flags allow, besides the slot of the base model."""
    lora = (await server.facts()).lora
    if lora is None or not await server.takes_adapters():
        return NO_LORA
    if lora.slots < 2:  # see `open_servers`
        log.warning("%s has --max-loras 1: raise it to 2 or more to serve adapters", server.url)
        return NO_LORA
    return Lora(lora.rank, lora.slots - 1)
