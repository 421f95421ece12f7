"""vLLM servers as the sampler of the local backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from retrain.adapters.trl.build import place_model
from retrain.adapters.trl.options import TrlOptions
from retrain.config import RunConfig
from retrain.vllm.client import AdapterSlots
from retrain.vllm.opening import Opening, open_vllm
from retrain.vllm.options import VllmOptions
from retrain.vllm.sampler import VllmSampler


async def open_servers(
    servers: VllmOptions,
    options: TrlOptions,
    config: RunConfig,
    *,
    folder: str,
    scratch: Path,
    tokenizer: Any,  # a PreTrainedTokenizerBase; transformers ships no types
    model: Any,  # the trained model, maybe PEFT's
) -> VllmSampler:
    """A sampler over servers of the model in `folder`, to which nothing is published yet.

    Raises ConfigError if a server doesn't fit, AdapterError if one can't be started or reached.
    """
    versions = config.staleness.bound + 2 + (config.eval is not None)  # in use at the same time
    opening = Opening(
        folder,
        model,
        tokenizer,
        dtype=place_model(options).frozen_dtype,
        scratch=scratch,
        logs=config.run_dir if config.run_dir and config.run_dir.is_dir() else scratch,
        base_dir=config.base_dir,
        lora=AdapterSlots(options.lora.r, versions) if options.lora else None,
        tokens=config.rollout.max_sequence_length or 2,
        outage_seconds=config.deadlines.outage,
        publish_seconds=config.deadlines.publish,
    )
    return await open_vllm(servers, opening)
