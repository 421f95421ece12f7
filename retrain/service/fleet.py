"""Snapshots served by a fleet of vLLM servers: as adapters side by side, or as whole weights.

`publish` decides which: with `auto` or `adapter`, LoRA snapshots are adapters on the base model.
With `folder` or `group`, a snapshot, with its LoRA merged, replaces the servers' weights while no
request runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from torch import Tensor

from retrain.engine.losses import sequence_logprobs
from retrain.engine.weights import LoraWeights
from retrain.sampler import Tokenizer
from retrain.service.errors import ServiceError, invalid
from retrain.service.fleet_sampler import FleetSampler
from retrain.service.samplers import SamplerPool
from retrain.service.snapshots import Snapshots
from retrain.service.state import ServiceSettings
from retrain.service.store import CheckpointPlace
from retrain.vllm.checks import PROBE, check_logprobs, probe_of
from retrain.vllm.client import AdapterSlots
from retrain.vllm.opening import Opening, open_vllm
from retrain.vllm.options import VllmOptions

LARGEST_RANK = 64
"""Of an adapter at servers that the service starts."""
SAMPLE_SECONDS = 3600.0
"""The limit of one request at the servers."""


class FleetPool:
    """Samplers of many snapshots over the same servers; belongs to one event loop."""

    def __init__(
        self, whole: FleetSampler, lora: AdapterSlots | None, snapshots: Snapshots
    ) -> None:
        """`lora` are the adapters that the servers hold; None: they serve whole weights."""
        self._whole, self._snapshots, self._lora = whole, snapshots, lora
        self._pool: SamplerPool[CheckpointPlace | None, FleetSampler] = SamplerPool(
            partial(whole.beside, wants_lora=lora is not None),
            self._merged if lora is None else self._adapter,
            1 if lora is None else lora.slots - 1,  # one is the base model's
        )
        self._turn = asyncio.Lock()
        self.context_length = whole.context_length

    @asynccontextmanager
    async def use(self, key: CheckpointPlace | None) -> AsyncIterator[FleetSampler]:
        """The sampler of snapshot `key`, or of the base model for None, for one request.

        Raises ServiceError: 400 if the servers can't serve the snapshot, 503 if they do not answer
        in time.
        """
        async with AsyncExitStack() as stack:
            sampler = self._whole
            if key is not None or self._lora is None:
                async with self._turn:  # in order of arrival: a busy snapshot delays no other
                    sampler = await stack.enter_async_context(self._pool.use(key))
            try:
                async with asyncio.timeout(SAMPLE_SECONDS):
                    yield sampler
            except TimeoutError:
                late = f"the vLLM servers did not answer within {SAMPLE_SECONDS:g} s"
                raise ServiceError(503, late) from None

    async def forget(self, keys: Collection[CheckpointPlace | None]) -> None:
        """Unload these adapters, as soon as nobody samples them."""
        if self._lora is not None:
            await self._pool.forget(keys)

    # In a thread

    def _adapter(self, key: CheckpointPlace | None) -> LoraWeights:
        assert self._lora is not None
        assert key is not None, "`use` serves the base model without an adapter"
        rank = self._snapshots.tuning(key).rank
        if not 0 < rank <= self._lora.rank:
            raise invalid(
                f"this snapshot has {f'LoRA rank {rank}' if rank else 'full weights'}, but the "
                f"vLLM servers serve LoRA adapters up to rank {self._lora.rank}; start the "
                "service with --vllm publish=folder, which serves it as whole weights"
            )
        return self._snapshots.adapter(key)

    def _merged(self, key: CheckpointPlace | None) -> dict[str, Tensor]:
        tuning = None if key is None else self._snapshots.tuning(key)
        if tuning and tuning.rank and tuning.unembed and self._snapshots.base.tied:
            raise invalid(
                "the vLLM servers can't serve this snapshot as whole weights: its LoRA trains the "
                "output layer of a model with tied embeddings; use train_unembed: false, or a "
                "service whose servers take adapters (--vllm publish=adapter)"
            )
        return self._snapshots.merged(key)


@asynccontextmanager
async def open_fleet(
    options: VllmOptions,
    settings: ServiceSettings,
    folder: str,
    tokenizer: Tokenizer,
    snapshots: Snapshots,
) -> AsyncIterator[FleetPool]:
    """A pool that serves the base model, whose log-probs have been compared with the service's.

    At the end, servers that the service has started end. Raises ConfigError if a server doesn't
    fit, AdapterError if one can't be started or reached.
    """
    model = snapshots.base.untied
    adapters = options.way(lora=True) == "adapter"
    slots = settings.max_live_samplers if options.python else 1
    with TemporaryDirectory(prefix="retrain-serve-") as scratch:
        opening = Opening(
            *(folder, model, tokenizer),
            dtype=model.dtype,
            scratch=Path(scratch),
            logs=settings.folder,
            # On a CPU, rows of the base model need a free slot.
            lora=AdapterSlots(LARGEST_RANK if options.python else 1, slots + 1)
            if adapters
            else None,
            service=True,
        )
        async with await open_vllm(options, opening, FleetSampler) as sampler:
            found = (await sampler.fleet.up[0].client.facts()).lora if adapters else None
            pool = FleetPool(sampler, found, snapshots)
            if adapters:
                await sampler.load_weights(await asyncio.to_thread(snapshots.merged, None), 0)
            text = tokenizer.encode(PROBE, add_special_tokens=False)
            probe = probe_of(text, snapshots.base.config.vocab_size)
            expected = await asyncio.to_thread(sequence_logprobs, model, probe, model.device)
            async with pool.use(None) as serving:
                await check_logprobs(serving, probe, expected, options.check)
            yield pool
