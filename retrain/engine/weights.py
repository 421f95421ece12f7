"""Snapshots of weights: what a trained model gives to a sampler.

A snapshot has the names of the plain model, whatever PEFT wrapped around it, and shares no memory
with it. Taking one changes nothing. Tied tensors are one tensor in the snapshot.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from retrain.errors import AdapterError, first_of


@dataclass(frozen=True, slots=True)
class LoraWeights:
    """Low-rank adapters by themselves, as PEFT saves them."""

    tensors: Mapping[str, Tensor]
    """Under the names that PEFT writes to adapter_model.safetensors."""
    config: Mapping[str, Any]  # JSON values
    """The content of adapter_config.json."""


@torch.no_grad()
def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A detached copy of the weights under the plain model's names, with LoRA merged.

    A LoRA on one of two tied weights unties them.
    """
    weights: dict[str, Tensor] = {}
    # Keep the original beside its copy: a merged weight is temporary, and the next one of its shape
    # could get the same memory and look like a tied tensor.
    copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
    for name, tensor in _plain_weights(model):
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        if place not in copies:
            copies[place] = (tensor, tensor.detach().clone())
        weights[name] = copies[place][1]
    return weights


def lora_snapshot(
    model: nn.Module, state: Mapping[str, Tensor] | None = None
) -> LoraWeights | None:
    """A detached copy of a PEFT model's adapters; None for any other model.

    `state` replaces the model's own, where a rank holds a part of it only.
    """
    if "peft" not in sys.modules:
        return None
    from peft import PeftModel, get_peft_model_state_dict

    if not isinstance(model, PeftModel):
        return None
    tensors = get_peft_model_state_dict(model, state_dict=state, save_embedding_layers=False)
    with tempfile.TemporaryDirectory() as folder:
        model.peft_config["default"].save_pretrained(folder)
        config = json.loads((Path(folder) / "adapter_config.json").read_text(encoding="utf-8"))
    return LoraWeights({name: tensor.detach().clone() for name, tensor in tensors.items()}, config)


def check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise AdapterError unless `weights` are exactly those of `model`, in names and shapes."""
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if found := misfit(weights, shapes, tied_names(model)):
        raise AdapterError(
            f"these weights don't fit the sampler's model ({found}). Publish "
            "engine.weights.snapshot() of the model that the sampler was made from"
        )


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of tied weights, such as `lm_head.weight`, and the names of their originals."""
    first: dict[Tensor, str] = {}
    named = model.named_parameters(remove_duplicate=False)
    return {name: first[tied] for name, tied in named if first.setdefault(tied, name) != name}


def misfit(
    weights: Mapping[str, Tensor],
    shapes: Mapping[str, tuple[int, ...]],
    tied: Mapping[str, str],
    *,
    untied: bool = False,
) -> str:
    """What is wrong with weights for a model of these shapes, with names; empty if they fit.

    The original of a tied weight is enough. With `untied`, the two may differ.
    """
    wrong = {
        "missing": [n for n in shapes if weights.keys().isdisjoint((n, tied.get(n)))],
        "unknown": sorted(weights.keys() - shapes.keys()),
        "wrong shape": [
            f"{name} {tuple(tensor.shape)} for {shapes[name]}"
            for name, tensor in weights.items()
            if shapes.get(name, tensor.shape) != tensor.shape
        ],
        "untied": [n for n in tied if not untied and _differ(weights.get(n), weights.get(tied[n]))],
    }
    return "; ".join(
        f"{what}: {first_of(names, limit=3)}" for what, names in wrong.items() if names
    )


def _differ(own: Tensor | None, original: Tensor | None) -> bool:
    if own is None or original is None or own.data_ptr() == original.data_ptr():
        return False
    return not torch.equal(own.to(original.device), original)


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights`, of any device and type, into `model`'s own memory."""
    targets = model.state_dict()
    for name, tensor in weights.items():
        targets[name].copy_(tensor)


def _plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the plain model; tensors may share its memory."""
    if "peft" not in sys.modules:  # then PEFT wraps nothing
        yield from model.state_dict().items()
        return
    from peft import PeftModel

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    wrapped: dict[str, Mapping[str, Tensor]] = {}  # by the prefix of its names
    for name, module in base.named_modules():
        if not name.startswith(tuple(wrapped)):
            state = _unwrapped(module)
            if state is not None:
                wrapped[f"{name}."] = state
    for prefix, state in wrapped.items():
        for key, tensor in state.items():
            yield prefix + key, tensor
    for name, tensor in base.state_dict().items():
        if not name.startswith(tuple(wrapped)):
            yield name, tensor


def _unwrapped(module: Any) -> Mapping[str, Tensor] | None:  # peft ships few types
    """The state below PEFT's wrapper around a module; None for any other module.

    Active adapters are merged by PEFT, in a copy; of a module in modules_to_save it is the state of
    the trained copy.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    state: Mapping[str, Tensor] | None = None
    if isinstance(module, BaseTunerLayer):
        if not (module.disable_adapters or module.merged):
            module = copy.deepcopy(module)
            module.merge()
        state = module.get_base_layer().state_dict()
    elif isinstance(module, AuxiliaryTrainingWrapper):
        saved = hasattr(module, "modules_to_save") and module.active_adapters
        own = module.modules_to_save[saved[0]] if saved else module.original_module
        state = own.state_dict()
    return state
