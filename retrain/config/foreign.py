"""The keys of NeMo RL, NexRL, TRL and earlier releases, and their equivalents here."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN = frozenset(
    {"trainer", "training", "policy", "grpo", "loss_fn", "prompt_source", "service"}
)
"""Sections of these systems; each of their keys is explained separately."""

_ONE_PROCESS = "remove it: a run is one process"
_OWN_TRAINER = (
    "run a recipe with its own trainer by `python -m retrain.trainer.nexrl -c FILE`, which checks "
    "it; add --run-nexrl to train"
)
ADVICE: Mapping[str, str] = {
    "custom_trainer_class_name": _OWN_TRAINER,
    "custom_trainer_module_path": _OWN_TRAINER,
    "num_nodes": _ONE_PROCESS,
    "tensor_parallel_size": _ONE_PROCESS,
    "tokenizer_path": "remove it: the model's own tokenizer is used",
    "world_size": _ONE_PROCESS,
}
"""The last part of keys without an equivalent here, and what to do instead."""

_REWARDS = "rewards: a list of {type, weight, ...}"
PATHS: Mapping[str, str] = {
    "algorithm.backend": "backend.type",
    "algorithm.batch_size": "train.groups_per_step",
    "algorithm.name": "algorithm.type",
    "checkpointing.checkpoint_dir": "run_dir",
    "data.train_files": "prompts.path",
    "data_loader.type": "prompts.type",
    "environment.max_steps": "rollout.max_turns",
    "environment.max_turns": "rollout.max_turns",
    "grpo.seed": "train.seed",
    "logger.backend": "loggers",
    "model.loader": "backend.type",
    "model.name_or_path": "model",
    "model.path": "model",
    "policy.model_name": "model",
    "prompt_source.type": "prompts.type",
    "reward_setup": _REWARDS,
    "staleness.no_signal": "train.no_signal",
    "staleness.order": "train.order",
    "trainer.type": "algorithm.type",
    "trainer.train_service.backend": "backend.type",
    "trainer.train_service.url": "backend.url",
}
"""Complete dotted paths of keys and sections, and their equivalents here."""

WRAPPERS = (
    ("environment.env_specific_config", "environment"),
    ("environment.config", "environment"),
    ("prompt_source.source_config", "prompts"),
    ("prompt_source", "prompts"),
    ("trainer.algorithm", "algorithm"),
    ("trainer.train_service.config", "backend"),
    ("trainer.train_service", "backend"),
)
"""Sections, and the section here that takes those of their keys that HOMES does not list."""

HOMES: Mapping[str, str] = {
    "adam_beta1": "backend.beta1",
    "adam_beta2": "backend.beta2",
    "async_mode": "staleness.target",
    "base_model": "model",
    "batch_size": "train.groups_per_step",
    "beta": "algorithm.loss_config.beta",
    "beta1": "backend.beta1",
    "beta2": "backend.beta2",
    "checkpoint_dir": "run_dir",
    "clip_range": "algorithm.loss_config.epsilon",
    "custom_rollout_worker_class_name": "environment.type, as path/file.py:Class",
    "custom_rollout_worker_module_path": "environment.type, as path/file.py:Class",
    "dataset": "prompts",
    "dataset_name": "prompts.path",
    "env": "environment",
    "env_type": "environment.type",
    "epsilon": "algorithm.loss_config.epsilon",
    "epsilon_high": "algorithm.loss_config.epsilon_high",
    "eval_steps": "eval.every",
    "experiment_name": "name",
    "file_path": "prompts.path",
    "gamma": "algorithm.gamma",
    "grad_clip_norm": "backend.max_grad_norm",
    "keep_top_k": "checkpoint.keep",
    "kl_coef": "algorithm.loss_config.beta",
    "learning_rate": "backend.learning_rate",
    "lora_rank": "backend.lora",
    "loss_fn": "algorithm.loss",
    "loss_type": "algorithm.loss",
    "lr": "backend.learning_rate",
    "max_age": "staleness.max",
    "max_completion_length": "sampling.max_tokens",
    "max_epochs": "train.total_train_steps",
    "max_grad_norm": "backend.max_grad_norm",
    "max_new_tokens": "sampling.max_tokens",
    "max_num_steps": "train.total_train_steps",
    "max_response_length": "sampling.max_tokens",
    "max_rollout_turns": "rollout.max_turns",
    "max_sequence_length": "rollout.max_sequence_length",
    "max_steps": "train.total_train_steps",
    "max_tokens_per_generation": "sampling.max_tokens",
    "max_tokens_per_llm_turn": "sampling.max_tokens",
    "max_total_sequence_length": "rollout.max_sequence_length",
    "max_train_steps": "train.total_train_steps",
    "max_trajectory_age_steps": "staleness.max",
    "micro_batch_size": "backend.micro_batch_rows",
    "model_name": "model",
    "model_name_or_path": "model",
    "normalize_rewards": "algorithm.scale (group | batch | none)",
    "num_envs": "rollout.slots",
    "num_generations": "algorithm.group_size",
    "num_generations_per_prompt": "algorithm.group_size",
    "num_prompts_per_step": "train.groups_per_step",
    "num_train_epochs": "train.total_train_steps",
    "num_workers": "rollout.slots",
    "output_dir": "run_dir",
    "peft_config": "backend.lora",
    "per_device_train_batch_size": "train.groups_per_step",
    "ratio_clip_max": "algorithm.loss_config.epsilon_high",
    "ratio_clip_min": "algorithm.loss_config.epsilon",
    "reference_policy_kl_penalty": "algorithm.loss_config.beta",
    "report_to": "loggers",
    "resume": "the argument --resume",
    "resume_from_checkpoint": "the argument --resume",
    "reward": "rewards",
    "reward_fn": "rewards",
    "reward_funcs": "rewards",
    "reward_functions": "rewards",
    "rollout_repeat_n": "algorithm.group_size",
    "rollout_reward_configs": _REWARDS,
    "save_period": "checkpoint.every",
    "save_steps": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "scale_rewards": "algorithm.scale (group | batch | none)",
    "staleness_threshold": "staleness.max",
    "step_reward_configs": _REWARDS,
    "sync_mode": "staleness.target (0 is synchronous)",
    "system_prompt": "prompts.system",
    "total_steps": "train.total_train_steps",
    "use_dynamic_sampling": "train.no_signal: refill",
    "use_leave_one_out_baseline": "algorithm.baseline: leave_one_out",
    "val_period": "eval.every",
    "validate_freq": "eval.every",
}
"""The last part of a path, in any section, and the equivalent here."""
