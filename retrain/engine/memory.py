"""How much memory a run needs, by formulas: weights, gradients, optimizer, activations, cache.

Imports no torch. What a layer keeps for its backward pass was counted on real Llama, Qwen3 and
Qwen3-MoE models with `torch.autograd.graph.saved_tensors_hooks` (the method of arXiv:2205.05198,
section 4, for gated MLPs and RMSNorm). All sizes are bytes per process, each of
which has its own card.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from retrain.engine.shapes import Shape

FLOAT, HALF = 4, 2
"""Bytes of a float32 and of a bfloat16."""
OPTIMIZERS = {"sgd": 0, "adafactor": 0, "adamw_8bit": 2, "adamw_bnb_8bit": 2, "paged_adamw_8bit": 2}
"""Bytes of optimizer state per trained parameter; any other is Adam's two float32."""
TILE = 4096 * 32768
"""Logits that TRL's fused output head computes at once: tokens x vocabulary."""
TILES = 3
"""float32 copies of a tile: logits, probabilities, their gradient."""
LIBRARIES = {"cpu": 550 * 10**6, "cuda": 700 * 10**6}
"""Of Python, torch and TRL on the CPU; of the CUDA context and the kernels on a card."""
SHARED = 150 * 10**6
"""Of the libraries on the CPU, what all processes of a machine share."""
GROWTH = 1.5
"""The sampler's cache grows by this factor (see `kv_cache.RowCache`)."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a model is trained and sampled; the defaults are those of a full-weight run on a GPU."""

    half: bool = True
    """bfloat16 arithmetic; trained weights stay in float32, frozen ones are bfloat16."""
    lora_parameters: int = 0
    """0: all weights are trained."""
    checkpointing: bool = True
    """Gradient checkpointing."""
    tokens: int = 16_384
    """Of a micro-batch, padding included."""
    length: int = 2_048
    """Tokens of the longest sequence."""
    rows: int = 256
    """Sequences that the sampler decodes at once."""
    local_sampler: bool = True
    """The sampler shares the memory; False: it is a server on other cards."""
    publishes_adapters: bool = False
    """Only the LoRA matrices are sent to the sampler, not the merged weights."""
    overlap: bool = True
    """Sampling goes on while weights are published, so that the sampler keeps a second copy."""
    references: int = 0
    """Bytes per weight of frozen copies of the first model, such as 4 for one in float32."""
    eager: bool = False
    """Attention keeps its matrix of scores."""
    optimizer: str = "adamw"
    processes: int = 1
    sharding: Literal["none", "full"] = "none"
    """`none`: each process has all of the weights (DDP); `full`: a share of them (FSDP2)."""
    device: Literal["cpu", "cuda"] = "cuda"


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by purpose. Not all are held at once: `peak` has those that are."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    sampler: int
    """The sampler's own copies of the weights."""
    cache: int
    """Keys and values of the sequences being sampled."""
    reference: int
    publishing: int
    """The copy of the weights on their way to the sampler, between two steps."""
    libraries: int

    @property
    def peak(self) -> dict[str, int]:
        """What is held at the peak: weights are published between two steps, without gradients
        and activations."""
        parts = {field.name: getattr(self, field.name) for field in fields(self)}
        step = self.gradients + self.activations >= self.publishing
        for name in ("publishing",) if step else ("gradients", "activations"):
            del parts[name]
        return parts

    @property
    def total(self) -> int:
        """The bytes of the peak."""
        return sum(self.peak.values())

    @property
    def of_follower(self) -> Memory:
        """Of another process than rank 0 on the CPU: it trains, but neither samples nor publishes.

        Its part of the libraries is what it doesn't share with rank 0.
        """
        return replace(self, sampler=0, cache=0, publishing=0, libraries=self.libraries - SHARED)


def estimate(shape: Shape, setup: Setup) -> Memory:
    """The memory of the process that needs the most: of rank 0, which has the sampler."""
    everything, width = shape.parameters, HALF if setup.half else FLOAT
    lora = setup.lora_parameters
    trained = lora or everything
    shares = setup.processes if setup.sharding == "full" else 1
    copies = 2 if setup.processes > shares else 1  # DDP reduces a copy of the gradients
    weights = FLOAT * trained + (width * everything if lora else 0)
    sampler = width * everything * (2 if setup.overlap else 1)
    publishing = everything * (width if lora else FLOAT)
    if setup.publishes_adapters:
        publishing = FLOAT * lora
    elif shares > 1 and setup.device == "cuda":
        publishing = 0  # shards are gathered in RAM
    return Memory(
        weights=weights // shares,
        gradients=FLOAT * trained * copies // shares,
        optimizer=OPTIMIZERS.get(setup.optimizer, 2 * FLOAT) * trained // shares,
        activations=activations(shape, setup) + (gathered(shape) if shares > 1 else 0),
        sampler=sampler if setup.local_sampler else 0,
        cache=sampling(shape, setup) if setup.local_sampler else 0,
        reference=setup.references * everything // shares,
        publishing=publishing,
        libraries=LIBRARIES[setup.device],
    )


def activations(shape: Shape, setup: Setup) -> int:
    """Bytes that one micro-batch keeps for its backward pass, and those of the output head."""
    full, residual = not setup.lora_parameters, FLOAT
    if setup.half and not full:
        residual = HALF
    layer = setup.tokens * layer_bytes(shape, setup)
    # autocast keeps its copies of all weights to the end of the forward pass, FSDP2 of one layer
    casts = shape.layers if setup.sharding == "none" else 1
    cast = casts * HALF * shape.layer if setup.half and full else 0
    if setup.checkpointing:
        kept = setup.tokens * shape.layers * shape.hidden * residual + layer
    else:
        kept = shape.layers * layer
    head = TILES * FLOAT * min(TILE, setup.tokens * shape.vocabulary)
    head += 2 * FLOAT * setup.tokens * shape.hidden
    head += FLOAT * shape.vocabulary * shape.hidden if full else 0  # the gradient of its weight
    return kept + cast + head


def layer_bytes(shape: Shape, setup: Setup) -> int:
    """Bytes per token that one layer keeps for its backward pass, without checkpointing."""
    half, width = setup.half, HALF if setup.half else FLOAT
    residual = (18 if half else 16) if setup.lora_parameters else (26 if half else 24)
    heads = (shape.heads + shape.kv_heads) * shape.head_size
    kept = residual * shape.hidden + 2 * width * heads
    if shape.head_norms:
        kept += (6 if half else 8) * heads
    if setup.eager:
        kept += (6 if half else 4) * shape.heads * setup.length
    if shape.sparse_layers:  # experts are computed in float32 from float32 weights
        active = shape.active_experts
        return kept + active * (16 * shape.expert_intermediate + 8 * shape.hidden)
    return kept + 4 * width * shape.intermediate


def gathered(shape: Shape) -> int:
    """Bytes of whole weights that FSDP2 gathers at once: two layers and the embeddings."""
    return FLOAT * (2 * shape.layer + shape.embeddings)


def sampling(shape: Shape, setup: Setup) -> int:
    """Bytes of the sampler's keys and values, and of its logits."""
    logits = 4 * FLOAT * setup.rows * shape.vocabulary
    return int(GROWTH * setup.rows * setup.length * token_bytes(shape, setup.half)) + logits


def token_bytes(shape: Shape, half: bool = True) -> int:
    """Bytes of one token's keys and values in all layers."""
    width = HALF if half else FLOAT
    return 2 * shape.layers * shape.kv_heads * shape.head_size * width
