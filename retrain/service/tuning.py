"""The base model, and the models in training that are made from it.

- A LoRA leaves the base weights unchanged, so that all models share them. Attention and MLP
  projections get their matrices by name, and with `unembed` so does the output layer. A tied output
  layer is untied first, since its delta would otherwise change the embedding. Without `unembed` a
  model of random weights can't learn which token to say: its output layer is noise.
- Rank 0 trains the full weights, in a copy.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from retrain.service.errors import invalid

if TYPE_CHECKING:
    from peft import LoraConfig

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


class BaseModel:
    """The model that every model in training is made from; its weights never change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self.tied = bool(model.config.tie_word_embeddings)
        """Whether the output layer is the embedding."""
        self.untied = untied(model)
        """For LoRA, samplers and merged weights: it shares all weights but a tied output layer."""
        self.device = model.device
        self.config = model.config.get_text_config()
        self.context: int | None = getattr(self.config, "max_position_embeddings", None)
        self.vocabulary = int(_embedding(model).weight.shape[0])
        self.size = sum(p.numel() * p.element_size() for p in self.untied.parameters())
        """Bytes of its weights."""

    def tuned(self, tuning: Tuning) -> nn.Module:
        """A model in training, whose trained parameters require a gradient.

        Raises ServiceError if it trains nothing.
        """
        if tuning.rank:
            from peft import get_peft_model

            config = _lora_config(self.untied, tuning)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(tuning.seed)
                model: nn.Module = get_peft_model(_sharing(self.untied), config)
        else:
            model = copy.deepcopy(self._model).requires_grad_(True)
        return model.train(False)  # no dropout: the log-probs must equal the sampler's


def untied(model: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weight tensors except that of a tied output layer."""
    own = _sharing(model)
    head, embedding = _head(own), _embedding(own)
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone(), requires_grad=False)
    own.config.tie_word_embeddings = False
    return own


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


def _sharing(model: PreTrainedModel) -> PreTrainedModel:
    """A copy of the modules, with the same weight tensors."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


def _lora_config(model: PreTrainedModel, tuning: Tuning) -> LoraConfig:
    from peft import LoraConfig

    head = _head(model)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        if (tuning.unembed if module is head else tuning.attention if "att" in name else tuning.mlp)
    ]
    if not targets:
        raise invalid("this model trains nothing; enable at least one kind of layer")
    # peft uses a name that transformers deprecates; it would fail where warnings are errors.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    return LoraConfig(r=tuning.rank, lora_alpha=LORA_ALPHA, target_modules=targets, bias="none")


def _head(model: PreTrainedModel) -> Any:  # a Linear, or None; transformers leaves it untyped
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the same


def _embedding(model: PreTrainedModel) -> Any:  # an Embedding; transformers types it as any Module
    return model.get_input_embeddings()


def _weight_name(model: PreTrainedModel, module: Any) -> str:  # one of the two above
    return next(f"{name}.weight" for name, one in model.named_modules() if one is module)
