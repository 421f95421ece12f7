"""Whether there is memory for one more model or sampler, so that the system never has to kill the
service."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from transformers import PreTrainedModel

from retrain.engine.available import ram
from retrain.service.errors import ServiceError
from retrain.service.trainable import Tuning
from retrain.service.trainer import LOGITS_AT_ONCE

STATE = 16
"""Bytes of a trained parameter: itself, its gradient and AdamW's two moments, in float32."""
PASS_TOKENS = 8192
"""Tokens of the largest pass that is provided for, if their logits fit into a micro-batch."""


class Memory:
    """Sizes on the device of the trainers; what is free is read again at each question."""

    def __init__(self, plain: PreTrainedModel, device: str) -> None:
        """`plain` is the base model without tied weights."""
        self._device = torch.device(device)
        sizes = [tensor.numel() for tensor in plain.state_dict().values()]
        self._parameters = sum(sizes)
        linear = [one for one in plain.modules() if isinstance(one, nn.Linear)]
        self._a_rank = sum(one.in_features + one.out_features for one in linear)
        vocabulary = int(plain.config.get_text_config().vocab_size)
        logits = min(LOGITS_AT_ONCE[self._device.type], PASS_TOKENS * vocabulary)
        # A pass holds logits, their gradient and more of their size; a new sampler loads merged
        # weights and copies them.
        self._reserve = 24 * logits + 8 * self._parameters

    def has_room(self, untrained: Iterable[Tuning], extra: int = 0) -> bool:
        """Whether a sampler, a pass, the first steps of these models, and `extra` bytes fit."""
        free = self._free()
        later = sum(map(self._size, untrained))
        return free is None or free > self._reserve + later + extra

    def check(self, tuning: Tuning, untrained: Iterable[Tuning], seconds: float) -> None:
        """Raise ServiceError (503) if there is no room for one more model."""
        size = self._size(tuning)
        if not self.has_room(untrained, size):
            raise ServiceError(
                503,
                f"not enough memory for another model: it needs {size / 1e9:.2f} GB, besides "
                f"{self._reserve / 1e9:.2f} GB for passes and samplers, and "
                f"{(self._free() or 0) / 1e9:.2f} GB are free. End a session, or try again later: "
                f"sessions without requests end after {seconds:g} s.",
            )

    def _size(self, tuning: Tuning) -> int:
        return STATE * (tuning.rank * self._a_rank or self._parameters)

    def _free(self) -> int | None:
        """Bytes; None if unknown."""
        if self._device.type == "cpu":
            return ram()
        free, _ = torch.cuda.mem_get_info(self._device)
        cached = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(
            self._device
        )
        return free + cached
