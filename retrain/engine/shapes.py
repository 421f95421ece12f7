"""The shape of a causal LM and its number of parameters, from its config.json.

Imports no torch. The counts are exact for Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE; any other
decoder with gated MLPs is counted as if it were one of these.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.config.paths import TINY
from retrain.engine.tiny import CONFIG

EXACT = frozenset({"llama", "mistral", "qwen2", "qwen3", "qwen3_moe"})
"""Values of `model_type` whose parameters are counted exactly."""
NEEDED = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a decoder; a model without experts has `experts` 0."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    tied: bool = False
    """The output head is the embedding."""
    qkv_bias: bool = False
    output_bias: bool = False
    """Of the attention's output projection."""
    mlp_bias: bool = False
    head_norms: bool = False
    """Norms of queries and keys, as in Qwen3."""
    experts: int = 0
    """Per sparse layer."""
    active_experts: int = 0
    """Per token."""
    expert_intermediate: int = 0
    sparse_layers: int = 0
    context: int | None = None
    """The maximum number of tokens of a sequence."""
    exact: bool = True
    """The architecture is one of `EXACT`."""

    @property
    def attention(self) -> int:
        """Parameters of one layer's attention, its norms of heads included."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        biases = self.qkv_bias * (queries + 2 * keys) + self.output_bias * self.hidden
        return (
            self.hidden * (2 * queries + 2 * keys) + biases + self.head_norms * 2 * self.head_size
        )

    @property
    def dense_mlp(self) -> int:
        """Parameters of a gated MLP."""
        biases = self.mlp_bias * (2 * self.intermediate + self.hidden)
        return 3 * self.hidden * self.intermediate + biases

    @property
    def sparse_mlp(self) -> int:
        """Parameters of a layer's experts and their router."""
        return self.experts * self.hidden * (3 * self.expert_intermediate + 1)

    @property
    def embeddings(self) -> int:
        """Parameters of the embedding, and of the output head if it is not tied."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def layer(self) -> int:
        """Parameters of the largest layer."""
        mlp = self.sparse_mlp if self.sparse_layers else self.dense_mlp
        return self.attention + mlp + 2 * self.hidden

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        dense = self.layers - self.sparse_layers
        mlps = dense * self.dense_mlp + self.sparse_layers * self.sparse_mlp
        layers = self.layers * (self.attention + 2 * self.hidden) + mlps
        return self.embeddings + layers + self.hidden

    def lora(self, rank: int, modules: str | tuple[str, ...] = "all-linear") -> int:
        """Parameters of LoRA adapters of `rank` on the linear layers, the head excluded.

        `modules` are names such as q_proj. Any other string (a regular expression) counts as all
        layers, and so does a name that this shape lacks. On all layers, peft adapts the router and
        each expert too, with the double rank for the joined gate and up projections.
        """
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        dense = self.layers - self.sparse_layers
        sizes = {
            "q_proj": (self.hidden + queries) * self.layers,
            "k_proj": (self.hidden + keys) * self.layers,
            "v_proj": (self.hidden + keys) * self.layers,
            "o_proj": (queries + self.hidden) * self.layers,
            "gate_proj": (self.hidden + self.intermediate) * dense,
            "up_proj": (self.hidden + self.intermediate) * dense,
            "down_proj": (self.hidden + self.intermediate) * dense,
        }
        named = {modules} if isinstance(modules, str) else set(modules)
        if named <= sizes.keys():
            return rank * sum(sizes[name] for name in named)
        expert = 3 * self.hidden + 5 * self.expert_intermediate
        experts = self.sparse_layers * (self.experts * (expert + 1) + self.hidden)
        return rank * (sum(sizes.values()) + experts)


def shape_of(config: Mapping[str, Any]) -> Shape | None:
    """The shape that the values of a config.json describe; None if it lacks a size."""
    inner = config.get("text_config")
    config = inner if isinstance(inner, Mapping) else config
    if not all(isinstance(config.get(key), int) and config[key] > 0 for key in NEEDED):
        return None
    kind, hidden = config.get("model_type", ""), config["hidden_size"]
    heads, layers = config["num_attention_heads"], config["num_hidden_layers"]
    experts = _first(config, "num_experts", "num_local_experts", "n_routed_experts")
    return Shape(
        vocabulary=config["vocab_size"],
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=_first(config, "num_key_value_heads") or heads,
        head_size=_first(config, "head_dim") or hidden // heads,
        intermediate=_first(config, "intermediate_size") or 4 * hidden,
        tied=bool(config.get("tie_word_embeddings", kind.startswith("gemma"))),
        qkv_bias=bool(config.get("attention_bias", False)) or kind.startswith("qwen2"),
        output_bias=bool(config.get("attention_bias", False)) and not kind.startswith("qwen2"),
        mlp_bias=bool(config.get("mlp_bias", False)),
        head_norms=kind.startswith("qwen3"),
        experts=experts,
        active_experts=_first(config, "num_experts_per_tok"),
        expert_intermediate=_first(config, "moe_intermediate_size", "intermediate_size"),
        sparse_layers=_sparse_layers(config, layers) if experts else 0,
        context=config.get("max_position_embeddings"),
        exact=kind in EXACT,
    )


def read_shape(model: str) -> Shape | None:
    """The shape of a model folder, of `tiny`, or of a Hub id in the cache of this machine.

    Downloads nothing; None where no config.json is found, or it is no decoder's.
    """
    if model == TINY:
        return shape_of({"model_type": "llama", **CONFIG})
    file = find_config(model)
    try:
        values = json.loads(file.read_text(encoding="utf-8")) if file else None
    except (OSError, ValueError):  # the backend reports it
        return None
    return shape_of(values) if isinstance(values, dict) else None


def find_config(model: str) -> Path | None:
    """The config.json of a model folder, or of a Hub id in the cache of this machine."""
    file = Path(model) / "config.json"
    if file.is_file():
        return file
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json")
    except (ImportError, ValueError):  # not installed, or no id
        return None
    return Path(found) if isinstance(found, str) else None


def _first(config: Mapping[str, Any], *keys: str) -> int:
    """The first of these sizes that the config has; 0 if none."""
    return next((config[key] for key in keys if isinstance(config.get(key), int)), 0)


def _sparse_layers(config: Mapping[str, Any], layers: int) -> int:
    """Layers with experts: all, but for the two rules of Qwen's MoE models."""
    every, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or ()
    return sum(1 for n in range(layers) if n not in dense and (n + 1) % every == 0)
