"""One decode step of Llama and of models that are built like it, in fewer operations.

Most of a decode step of a small model is not arithmetic: it is the calls of several hundred
operations and modules. Here the projections to queries, keys and values are one product, as are
those to the gate and the input of the MLP. Grouped queries attend to their key head as one block,
so that keys and values are not repeated for each. Norms, rotary embeddings and activations are the
model's own, so that half precision rounds as its forward does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from transformers import (
    LlamaForCausalLM,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2ForCausalLM,
    Qwen3ForCausalLM,
)

from retrain.engine.kv_cache import RowCache, RowLayer

MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)


def fused_step(model: PreTrainedModel) -> FusedStep | None:
    """The step of `model`, whose weights become views of joined ones; None for other models.

    Neither subclasses, other attention than sdpa, sliding windows, quantized layers nor hooks.
    """
    known = type(model) in MODELS and model.config._attn_implementation == "sdpa"
    fits = known and not _has_windows(model) and all(map(_is_plain, model.modules()))
    return FusedStep(model) if fits else None


def _has_windows(model: PreTrainedModel) -> bool:
    if type(model) is MistralForCausalLM and model.config.sliding_window is not None:
        return True
    return bool(set(getattr(model.config, "layer_types", None) or ()) - {"full_attention"})


def _is_plain(module: nn.Module) -> bool:
    """Neither quantized nor hooked."""
    if isinstance(module, nn.Linear) and type(module) is not nn.Linear:
        return False
    return not (module._forward_hooks or module._forward_pre_hooks)


def join(layers: Sequence[nn.Linear]) -> Callable[[Tensor], Tensor]:
    """Linear layers of one input as one product.

    Their parameters become views, so that new weights copied into them are the product's.
    """
    weight = _joined([layer.weight for layer in layers])
    biases: list[Tensor] = [layer.bias for layer in layers if layer.bias is not None]
    return partial(linear, weight=weight, bias=_joined(biases) if biases else None)


def _joined(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


class FusedStep:
    """Computes the logits of the next token of every row of a `RowCache`."""

    def __init__(self, model: Any) -> None:  # the attributes that MODELS have in common
        inner, config = model.model, model.config
        self._embed, self._rotary, self._norm = inner.embed_tokens, inner.rotary_emb, inner.norm
        self._head = model.lm_head
        self._layers = [
            (
                layer,
                join([layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj]),
                join([layer.mlp.gate_proj, layer.mlp.up_proj]),
            )
            for layer in inner.layers
        ]
        self._key_heads: int = config.num_key_value_heads
        self._query_heads: int = config.num_attention_heads

    def __call__(
        self,
        ids: Tensor,
        cache: RowCache,
        *,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """Logits (rows, vocabulary) of ids (rows,) at positions (rows, 1).

        The mask, (rows, columns), says which columns of the cache a row sees.
        """
        hidden = self._embed(ids)
        turns = self._rotary(hidden, position_ids)
        mask = None if attention_mask is None else attention_mask[:, None, None]
        for (layer, projections, gates), cached in zip(self._layers, cache.layers, strict=True):
            projected = projections(layer.input_layernorm(hidden))
            queries, keys, values = self._heads(layer.self_attn, projected, *turns)
            keys, values = cast(RowLayer, cached).update(keys[:, :, None], values[:, :, None])
            seen = scaled_dot_product_attention(
                queries, keys, values, attn_mask=mask, scale=layer.self_attn.scaling
            )
            hidden = hidden + layer.self_attn.o_proj(seen.flatten(1))
            gate, up = gates(layer.post_attention_layernorm(hidden)).chunk(2, -1)
            hidden = hidden + layer.mlp.down_proj(layer.mlp.act_fn(gate) * up)
        logits: Tensor = self._head(self._norm(hidden))
        return logits

    def _heads(
        self, attention: Any, projected: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries by key head, (rows, key heads, queries of each, size), then keys and values.

        Keys and values are (rows, key heads, size). Rotation: Su et al. 2021, of half vectors.
        """
        count, both = self._key_heads, self._query_heads + self._key_heads
        heads = projected.view(len(projected), both + count, -1)
        turning, values = torch.split(heads, [both, count], 1)
        if hasattr(attention, "q_norm"):
            queries, keys = torch.split(turning, [self._query_heads, count], 1)
            turning = torch.cat((attention.q_norm(queries), attention.k_norm(keys)), 1)
        first, second = turning.chunk(2, -1)
        turning = turning * cos + torch.cat((-second, first), -1) * sin
        queries, keys = torch.split(turning, [self._query_heads, count], 1)
        return queries.reshape(len(queries), count, -1, queries.shape[-1]), keys, values
