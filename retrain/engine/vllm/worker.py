"""The part that runs inside a vLLM server: it receives weights over a process group.

A server loads it with `--worker-extension-cls retrain.engine.vllm.worker.Extension` and
`--weight-transfer-config '{"backend": "retrain"}'`. It imports torch, vLLM and `transfer.py` only,
since the server's environment has nothing else of ours.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from retrain.engine.vllm.transfer import ENGINE, Bucket, broadcast, join


@dataclass
class InitInfo(WeightTransferInitInfo):
    """The group to join: this server's workers have the ranks from `rank_offset` on."""

    host: str
    port: int
    world_size: int
    rank_offset: int
    backend: str
    seconds: float


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One bucket; `begin` is the first one of an attempt to send all weights."""

    begin: bool
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Engine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads broadcast buckets into the model; vLLM fuses and converts the weights itself."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    group: Any = None  # a process group
    backend = ""
    unfinished = False
    """An update has begun and not ended, so that some layers wait for the rest of their weights."""
    loaded = False
    """Weights have come since then."""

    def init_transfer_engine(self, info: InitInfo) -> None:
        """Join a new group in place of the old one."""
        self.shutdown()
        parallel = self.vllm_config.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.backend = info.backend
        self.group = join(
            info.host,
            info.port,
            info.rank_offset + own,
            info.world_size,
            info.backend,
            info.seconds,
        )

    def start_weight_update(self) -> None:
        """Begin an update; one that was broken off before is forgotten."""
        if self.unfinished:  # its layers would count their new weights on top of the old ones
            finalize_layerwise_reload(self.model, self.model_config)
        self.unfinished, self.loaded = True, False
        initialize_layerwise_reload(self.model)

    def update_weights(self, info: dict[str, Any]) -> None:
        """Without the base class's synchronization, which fails on a CPU."""
        self.receive_weights(self.parse_update_info(info))

    def receive_weights(self, info: UpdateInfo) -> None:
        """Receive one bucket and load its weights."""
        if info.begin and self.loaded:  # the attempt before failed at another server
            self.start_weight_update()
        bucket = Bucket(info.names, info.dtypes, info.shapes)
        device = self.device if self.backend == "nccl" else torch.device("cpu")
        packed = torch.empty(bucket.size, dtype=torch.uint8, device=device)
        broadcast(self.group, packed)
        self.loaded = True
        self.model.load_weights(bucket.unpack(packed))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def finish_weight_update(self) -> None:
        """Convert what is left, and serve the new weights."""
        finalize_layerwise_reload(self.model, self.model_config)
        repack_tied_head(self.model, self.model_config, self.device)
        self.unfinished = False

    def shutdown(self) -> None:
        """Leave the group."""
        self.group = None


def repack_tied_head(model: Any, config: Any, device: torch.device) -> None:  # vLLM's
    """On a CPU, a head tied to the embeddings has a packed copy, which a reload leaves as it is."""
    head = getattr(model, "lm_head", None)
    tied = getattr(config.hf_config.get_text_config(), "tie_word_embeddings", False)
    if device.type == "cpu" and head is not None and tied:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)


class Extension:
    """Becomes a base class of vLLM's worker, whose methods `/collective_rpc` can call."""

    def retrain_reload(self, weights_path: str) -> None:
        """vLLM's `reload_weights` from a folder, and a tied head too."""
        worker: Any = self
        worker.reload_weights(weights_path=weights_path)
        config = worker.vllm_config.model_config
        repack_tied_head(worker.model_runner.get_model(), config, worker.device)


if ENGINE not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(ENGINE, Engine)
