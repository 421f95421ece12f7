"""An estimate of a run's memory before it starts, from the model's config.json; imports no torch.

It errs high: every decoder counts as one with gated MLPs and norms of heads, and LoRA as on every
linear layer. What a layer keeps for its backward pass was counted on Llama, Qwen3 and Qwen3-MoE
(arXiv:2205.05198, section 4).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.adapters.base import Forecast
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.ranks.contract import launched
from retrain.config import RunConfig
from retrain.config.paths import TINY, find_model
from retrain.engine.available import cards, ram
from retrain.engine.tiny import CONFIG

Options = Any  # TrlOptions, whose module imports this one
FLOAT, HALF = 4, 2
"""Bytes of a float32 and of a bfloat16."""
PROMPT = 512
"""Tokens that a prompt is taken to have; its real length is known only to the tokenizer."""
OPTIMIZERS = {"sgd": 0, "adafactor": 0, "adamw_8bit": 2, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2}
"""Bytes of optimizer state per trained parameter; any other is Adam's two float32."""
TILE, COPIES = 4096 * 32768, (6, 3)
"""Logits that TRL's output head computes at once; their float32 copies, on the CPU and on a GPU."""
LIBRARIES = (600 * 10**6, 700 * 10**6)
"""Of Python, torch and TRL on the CPU; of the CUDA context and the kernels on a GPU."""
HELD = (1.3, 1.8)
"""RAM per byte of activations, with full weights and with LoRA: glibc keeps most freed blocks."""
PASS = 10**9
"""Bytes of activations per forward pass on the CPU, if `micro_batch_tokens` is `auto`."""
LORA = "train LoRA adapters with backend.lora"
ADVICE = {  # the other parts need LoRA
    "activations": "lower backend.micro_batch_tokens, or set backend.gradient_checkpointing=true",
    "sampler": "sample on other GPUs with backend.sampler of type vllm, or set staleness.target=0",
    "cache": "lower backend.max_rows or rollout.max_sequence_length",
    "libraries": "use a machine with more memory",
}


class Shape:
    """Sizes of a decoder, from a config.json; KeyError or TypeError if it lacks one."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        config = config.get("text_config") or config
        self.vocabulary, self.layers = config["vocab_size"], config["num_hidden_layers"]
        self.hidden, self.heads = config["hidden_size"], config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.head_size = config.get("head_dim") or self.hidden // self.heads
        names = ("num_experts", "num_local_experts", "n_routed_experts")
        self.experts = next((config[name] for name in names if config.get(name)), 0)
        self.active_experts = config.get("num_experts_per_tok") or 1
        mlp = config.get("moe_intermediate_size") if self.experts else 0
        self.intermediate = mlp or config.get("intermediate_size") or 4 * self.hidden
        self.tied = bool(config.get("tie_word_embeddings"))
        self.context = config.get("max_position_embeddings")

    @property
    def layer(self) -> int:
        """Parameters of a layer."""
        attention = 2 * (self.heads + self.kv_heads) * self.head_size + 2 + self.experts
        return self.hidden * (attention + 3 * self.intermediate * max(1, self.experts))

    @property
    def parameters(self) -> int:
        head = self.vocabulary * self.hidden
        return (head if self.tied else 2 * head) + self.layers * self.layer + self.hidden

    def lora(self, rank: int) -> int:
        """Parameters of adapters on every linear layer except the output head."""
        heads, mlp = (self.heads + self.kv_heads) * self.head_size, self.hidden + self.intermediate
        if self.experts:  # peft doubles the rank for the joined gate and up projections
            mlp = self.experts * (self.hidden + 2 * self.intermediate + 1)
        return rank * self.layers * (4 * self.hidden + 2 * heads + 3 * mlp)


def read_shape(model: str) -> Shape | None:
    """The shape of a model folder, of `tiny`, or of a Hub id in the cache of this machine.

    Downloads nothing; None without a config.json, or if it describes no decoder.
    """
    if model == TINY:
        return Shape(CONFIG)
    try:
        file = Path(model) / "config.json"
        if not file.is_file():
            from huggingface_hub import try_to_load_from_cache

            file = Path(str(try_to_load_from_cache(model, "config.json")))
        return Shape(json.loads(file.read_text(encoding="utf-8")))
    except (ImportError, AttributeError, LookupError, OSError, TypeError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class Needs:
    """The memory that a run needs, in bytes; `cuda` says where it trains."""

    shape: Shape
    options: Options
    config: RunConfig
    cuda: bool

    @property
    def micro_batch(self) -> int:
        """`backend.micro_batch_tokens`, with `auto` resolved."""
        if self.options.micro_batch_tokens != "auto":
            return int(self.options.micro_batch_tokens)
        token = self.shape.layers * self._layer() + COPIES[0] * FLOAT * self.shape.vocabulary
        return 16_384 if self.cuda else max(256, min(2_048, PASS // token))

    def parts(self) -> dict[str, int]:
        """At the peak of rank 0: either the activations of a step, or publishing after it."""
        options, everything = self.options, self.shape.parameters
        trained = self._adapters or everything
        frozen = FLOAT * (run_plan(self.config).reference and not self._adapters)
        frozen += self._width * bool(self.config.algorithm.kl_penalty)
        whole = {
            "weights": FLOAT * trained + (self._width * everything if self._adapters else 0),
            # DDP reduces a copy of the gradients
            "gradients": FLOAT * trained * (2 if self.processes > self._shares else 1),
            "optimizer": OPTIMIZERS.get(options.args.get("optim"), 2 * FLOAT) * trained,
            "reference": frozen * everything,
        }
        parts = {name: size // self._shares for name, size in whole.items()}
        parts |= self._sampler() | {"libraries": LIBRARIES[self.cuda]}
        published = everything * (self._width if self._adapters else FLOAT)
        if trained != everything and options.sampler.type != "local":
            published = FLOAT * trained
        elif self._shares > 1 and self.cuda:  # shards are gathered in RAM
            published = 0
        if parts["gradients"] + (activations := self._activations()) >= published:
            return {**parts, "activations": activations}
        return {**parts, "gradients": 0, "publishing": published}

    @property
    def processes(self) -> int:
        place = launched()
        return place.size if place else int(self.options.processes)

    @property
    def _shares(self) -> int:  # processes that divide the weights
        return self.processes if self.options.sharding == "full" else 1

    @property
    def _width(self) -> int:
        """Bytes of a number in the forward pass; trained weights are float32."""
        dtype = self.options.dtype
        return HALF if dtype == "bfloat16" or (dtype == "auto" and self.cuda) else FLOAT

    @property
    def _adapters(self) -> int:
        return self.shape.lora(self.options.lora.r) if self.options.lora else 0

    @property
    def _length(self) -> int:
        """Tokens of the longest sequence that the run is likely to see."""
        rollout = self.config.rollout
        turns = 1 if self.config.environment.type == "single_turn" else rollout.max_turns
        wanted = PROMPT + turns * self.config.sampling.max_tokens
        return min(wanted, rollout.max_sequence_length or wanted, self.shape.context or wanted)

    def _activations(self) -> int:
        """What a pass keeps for its backward pass, and the output head."""
        shape, layer, train = self.shape, self._layer(), self.config.train
        rows = -(-train.groups_per_step * self.config.algorithm.group_size // self.processes)
        tokens = max(self.micro_batch, self._length)
        tokens = min(tokens, min(rows, self.options.micro_batch_rows or rows) * self._length)
        recompute = self.options.gradient_checkpointing
        recompute = self.cuda if recompute == "auto" else recompute
        kept = layer + shape.layers * FLOAT * shape.hidden if recompute else shape.layers * layer
        size = tokens * (kept + 2 * FLOAT * shape.hidden)
        size += COPIES[self.cuda] * FLOAT * min(TILE, tokens * shape.vocabulary)
        if not self._adapters:  # the gradient of the head; autocast's copies of the weights
            size += FLOAT * shape.vocabulary * shape.hidden
            size += HALF * shape.layer * (1 if self._shares > 1 else shape.layers)
        if self._shares > 1:  # FSDP gathers two layers and the embeddings
            size += 2 * FLOAT * (shape.layer + shape.vocabulary * shape.hidden)
        return size if self.cuda else int(HELD[self._adapters > 0] * size)

    def _layer(self) -> int:
        """Bytes per token that a layer keeps for its backward pass, without checkpointing."""
        shape, width = self.shape, self._width
        kept = (
            26 * shape.hidden + (2 * width + 8) * (shape.heads + shape.kv_heads) * shape.head_size
        )
        kept += 6 * shape.heads * self._length * (self.options.attention == "eager")
        if shape.experts:  # computed in float32 from float32 weights
            return kept + shape.active_experts * (16 * shape.intermediate + 8 * shape.hidden)
        return kept + 4 * width * shape.intermediate

    def _sampler(self) -> dict[str, int]:
        """The local sampler's copies of the weights, and its keys, values and logits."""
        shape, target = self.shape, self.config.staleness.target
        if self.options.sampler.type != "local":
            return {}
        groups = self.config.rollout.slots or (target + 1) * self.config.train.groups_per_step
        rows = min(self.options.max_rows, groups * self.config.algorithm.group_size)
        token = 2 * self._width * shape.layers * shape.kv_heads * shape.head_size
        cache = rows * (self._length * token * 3 // 2 + 4 * FLOAT * shape.vocabulary)  # it grows
        copies = 2 if target else 1  # one while the other is replaced
        return {"sampler": copies * self._width * shape.parameters, "cache": cache}


def micro_batch_tokens(options: Options, config: RunConfig, *, cuda: bool) -> int:
    shape = read_shape(find_model(config.model, config.base_dir))
    return Needs(shape, options, config, cuda).micro_batch if shape else 2_048


def forecast(options: Options, config: RunConfig) -> Forecast:
    """What the run needs, beside what is free."""
    shape = read_shape(find_model(config.model, config.base_dir))
    if shape is None:
        return Forecast(f"memory: unknown: found no config.json of a decoder for {config.model}")
    present = [] if options.device == "cpu" else cards()
    needs = Needs(shape, options, config, cuda=bool(present) or options.device == "cuda")
    parts, others = needs.parts(), needs.processes - 1
    total, free, where = sum(parts.values()), ram(), "in RAM"
    if needs.cuda:
        least = min(present[: others + 1], key=lambda card: card.free, default=None)
        free, where = (least.free, f"on {least.name}") if least else (None, "on the CUDA device")
    else:  # the processes share the RAM, and one of them samples
        own = sum(parts.get(name, 0) for name in ("sampler", "cache", "publishing"))
        total += others * (total - own)
    sizes = ", ".join(f"{name} {_gb(size)}" for name, size in parts.items() if size >= 5e7)
    text = f"memory: about {_gb(total)} GB {where} at the peak ({sizes})"
    if free is not None:
        text += f"; {_gb(free)} GB are free"
    if free is None or total <= free:
        return Forecast(text)
    largest = max(parts, key=lambda name: parts[name])
    return Forecast(
        text,
        f"this run needs about {_gb(total)} GB {where}, but {_gb(free)} GB are free: it can end "
        f"with an out-of-memory error. The largest part is {largest}: {ADVICE.get(largest, LORA)}",
    )


def _gb(size: float) -> str:
    return f"{size / 1e9:.{2 if size < 0.995e9 else 1 if size < 99.95e9 else 0}f}"
