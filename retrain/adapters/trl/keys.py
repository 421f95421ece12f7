"""Which GRPOConfig keys `backend.args` may carry: all of the installed TRL's except `REFUSED`.

TRL is not imported, which would load torch: its field names are read from its sources.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from retrain.errors import NEAR, nearest
from retrain.losses import LOSSES

_SAMPLER = "it has no effect: this adapter's own sampler generates the completions"
_DATA = "it has no effect: the batches come from the run, not from a TRL dataset"
_MODEL = "it is not supported: the adapter loads `model` itself"
_PROCESS = "set backend.processes and backend.sharding"
_POLICY = "it is not supported: it would train a policy other than the one that was sampled"

REFUSED: Mapping[str, str] = {
    "vllm_importance_sampling_*": "set algorithm.mismatch",
    "scale_rewards multi_objective_aggregation": "set `algorithm`'s own keys",
    "num_generations*": "set algorithm.group_size",
    "loss_type": "set algorithm.loss",
    "adam_beta1": "set backend.beta1",
    "adam_beta2": "set backend.beta2",
    "adam_epsilon": "set backend.eps",
    "use_cpu": "set backend.device",
    "bf16* fp16*": "set backend.dtype",
    "gradient_checkpointing* activation_checkpointing": "set backend.gradient_checkpointing",
    "learning_rate": "set backend.learning_rate",
    "lr_scheduler_type": "set backend.lr_scheduler",
    "max_grad_norm": "set backend.max_grad_norm",
    "gradient_accumulation_steps steps_per_generation auto_find_batch_size pad_to_multiple_of": (
        "set backend.micro_batch_rows"
    ),
    "warmup_*": "set backend.warmup_steps",
    "weight_decay": "set backend.weight_decay",
    "chat_template*": "set chat.arguments",
    "save_* enable_jit_checkpoint load_best_* metric_for_best_model greater_is_better": (
        "set checkpoint.every and checkpoint.keep"
    ),
    "resume_* ignore_data_skip restore_*": "use --resume",
    "*eval* do_predict prediction_loss_only include_for_metrics": "set `eval`",
    "report_to run_name project trackio_* log_* logging_* disable_tqdm num_completions_to_print "
    "include_num_input_tokens_seen skip_memory_metrics debug": "set `loggers`",
    "reward_weights": "set `rewards`",
    "max_tool_calling_iterations": "set rollout.max_turns",
    "output_dir": "set run_dir",
    "max_completion_length": "set sampling.max_tokens",
    "temperature": "set sampling.temperature",
    "top_k": "set sampling.top_k",
    "top_p": "set sampling.top_p",
    "per_device_train_batch_size generation_batch_size": "set train.groups_per_step",
    "seed data_seed": "set train.seed",
    "shuffle_dataset": "set train.shuffle",
    "max_steps num_train_epochs do_train": "set train.total_train_steps",
    "num_iterations": "it is not supported: each batch is trained once",
    "mask_truncated_completions": "it is not supported: score a truncated rollout in its reward",
    "*ref_model*": "it is not supported: TRL's checkpoint lacks a reference that changes",
    "top_entropy_quantile": "it is not supported: it is a quantile of one micro-batch only",
    "neftune_noise_alpha label_smoothing_factor": _POLICY,
    "push_to_hub* hub_*": "it is not supported: a run uploads no model",
    "accelerator_config parallelism_config average_tokens_across_devices ddp_backend "
    "ddp_broadcast_buffers ddp_static_graph ddp_timeout fsdp* deepspeed local_rank ds3_*": _PROCESS,
    "min_p repetition_penalty generation_kwargs cache_implementation use_cache *vllm* "
    "*transformers_*": _SAMPLER,
    "dataloader_* remove_unused_columns label_names train_sampling_strategy length_column_name": (
        _DATA
    ),
    "model_init_kwargs trust_remote_code *liger*": _MODEL,
}
"""Patterns of keys that a run decides in another place or that it cannot use, and what to do."""

SOURCES = (
    ("transformers", "training_args.py"),
    ("trl", "trainer/base_config.py"),
    ("trl", "trainer/grpo_config.py"),
)
"""The packages and files that define GRPOConfig and its bases."""


def refusal(key: str) -> str | None:
    """Why `backend.args` can't carry `key`; None when it can."""
    for patterns, advice in REFUSED.items():
        if any(fnmatchcase(key, pattern) for pattern in patterns.split()):
            return f"{key} can't be set in args; {advice}"
    if any(key in row.keys for row in LOSSES.values()):
        return f"{key} can't be set in args; set algorithm.loss_config.{key}"
    known = installed_keys()
    if not known or key in known:
        return None
    hint = nearest(key, sorted(known), NEAR)
    return f"the installed TRL's GRPOConfig has no key {key!r}{hint}"


@cache
def installed_keys() -> frozenset[str]:
    """The fields of the installed GRPOConfig.

    Empty where a file of `SOURCES` is missing. An unknown key is then found when the run starts, by
    GRPOConfig itself.
    """
    found: set[str] = set()
    for package, file in SOURCES:
        spec = find_spec(package)
        path = Path(spec.origin).parent / file if spec and spec.origin else None
        if path is None or not path.is_file():
            return frozenset()
        found |= _fields(ast.parse(path.read_text(encoding="utf-8")))
    return frozenset(found)


def _fields(tree: ast.Module) -> set[str]:
    """The annotated names in the classes of a module."""
    parts = [part for node in tree.body if isinstance(node, ast.ClassDef) for part in node.body]
    targets = [part.target for part in parts if isinstance(part, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}
