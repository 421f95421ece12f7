"""From the run's config to a model, TRL's arguments and the trainer.

TRL loads the reference model of a KL term itself, from the folder of the trained model. The
sampler's model is loaded separately too: TRL patches the trained model's forward with a closure
over that model, so a deepcopy of it would still read the trained weights.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
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

from retrain.adapters.trl.memory import micro_batch_tokens
from retrain.adapters.trl.options import LoraOptions, TrlOptions
from retrain.adapters.trl.plan import LossPlan
from retrain.adapters.trl.ranks.contract import Place
from retrain.adapters.trl.ranks.group import ALONE, Ranks
from retrain.adapters.trl.rows import micro_batches
from retrain.adapters.trl.trainer import Feed, PipeTrainer
from retrain.config import RunConfig
from retrain.engine.models import attention_problem, choose_device, load_model
from retrain.errors import ConfigError

RECOMPUTE = "activation_checkpointing"
if not hasattr(GRPOConfig, RECOMPUTE):
    RECOMPUTE = "gradient_checkpointing"  # its name before transformers 5.23
SHARDED: Mapping[str, Any] = {  # GRPOConfig keys
    "fsdp": True,
    "fsdp_config": {
        "version": 2,
        "state_dict_type": "FULL_STATE_DICT",
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": True,
        "cpu_ram_efficient_loading": False,  # the sampler's copy is loaded in the same process
    },
}
"""FSDP2, with checkpoints that another number of ranks can load."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and the precision of the model."""

    device: torch.device
    autocast: bool
    """bfloat16 arithmetic over float32 weights."""
    frozen_dtype: torch.dtype
    """The type of weights that are not trained: the sampler's copy, and the base of LoRA."""


def place_model(options: TrlOptions, place: Place | None = None) -> Placement:
    """Resolve `auto`, for the process in `place`.

    That its devices are there is checked before (`TrlOptions.problems`). Raises ConfigError for an
    attention that this device and type can't compute.
    """
    device = torch.device(choose_device() if options.device == "auto" else options.device)
    if place is not None and device.type == "cuda":
        device = torch.device("cuda", place.local_rank)
    half = options.dtype == "bfloat16" or (options.dtype == "auto" and device.type == "cuda")
    dtype = "bfloat16" if half else "float32"
    if problem := attention_problem(options.attention, device.type, dtype):
        raise ConfigError(problem)
    return Placement(device, half, torch.bfloat16 if half else torch.float32)


def build_trainer(
    options: TrlOptions,
    config: RunConfig,
    plan: LossPlan,
    *,
    folder: str,
    tokenizer: Any,  # a PreTrainedTokenizerBase; transformers ships no types
    scratch: Path,
    feed: Feed,
    ranks: Ranks = ALONE,
) -> PipeTrainer:
    """The trainer of a run, with the model in `folder`; it only writes to `scratch`.

    With several ranks, all must call this.

    Raises ConfigError when TRL rejects the arguments.
    """
    hush()
    placement = place_model(options, ranks.place)
    cuda = placement.device.type == "cuda"
    sharded = ranks.size > 1 and options.sharding == "full"
    trained = placement.frozen_dtype if options.lora else torch.float32
    limit = options.micro_batch_rows
    try:
        model = load_model(folder, placement.device, trained, options.attention)
        args = grpo_args(options, config, plan, placement, scratch, sharded=sharded)
        if args.ddp_find_unused_parameters is None:
            args.ddp_find_unused_parameters = _has_optional_parts(model)
        trainer = PipeTrainer(
            model,
            reward_funcs=lambda **_: [],  # TRL requires one, but the pipe has scored the rollouts
            args=args,
            # one empty prompt per step and rank drives Trainer's loop, and is never read
            train_dataset=Dataset.from_dict({"prompt": [""] * args.max_steps * ranks.size}),
            processing_class=tokenizer,
            peft_config=_lora(options.lora),
            plan=plan,
            cut=partial(
                micro_batches,
                rows=limit and limit * ranks.size,
                tokens=micro_batch_tokens(options, config, cuda=cuda) * ranks.size,
            ),
            feed=feed,
            ranks=ranks,
            sharded=sharded,
        )
    except ConfigError:  # a ValueError too
        raise
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"TRL rejects this backend: {error}") from error
    torch.set_num_threads(options.threads)  # accelerate has set its own number
    for noisy in (PrinterCallback, ProgressCallback):
        trainer.remove_callback(noisy)
    return trainer


def grpo_args(
    options: TrlOptions,
    config: RunConfig,
    plan: LossPlan,
    placement: Placement,
    scratch: Path,
    *,
    sharded: bool = False,
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
        temperature=config.sampling.temperature or 1.0,
        per_device_train_batch_size=2,  # TRL needs at least two generations
        num_generations=2,
        shuffle_dataset=False,
        ignore_data_skip=True,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
        **{
            RECOMPUTE: cuda if recompute == "auto" else recompute,
            **(SHARDED if sharded else {}),
            **plan.args,
            **options.args,
        },
    )
    if args.n_gpu > 1:
        args._n_gpu = 1  # one GPU: Trainer would use nn.DataParallel, which TRL rejects
    return args


def _has_optional_parts(model: Any) -> bool:
    """Whether a pass may leave weights out: experts without a token, or a tower for images.

    DDP must then search for them in each pass, and warns of a search in vain. Experts that are
    fused in one tensor always have a gradient.
    """
    if model.config.get_text_config() is not model.config:
        return True
    return any(
        isinstance(module, torch.nn.ModuleList) and name.endswith("experts")
        for name, module in model.named_modules()
    )


def hush() -> None:
    """Keep other output off the terminal: progress bars, and other libraries' warnings."""
    transformers_logging.disable_progress_bar()
    warnings.filterwarnings(
        "ignore", message="`is_gradient_checkpointing` is deprecated", category=FutureWarning
    )
    warnings.filterwarnings("ignore", message="OMP_NUM_THREADS/MKL_NUM_THREADS unset")


def _lora(options: LoraOptions | None) -> LoraConfig | None:
    if options is None:
        return None
    modules = options.target_modules
    return LoraConfig(
        r=options.r,
        lora_alpha=options.alpha,  # type: ignore[arg-type]  # PEFT computes with any number
        lora_dropout=options.dropout,
        target_modules=modules if isinstance(modules, str) else list(modules),
        task_type="CAUSAL_LM",
    )
