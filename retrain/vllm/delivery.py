"""How weights reach servers: as LoRA adapters or as folders; `group.py` is a third delivery."""

from __future__ import annotations

import asyncio
import re
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from retrain.engine.weights import LoraWeights
from retrain.errors import AdapterError
from retrain.vllm.checkpoint import Manifest, WeightStore, nbytes, write_adapter, write_model
from retrain.vllm.client import Facts, Json, VllmClient
from retrain.vllm.transfer import EXTENSION
from retrain.wire.refusals import ignored

ALIVE_SECONDS = 2.0
"""How often a server that does not answer is asked whether it is alive."""
T = TypeVar("T")
Weights = Mapping[str, Tensor] | LoraWeights
Failures = dict[VllmClient, Exception]
ADAPTER = re.compile(r"policy-v(\d+)")


def adapter_name(version: int) -> str:
    """The name under which servers serve an adapter of this version."""
    return f"policy-v{version}"


class Delivery(ABC):
    """Gives weights to servers; `Publisher` calls it, one call at a time."""

    pauses: ClassVar[bool] = True
    """Servers must not decode during `deliver`."""
    together: ClassVar[bool] = False
    """`deliver` takes all servers at once, rather than one."""

    @abstractmethod
    async def meet(self, server: VllmClient) -> None:
        """Learn what `deliver` needs to know of a server, which may have been restarted.

        Raises AdapterError if the server can't get weights in this way.
        """

    @abstractmethod
    async def prepare(self, weights: Weights, version: int) -> None:
        """Whatever can be done before servers are paused; these weights are now the present ones.

        Raises AdapterError if the weights can't be published.
        """

    @abstractmethod
    async def deliver(self, servers: Sequence[VllmClient]) -> Failures:
        """Serve the present weights at `servers`; returns those that failed, and raises nothing
        else."""

    async def retire(self, servers: Sequence[VllmClient], version: int) -> None:  # noqa: B027
        """Free an older version, which nothing samples any more."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything."""


async def each(servers: Sequence[VllmClient], call: Any) -> Failures:  # VllmClient -> coroutine
    """Await `call` of all servers at once; returns those for which it raised, or that died."""
    calls = (while_alive(server, call(server)) for server in servers)
    found = await asyncio.gather(*calls, return_exceptions=True)
    failures: Failures = {}
    for server, error in zip(servers, found, strict=True):
        if isinstance(error, Exception):
            failures[server] = error
        elif isinstance(error, BaseException):
            raise error
    return failures


async def while_alive(server: VllmClient, call: Coroutine[Any, Any, T]) -> T:
    """Await a call, but not once the server is dead: vLLM then never answers some calls.

    Raises AdapterError.
    """
    calling = asyncio.ensure_future(call)
    try:
        while not (await asyncio.wait([calling], timeout=ALIVE_SECONDS))[0]:
            if not await server.health() and not calling.done():
                raise AdapterError(f"{server.url} died while its weights changed")
        return calling.result()
    finally:
        calling.cancel()


class AdapterDelivery(Delivery):
    """Each version is an adapter with a name of its own, so that no server needs to pause.

    Version 0 is one too: on a CPU, rows of the base model that share a batch with rows of adapters
    get the adapter of another row when all of vLLM's slots are full.
    """

    pauses = False

    def __init__(self, store: WeightStore) -> None:
        self._store = store
        self._folders: dict[int, Path] = {}

    async def meet(self, server: VllmClient) -> None:
        """Unload what an earlier run left under our names."""
        for model in await server.models():
            if ADAPTER.fullmatch(name := str(model["id"])):
                with ignored(404):
                    await server.unload_lora(name)

    async def prepare(self, weights: Weights, version: int) -> None:
        assert isinstance(weights, LoraWeights), "`Publisher` gives all weights to another delivery"
        size = sum(nbytes(tensor, None) for tensor in weights.tensors.values())
        fill = partial(write_adapter, weights=weights)
        self._folders[version] = await self._store.write(adapter_name(version), size, fill)

    async def deliver(self, servers: Sequence[VllmClient]) -> Failures:
        async def load(server: VllmClient) -> None:
            served = {str(model["id"]) for model in await server.models()}
            for version, folder in sorted(self._folders.items()):
                if adapter_name(version) not in served:
                    await server.load_lora(adapter_name(version), folder)

        return await each(servers, load)

    async def retire(self, servers: Sequence[VllmClient], version: int) -> None:
        folder = self._folders.get(version)
        if folder is None:
            return
        # A server that fails here fails its next request too, and is taken out then.
        await each(servers, lambda server: server.unload_lora(adapter_name(version)))
        del self._folders[version]
        await self._store.drop(folder)

    async def close(self) -> None:
        self._store.close()


class WholeDelivery(Delivery):
    """Gives all weights of the model, and labels them by their version."""

    def __init__(self, model: str, dtype: torch.dtype | None) -> None:
        self._model, self._dtype = model, dtype
        self._manifest: Manifest | None = None
        self._facts: dict[VllmClient, Facts] = {}
        self._version = 0

    async def meet(self, server: VllmClient) -> None:
        """Learn what it is."""
        self._facts[server] = await server.facts()

    async def deliver(self, servers: Sequence[VllmClient]) -> Failures:
        failures = await self._load(servers)
        loaded = [server for server in servers if server not in failures]
        label = str(self._version)
        return failures | await each(loaded, lambda server: server.set_version(label))

    @abstractmethod
    async def _load(self, servers: Sequence[VllmClient]) -> Failures:
        """As `deliver`, without the label."""

    async def _complete(self, weights: Weights) -> tuple[dict[str, Tensor], Json]:
        """The weights to send, and a config.json that fits them."""
        assert not isinstance(weights, LoraWeights), "merge the adapter first"
        if self._manifest is None:
            self._manifest = await asyncio.to_thread(Manifest.of, self._model)
        # A server of an untied copy of the model needs the head by its own name; another skips it.
        copies = [facts for facts in self._facts.values() if facts.model != self._model]
        heads = any(not facts.tied for facts in copies)
        untied = {"tie_word_embeddings": False} if heads else {}
        return self._manifest.complete(weights, heads=heads), {**self._manifest.config, **untied}


class FolderDelivery(WholeDelivery):
    """Each version is a folder that servers reload while they are paused."""

    def __init__(self, store: WeightStore, model: str, *, dtype: torch.dtype | None = None) -> None:
        super().__init__(model, dtype)
        self._store = store
        self._folder: Path | None = None

    async def meet(self, server: VllmClient) -> None:
        await super().meet(server)
        facts = self._facts[server]
        if facts.cpu and facts.tied and facts.extension != EXTENSION:
            raise AdapterError(
                f"{server.url}: vLLM on a CPU keeps the old head of a model with tied embeddings "
                "when weights are reloaded. Start the server with --worker-extension-cls "
                f"{EXTENSION}, or with a copy of the model whose embeddings are not tied"
            )

    async def prepare(self, weights: Weights, version: int) -> None:
        sent, config = await self._complete(weights)
        size = sum(nbytes(tensor, self._dtype) for tensor in sent.values())
        fill = partial(write_model, weights=sent, config=config, dtype=self._dtype)
        before = self._folder
        self._folder, self._version = await self._store.write(f"v{version}", size, fill), version
        if before is not None:  # no server reads it any more
            await self._store.drop(before)

    async def _load(self, servers: Sequence[VllmClient]) -> Failures:
        async def reload(server: VllmClient) -> None:
            ours = self._facts[server].extension == EXTENSION
            method = "retrain_reload" if ours else "reload_weights"
            await server.call(method, weights_path=str(self._folder))

        return await each(servers, reload)

    async def close(self) -> None:
        self._store.close()
