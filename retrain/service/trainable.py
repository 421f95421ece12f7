"""What a model in training is made of: a base model, and the parameters that it trains.

- A LoRA leaves the base weights unchanged, so that all models share them. Attention and MLP
  projections get their matrices by name, and with `unembed` so does the output layer. A tied output
  layer is untied first, since its delta would otherwise change the embedding. Without `unembed` a
  model of random weights can't learn which token to say: its output layer is noise.
- Rank 0 trains the full weights, in a copy.
- `ShardedBase` shards the base weights over processes with FSDP2, once for all LoRA models: they
  are adapters of one module. Their matrices are small, so each process has them whole. A model
  whose full weights are trained has shards of its own.
"""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrain.service.errors import invalid

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel
    from torch.distributed.device_mesh import DeviceMesh

LORA_ALPHA = 32
"""The value of the hosted services, whose protocols have no field for alpha."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Which weights are trained."""

    rank: int = 32
    """Of the LoRA matrices; 0 trains the full weights."""
    attention: bool = True
    mlp: bool = True
    unembed: bool = True
    seed: int = 0
    """Of the initial LoRA matrices."""


@dataclass(frozen=True, slots=True)
class Trainable:
    """A module and the parameters in it that one model trains."""

    model: nn.Module
    trained: Mapping[str, nn.Parameter]
    """By their names in checkpoints; LoRA matrices have PEFT's names."""
    device: torch.device
    vocabulary: int
    sharded: bool = False
    """Whether a pass needs all processes at the same time."""
    adapter: str | None = None
    """Its name in a module that other models share."""

    def activate(self) -> None:
        """Compute with this model's adapter from here on."""
        if self.adapter is not None:
            self.model.set_adapter(self.adapter)  # type: ignore[operator]  # of PEFT, untyped

    def close(self) -> None:
        """Free its matrices in a module that other models share."""
        if self.adapter is not None:
            self.model.base_model.set_adapter([])  # type: ignore[operator, union-attr]  # the same
            self.model.delete_adapter(self.adapter)  # type: ignore[operator]  # the same


def whole(base: PreTrainedModel, tuning: Tuning) -> Trainable:
    """A model with all weights in this process; raises ServiceError if it trains nothing."""
    if tuning.rank:
        from peft import get_peft_model

        plain = untied(base)
        config = _lora_config(plain, tuning)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(tuning.seed)
            model: nn.Module = get_peft_model(plain, config)
    else:
        model = copy.deepcopy(base).requires_grad_(True)
    model.train(False)  # no dropout: the log-probs must equal the sampler's
    trained = {name.replace(".default.", "."): p for name, p in _trained(model)}
    return Trainable(model, trained, base.device, _vocabulary(base))


class ShardedBase:
    """A base model whose weights are sharded over the processes of `mesh`.

    `load` reads the base model to the CPU; every model that trains the full weights reads it again.
    """

    def __init__(self, load: Callable[[], PreTrainedModel], mesh: DeviceMesh) -> None:
        self._load, self._mesh = load, mesh
        self._device = torch.device(mesh.device_type)
        if self._device.type != "cpu":
            self._device = torch.device(mesh.device_type, torch.accelerator.current_device_index())
        self._numbers = itertools.count()
        self._plain = _sharded(untied(load()).requires_grad_(False), mesh)
        self._vocabulary = _vocabulary(self._plain)
        self._shared: PeftModel | None = None

    def trainable(self, tuning: Tuning) -> Trainable:
        """A model of this base; call it on all processes in the same order.

        Raises ServiceError if it trains nothing.
        """
        if tuning.rank:
            return self._adapter(tuning)
        model = _sharded(self._load().requires_grad_(True), self._mesh)
        return Trainable(model, dict(_trained(model)), self._device, self._vocabulary, sharded=True)

    def _adapter(self, tuning: Tuning) -> Trainable:
        from peft import get_peft_model

        name = f"model{next(self._numbers)}"
        config = _lora_config(self._plain, tuning)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(tuning.seed)
            if self._shared is None:
                self._shared = get_peft_model(self._plain, config, adapter_name=name)
            else:
                self._shared.add_adapter(name, config)
        assert self._shared is not None
        self._shared.train(False)
        self._shared.set_adapter(name)
        trained = {n.replace(f".{name}.", "."): p for n, p in _trained(self._shared)}
        return Trainable(
            *(self._shared, trained, self._device, self._vocabulary), sharded=True, adapter=name
        )


def untied(base: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weight tensors except that of a tied output layer."""
    shared = [*base.parameters(), *base.buffers()]
    model: PreTrainedModel = copy.deepcopy(base, {id(tensor): tensor for tensor in shared})
    head, embedding = _head(model), _embedding(model)
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def merged_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """The state of `model` (untied) with trained `weights`: W + alpha/rank B A for LoRA."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not rank:
        full = {name: tensor.to(model.device) for name, tensor in weights.items()}
        head, embedding = (_weight_name(model, one(model)) for one in (_head, _embedding))
        if head not in full:  # only the first name of tied weights was trained
            full[head] = full[embedding]
        return {**state, **full}
    for name, a in weights.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = weights[name.replace(".lora_A.", ".lora_B.")]
        plain = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        delta = (b.float() @ a.float()) * (LORA_ALPHA / rank)
        state[plain] = state[plain] + delta.to(state[plain])
    return state


def _lora_config(model: PreTrainedModel, tuning: Tuning) -> LoraConfig:
    from peft import LoraConfig
    from peft.tuners.tuners_utils import BaseTunerLayer

    head = _head(model)
    head = head.get_base_layer() if isinstance(head, BaseTunerLayer) else head
    targets = [
        name.removesuffix(".base_layer")  # another model has wrapped it
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and ".lora_" not in name
        if (tuning.unembed if module is head else tuning.attention if "att" in name else tuning.mlp)
    ]
    if not targets:
        raise invalid("this model trains nothing; enable at least one kind of layer")
    # peft uses a name that transformers deprecates; it would fail where warnings are errors.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    return LoraConfig(r=tuning.rank, lora_alpha=LORA_ALPHA, target_modules=targets, bias="none")


def _sharded(model: PreTrainedModel, mesh: DeviceMesh) -> PreTrainedModel:
    """`model` with FSDP2: each of its layers is a unit. Gradients are sums over processes."""
    from torch.distributed.fsdp import FSDPModule, fully_shard

    layers = set(model._no_split_modules or ())
    units = [one for one in model.modules() if type(one).__name__ in layers]
    for unit in (*units, model):
        # Reshard after each pass: a forward pass without a backward one would keep old weights.
        made = fully_shard(unit, mesh=mesh, reshard_after_forward=True)
        assert isinstance(made, FSDPModule)
        made.set_gradient_divide_factor(1.0)
        made.set_force_sum_reduction_for_comms(True)  # gloo has no other
    model.train(False)
    return model


def _trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def _vocabulary(model: PreTrainedModel) -> int:
    return int(_embedding(model).weight.shape[0])


def _head(model: PreTrainedModel) -> Any:  # a Linear, or None; transformers leaves it untyped
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the same


def _embedding(model: PreTrainedModel) -> Any:  # an Embedding; transformers types it as any Module
    return model.get_input_embeddings()


def _weight_name(model: PreTrainedModel, module: Any) -> str:  # one of the two above
    return next(f"{name}.weight" for name, one in model.named_modules() if one is module)
