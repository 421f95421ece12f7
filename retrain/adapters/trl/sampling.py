"""vLLM servers as the sampler of the local backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from retrain.adapters.trl.build import place_model
from retrain.adapters.trl.options import TrlOptions
from retrain.config import RunConfig
from retrain.engine.limits import Limits
from retrain.engine.sampler import eos_ids
from retrain.engine.vllm.opening import Opening, open_vllm
from retrain.engine.vllm.options import VllmOptions
from retrain.engine.vllm.sampler import VllmSampler


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
    text, placement = model.config.get_text_config(), place_model(options)
    opening = Opening(
        folder,
        tokenizer,
        Limits(int(text.max_position_embeddings), int(text.vocab_size)),
        stop_ids=eos_ids(model, tokenizer),
        dtype=placement.frozen_dtype,
        scratch=scratch,
        logs=config.run_dir if config.run_dir and config.run_dir.is_dir() else scratch,
        base_dir=config.base_dir,
        lora_rank=options.lora.r if options.lora else None,
        adapters=config.staleness.bound + 2,
        tokens=config.rollout.max_sequence_length or 2,
        cpu=not torch.cuda.is_available(),
        patience=config.deadlines.outage,
        publish_seconds=config.deadlines.publish,
    )
    return await open_vllm(servers, opening)
