"""Weights as values: what a trained model hands to a sampler.

A snapshot has the names of the plain model, whatever PEFT wrapped around it, and shares no memory
with it; taking one changes nothing. Tensors that the model ties are one tensor in the snapshot.
"""

from __future__ import annotations

import copy
import hashlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from retrain.errors import AdapterError


@torch.no_grad()
def snapshot(model: nn.Module) -> dict[str, Tensor]:
    """A detached copy of the weights under the plain model's names, LoRA merged in.

    W + scaling B A (Hu et al. 2021, section 4.1) for plain LoRA, and PEFT's own merge of a copy of
    the layer for its variants. A LoRA on one of two tied weights leaves them two tensors.
    """
    weights: dict[str, Tensor] = {}
    # The original is held beside its copy: a merged weight is a temporary, and the next one of its
    # shape would be given the same memory and be taken for a tied tensor.
    copies: dict[tuple[Any, ...], tuple[Tensor, Tensor]] = {}
    for name, tensor in _plain_weights(model):
        place = (tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride())
        if place not in copies:
            copies[place] = (tensor, tensor.detach().clone())
        weights[name] = copies[place][1]
    return weights


def digest(weights: Mapping[str, Tensor]) -> str:
    """A SHA-256, in hex, of names, types, shapes and values."""
    sha = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        values = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(values.view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def check_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise AdapterError unless `weights` fill `model` completely, names and shapes."""
    targets = model.state_dict()
    unknown = [name for name in weights if name not in targets]
    shapes = [
        f"{name} {tuple(tensor.shape)} for {tuple(targets[name].shape)}"
        for name, tensor in weights.items()
        if name in targets and tensor.shape != targets[name].shape
    ]
    groups: dict[int, list[str]] = {}  # tied weights are several names of one place
    for name, tensor in targets.items():
        groups.setdefault(tensor.data_ptr(), []).append(name)
    given = [[name for name in names if name in weights] for names in groups.values()]
    missing = [names[0] for names, some in zip(groups.values(), given, strict=True) if not some]
    untied = [
        some
        for some in given
        if any(not _same(weights[some[0]], weights[other]) for other in some[1:])
    ]
    problems: dict[str, list[Any]] = {
        "unknown": unknown,
        "missing": missing,
        "wrong shape": shapes,
        "untied": untied,
    }
    found = "; ".join(f"{what}: {names[:3]}" for what, names in problems.items() if names)
    if found:
        raise AdapterError(
            f"these weights are not the sampler's model's ({found}): publish "
            "engine.weights.snapshot() of the model that the sampler was made from"
        )


@torch.no_grad()
def copy_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy `weights` into `model`'s own memory, whatever their device and type."""
    targets = model.state_dict()
    for name, tensor in weights.items():
        targets[name].copy_(tensor)


def _plain_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the plain model; tensors may still be the model's own."""
    if "peft" not in sys.modules:  # then nothing can be wrapped by it
        yield from model.state_dict().items()
        return
    from peft import PeftModel
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    base = model.get_base_model() if isinstance(model, PeftModel) else model
    wrapped: list[str] = []
    for name, module in base.named_modules():
        if any(name.startswith(prefix) for prefix in wrapped):
            continue
        if isinstance(module, BaseTunerLayer):
            inner = _merged(module)
        elif isinstance(module, AuxiliaryTrainingWrapper):
            inner = _saved(module)
        else:
            continue
        wrapped.append(f"{name}.")
        for key, tensor in inner.items():
            yield f"{name}.{key}", tensor
    for name, tensor in base.state_dict().items():
        if not any(name.startswith(prefix) for prefix in wrapped):
            yield name, tensor


def _merged(layer: Any) -> dict[str, Tensor]:  # a peft layer; peft ships few types
    """The state of the layer below a LoRA, with the active adapters merged in."""
    active = [] if layer.disable_adapters or layer.merged else list(layer.active_adapters)
    active = [name for name in active if name in layer.scaling] if _is_lora(layer) else active
    plain = _is_lora(layer) and not any(
        name in layer.lora_variant or layer.lora_bias.get(name) for name in active
    )
    if active and not plain:
        layer = copy.deepcopy(layer)
        layer.merge()
        active = []
    state: dict[str, Tensor] = layer.get_base_layer().state_dict()
    if active:
        delta = sum(layer.get_delta_weight(name).to(state["weight"].dtype) for name in active)
        state = {**state, "weight": state["weight"] + delta}
    return state


def _is_lora(layer: Any) -> bool:  # a peft layer
    return hasattr(layer, "lora_A")


def _saved(wrapper: Any) -> dict[str, Tensor]:  # a peft wrapper
    """The state of the trained copy of a module in modules_to_save."""
    if not hasattr(wrapper, "modules_to_save") or not wrapper.active_adapters:
        state: dict[str, Tensor] = wrapper.original_module.state_dict()
        return state
    trained: dict[str, Tensor] = wrapper.modules_to_save[wrapper.active_adapters[0]].state_dict()
    return trained


def _same(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr() or (
        one.shape == other.shape and bool(torch.equal(one, other.to(one.device)))
    )
