"""From the run's config to a model, TRL's arguments and the trainer.

TRL loads the reference model of a KL term itself, from the folder of the trained model. The
sampler's model is loaded separately too: TRL patches the trained model's forward with a closure
over that model, so a deepcopy of it would still read the trained weights.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import PrinterCallback, ProgressCallback
from transformers.utils import logging as transformers_logging
from trl import GRPOConfig

from retrain.adapters.trl.options import LoraOptions, TrlOptions
from retrain.adapters.trl.plan import LossPlan
from retrain.adapters.trl.rows import micro_batches
from retrain.adapters.trl.trainer import PipeTrainer
from retrain.adapters.trl.worker import TrainerThread
from retrain.config import RunConfig
from retrain.engine.models import choose_device, load_model
from retrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and the precision of the model."""

    device: torch.device
    autocast: bool
    """bfloat16 arithmetic over float32 weights."""
    frozen_dtype: torch.dtype
    """The type of weights that are not trained: the sampler's copy, and the base of LoRA."""


def place(options: TrlOptions) -> Placement:
    """Resolve `auto`; raises ConfigError when the config asks for a missing CUDA device."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "backend.device: got cuda, but torch finds no CUDA device; set it to cpu or auto, or "
            "install a CUDA build of torch"
        )
    device = torch.device(choose_device() if options.device == "auto" else options.device)
    half = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    return Placement(device, half, torch.bfloat16 if half else torch.float32)


def build_trainer(
    options: TrlOptions,
    config: RunConfig,
    plan: LossPlan,
    *,
    folder: str,
    tokenizer: Any,  # a PreTrainedTokenizerBase; transformers ships no types
    scratch: Path,
    feed: TrainerThread,
) -> PipeTrainer:
    """The trainer of a run, with the model in `folder`; it only writes to `scratch`.

    Raises ConfigError when TRL rejects the arguments.
    """
    hush()
    placement = place(options)
    trained = placement.frozen_dtype if options.lora else torch.float32
    try:
        trainer = PipeTrainer(
            load_model(folder, placement.device, trained),
            reward_funcs=_never_called,
            args=grpo_args(options, config, plan, placement, scratch),
            train_dataset=_placeholder(config),
            processing_class=tokenizer,
            peft_config=_lora(options.lora),
            plan=plan,
            cut=partial(
                micro_batches,
                rows=options.micro_batch_rows,
                tokens=_tokens(options, placement),
            ),
            feed=feed,
        )
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"TRL rejects this backend: {error}") from error
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    return trainer


def grpo_args(
    options: TrlOptions,
    config: RunConfig,
    plan: LossPlan,
    placement: Placement,
    scratch: Path,
) -> GRPOConfig:
    """TRL's arguments: one placeholder batch per step, and no generation, logging or saving.

    For temperature 0 the sampler is greedy and reports log-probs at temperature 1, so TRL uses 1.
    """
    cuda = placement.device.type == "cuda"
    recompute = options.gradient_checkpointing
    args = GRPOConfig(
        output_dir=str(scratch),
        max_steps=max(1, config.train.total_train_steps),
        seed=config.train.seed,
        learning_rate=options.learning_rate,
        lr_scheduler_type=options.lr_scheduler,
        warmup_steps=options.warmup_steps,
        adam_beta1=options.beta1,
        adam_beta2=options.beta2,
        adam_epsilon=options.eps,
        weight_decay=options.weight_decay,
        max_grad_norm=options.max_grad_norm,
        use_cpu=not cuda,
        bf16=placement.autocast,
        activation_checkpointing=cuda if recompute == "auto" else recompute,
        temperature=config.sampling.temperature or 1.0,
        per_device_train_batch_size=2,  # TRL needs at least two generations; see _placeholder
        num_generations=2,
        shuffle_dataset=False,
        ignore_data_skip=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **{**plan.args, **options.args},
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # one GPU: Trainer would use nn.DataParallel, which TRL rejects
    return args


def _tokens(options: TrlOptions, placement: Placement) -> int:
    if options.micro_batch_tokens == "auto":
        return 16_384 if placement.device.type == "cuda" else 2_048
    return options.micro_batch_tokens


def _placeholder(config: RunConfig) -> Dataset:
    """One empty prompt per step, which drives Trainer's loop and is never read."""
    return Dataset.from_dict({"prompt": [""] * max(1, config.train.total_train_steps)})


def hush() -> None:
    """Keep other output off the terminal: progress bars, and deprecations inside peft."""
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )


def _never_called(**_: object) -> list[float]:
    """TRL requires a reward function, but the pipe has scored the rollouts already."""
    raise AssertionError("TRL must not score: the pipe does")


def _lora(options: LoraOptions | None) -> LoraConfig | None:
    if options is None:
        return None
    modules = options.target_modules
    return LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
