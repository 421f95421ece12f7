"""The part that runs inside a vLLM server: its workers receive weights over a process group.

A server loads it with `--worker-extension-cls retrain.vllm.worker.Extension`. It imports
torch, vLLM and `transfer.py` only, since the server's environment has nothing else of ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)

from retrain.vllm.transfer import Bucket, broadcast, join


class Extension:
    """Becomes a base class of vLLM's worker, whose methods `/collective_rpc` can call."""

    retrain_group: Any = None  # a process group
    retrain_device = torch.device("cpu")
    """Where the group's tensors are."""
    retrain_unfinished = False
    """Some layers wait for the rest of their weights."""

    def retrain_join(
        self, host: str, port: int, first: int, world_size: int, backend: str, seconds: float
    ) -> None:
        """Join a new group in place of the old one; this server's ranks begin with `first`."""
        worker: Any = self
        parallel = worker.vllm_config.parallel_config
        own = parallel.data_parallel_index * parallel.world_size + parallel.rank
        self.retrain_group = None
        self.retrain_device = worker.device if backend == "nccl" else torch.device("cpu")
        self.retrain_group = join(host, port, first + own, world_size, backend, seconds)

    def retrain_receive(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        begin: bool,
        end: bool,
    ) -> None:
        """Receive one bucket and load its weights; vLLM fuses and converts them itself.

        `begin` and `end` are the first and the last bucket of an attempt to send all weights.
        """
        worker: Any = self
        model, config = worker.model_runner.get_model(), worker.vllm_config.model_config
        bucket = Bucket(names, dtypes, shapes)
        packed = torch.empty(bucket.size, dtype=torch.uint8, device=self.retrain_device)
        broadcast(self.retrain_group, packed)
        with set_current_vllm_config(worker.vllm_config):
            if begin:
                if self.retrain_unfinished:  # its layers would count the weights twice
                    finalize_layerwise_reload(model, config)
                self.retrain_unfinished = True
                initialize_layerwise_reload(model)
            model.load_weights(bucket.unpack(packed))
            if worker.device.type != "cpu":
                torch.accelerator.synchronize()
            if end:
                finalize_layerwise_reload(model, config)
                self.retrain_unfinished = False
                worker.model_runner.reset_lora_state()
                repack_tied_head(worker)

    def retrain_reload(self, weights_path: str) -> None:
        """vLLM's `reload_weights` from a folder, and a tied head too."""
        worker: Any = self
        if self.retrain_unfinished:  # of a run that was killed: its layers wait for weights
            config = worker.vllm_config.model_config
            finalize_layerwise_reload(worker.model_runner.get_model(), config)
            self.retrain_unfinished = False
        worker.reload_weights(weights_path=weights_path)
        repack_tied_head(worker)


def repack_tied_head(worker: Any) -> None:  # vLLM's
    """On a CPU, a head tied to the embeddings has a packed copy, which a reload leaves as it is."""
    head = getattr(worker.model_runner.get_model(), "lm_head", None)
    config = worker.vllm_config.model_config.hf_config.get_text_config()
    tied = getattr(config, "tie_word_embeddings", False)
    if worker.device.type == "cpu" and head is not None and tied:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        dispatch_cpu_unquantized_gemm(head, remove_weight=False)
