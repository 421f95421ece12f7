"""Whether memory is free for another model or sampler: a process that is killed loses them all."""

from __future__ import annotations

import ctypes
import gc
from contextlib import suppress

import torch

from retrain.engine.available import ram
from retrain.service.errors import conflict
from retrain.service.passes import BYTES_PER_LOGIT, LOGITS_ON_CPU
from retrain.service.tuning import BaseModel, Tuning


def check_memory(base: BaseModel, tuning: Tuning, others: int) -> None:
    """Raise ServiceError unless another model fits beside `others`."""
    copies = 1.0 if tuning.rank else 4.0  # activations; weights, gradients and moments
    need, free = copies * base.size, free_memory(base.device)
    if base.device.type == "cpu":  # on a GPU, a pass that doesn't fit fails its own request only
        logits = base.vocabulary * (base.context or LOGITS_ON_CPU)
        need += BYTES_PER_LOGIT * min(LOGITS_ON_CPU, logits)  # of the one pass that runs
    if free is not None and need > free:
        raise conflict(
            f"{free / 1e9:.1f} GB of memory are free, but another model needs about "
            f"{need / 1e9:.1f} GB beside the {others} in training: end a session that is done, or "
            "try again later"
        )


def has_room(base: BaseModel) -> bool:
    """Whether another sampler fits, with as much again for its requests."""
    free = free_memory(base.device)
    return free is None or free > 2 * base.size


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None if that is unknown."""
    if device.type != "cuda":
        return ram()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def give_back() -> None:
    """Give the memory of models that have ended back to the system."""
    gc.collect()  # a model is full of cycles
    with suppress(AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
