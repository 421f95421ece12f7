"""Fully sharded models (FSDP2, `torch.distributed.fsdp.fully_shard`).

`engine.weights.snapshot` finds tied weights by their memory, which a shard may lack, so a sharded
model is gathered first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import FSDPModule

from retrain.errors import AdapterError

PEFT_PREFIX = "base_model.model."


def is_sharded(model: nn.Module) -> bool:
    """Whether each rank holds a part of the weights only."""
    return isinstance(model, FSDPModule)


def whole_state(model: nn.Module) -> dict[str, Tensor]:
    """The whole state of a sharded model on the CPU of rank 0; empty on other ranks.

    A collective: all ranks must call it. Tied weights have each of their names.
    """
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    state: dict[str, Any] = get_model_state_dict(model, options=options)
    return state


@torch.no_grad()
def whole_snapshot(model: nn.Module) -> dict[str, Tensor]:
    """What `engine.weights.snapshot` returns for the model without shards; empty on ranks > 0.

    A collective: all ranks must call it.
    """
    state = whole_state(model)
    if not state:
        return {}
    merged = set(_merge_lora(model, state))
    for names in _tied(model):
        first, *others = [name for name in names if name not in merged and name in state]
        for name in others:
            state[name] = state[first]
    return {
        name.removeprefix(PEFT_PREFIX).replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
    }


def _merge_lora(model: nn.Module, state: dict[str, Tensor]) -> Iterator[str]:
    """Add each adapter to its base weight, and drop it; the names of the merged weights."""
    if "peft" not in sys.modules:  # then PEFT wraps nothing
        return
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            yield _merge_layer(name, layer, state)
    if left := [name for name in state if ".lora_" in name]:
        raise AdapterError(
            f"can't merge the adapter {left[0]!r} of a sharded model; remove its layer from "
            "backend.lora.target_modules, or set backend.sharding to none"
        )


def _merge_layer(name: str, layer: Any, state: dict[str, Tensor]) -> str:  # a peft layer
    """W + alpha / r B A (arXiv:2106.09685, section 4.1)."""
    base = f"{name}.base_layer.weight"
    for kind, end in (("lora_{}.default.weight", ""), ("lora_embedding_{}.default", "T")):
        keys = [f"{name}.{kind.format(letter)}" for letter in "AB"]
        if keys[0] in state:
            a, b = (state.pop(key) for key in keys)
            delta = layer.scaling["default"] * (b @ a)
            if end or getattr(layer, "fan_in_fan_out", False):
                delta = delta.T
            state[base] = state[base] + delta.to(state[base].dtype)
    return base


def _tied(model: nn.Module) -> list[list[str]]:
    """The names of each weight that has several."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return [found for found in names.values() if len(found) > 1]
