"""The memory of a run of the `trl` backend, before it starts. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from retrain.adapters.base import Forecast
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.ranks.contract import launched
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.engine.available import Card, cards, ram
from retrain.engine.memory import Memory, Setup, estimate
from retrain.engine.shapes import Shape, find_config, read_shape

Options = Any  # TrlOptions, whose module imports this one
PROMPT = 512
"""Tokens that a prompt is taken to have, since its real length is known only to the tokenizer."""
GB = 1e9
ADVICE = {
    "weights": "train LoRA adapters with backend.lora",
    "gradients": "train LoRA adapters with backend.lora",
    "optimizer": "train LoRA adapters with backend.lora",
    "activations": "lower backend.micro_batch_tokens, or set gradient_checkpointing to true",
    "sampler": "sample on other GPUs with backend.sampler of type vllm, or set staleness.target "
    "to 0",
    "cache": "lower backend.max_rows or rollout.max_sequence_length",
    "reference": "train LoRA adapters with backend.lora, whose base is the reference",
    "publishing": "train a smaller model",
    "libraries": "use a machine with more memory",
}
"""What lowers each part of the estimate."""


def forecast(options: Options, config: RunConfig) -> Forecast:
    """What the run needs beside what is free; unknown without the model's config.json."""
    model = find_model(config.model, config.base_dir)
    shape = read_shape(model)
    if shape is None:
        found = find_config(model)
        why = "does not describe a decoder" if found else "is not on this machine"
        return Forecast(f"memory: unknown: config.json of {config.model} {why}")
    present = [] if options.device == "cpu" else cards()
    setup = setup_of(options, config, shape, cuda=bool(present) or options.device == "cuda")
    return compared(estimate(shape, setup), setup, present, ram(), exact=shape.exact)


def compared(
    need: Memory, setup: Setup, present: list[Card], free_ram: int | None, *, exact: bool = True
) -> Forecast:
    """The line of the estimate, and a warning if less memory is free."""
    total, others, free, where = need.total, 0, free_ram, "in RAM"
    if setup.device == "cuda":
        own = present[: setup.processes]
        least = min(own, key=lambda card: card.free, default=None)
        free, where = (least.free, f"on {least.name}") if least else (None, "on the CUDA device")
    else:  # the processes share the RAM
        others = setup.processes - 1
        total += others * need.of_follower.total
    sizes = need.peak
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in sizes.items() if size >= 5e7)
    about = "about" if exact else "roughly"
    text = f"memory: {about} {_gb(total)} GB {where} at the peak"
    if others:
        text += f": rank 0 {_gb(need.total)} ({parts}) + {others} x {_gb(need.of_follower.total)}"
    else:
        text += f" ({parts})"
    if free is None:
        return Forecast(text)
    text += f"; {_gb(free)} GB are free"
    if total <= free:
        return Forecast(text)
    largest = max(sizes, key=lambda name: sizes[name])
    return Forecast(
        text,
        f"this run needs {about} {_gb(total)} GB {where}, but {_gb(free)} GB are free: it "
        f"can end with an out-of-memory error. The largest part is {largest}: {ADVICE[largest]}",
    )


def _gb(size: float) -> str:
    """In GB, with two or three digits, never as 1.2e+02."""
    size /= GB
    return f"{size:.{2 if size < 0.995 else 1 if size < 99.95 else 0}f}"


def setup_of(options: Options, config: RunConfig, shape: Shape, *, cuda: bool) -> Setup:
    """The options as the formulas need them, with every `auto` resolved."""
    lora, recompute = options.lora, options.gradient_checkpointing
    half = options.dtype == "bfloat16" or (options.dtype == "auto" and cuda)
    tokens = options.micro_batch_tokens
    limit = (16_384 if cuda else 2_048) if tokens == "auto" else tokens
    length = longest(config, shape)
    if options.micro_batch_rows is not None:
        limit = min(limit, options.micro_batch_rows * length)
    group, groups = config.algorithm.group_size, config.train.groups_per_step
    open_groups = config.rollout.slots or (config.staleness.target + 1) * groups
    plan = run_plan(config)
    references = 4 if plan.reference and lora is None else 0
    if config.algorithm.kl_penalty:
        references += 2 if half else 4
    place = _placement(options)
    setup = Setup(
        half=half,
        lora_parameters=shape.lora(lora.r, lora.target_modules) if lora else 0,
        checkpointing=cuda if recompute == "auto" else recompute,
        tokens=min(max(limit, length), -(-group * groups // place["processes"]) * length),
        length=length,
        rows=min(options.max_rows, open_groups * group),
        overlap=config.staleness.target > 0,
        references=references,
        eager=options.attention == "eager",
        optimizer=str(options.args.get("optim", "adamw")),
        device="cuda" if cuda else "cpu",
    )
    return replace(setup, **place)


def longest(config: RunConfig, shape: Shape) -> int:
    """Tokens of the longest sequence that the run is likely to see."""
    turns = 1 if config.environment.type == "single_turn" else config.rollout.max_turns
    wanted = PROMPT + turns * config.sampling.max_tokens
    limits = (config.rollout.max_sequence_length, shape.context)
    return min([wanted, *(limit for limit in limits if limit)])


def _placement(options: Options) -> dict[str, Any]:  # fields of Setup, of several types
    """Processes, sharding, where sampling takes place, and what is published."""
    place = launched()
    local, lora = options.sampler.type == "local", options.lora is not None
    return {
        "processes": place.size if place else options.processes,
        "sharding": options.sharding,
        "local_sampler": local,
        "publishes_adapters": not local and lora and options.sampler.way(lora=True) == "adapter",
    }
