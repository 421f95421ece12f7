"""The keys of NeMo RL, NexRL, TRL and earlier releases, and their equivalents here."""

from __future__ import annotations

from collections.abc import Mapping

FOREIGN = frozenset(
    {"trainer", "training", "policy", "grpo", "loss_fn", "prompt_source", "service"}
)
"""Sections of these systems; each of their keys is explained separately."""

_ONE_PROCESS = "remove it: a run is one process, or those of backend.processes"
_OWN_TRAINER = (
    "run a recipe with its own trainer with `python -m retrain.trainer.nexrl -c FILE`, which "
    "checks it; add --run-nexrl to train"
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
    "algorithm.name": "algorithm.type",
    "checkpointing.checkpoint_dir": "run_dir",
    "data.train_files": "prompts.path",
    "data_loader.type": "prompts.type",
    "environment.max_steps": "rollout.max_turns",
    "environment.max_turns": "rollout.max_turns",
    "grpo.seed": "train.seed",
    "logger.backend": "loggers",
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

_SYNONYMS = {
    "algorithm.baseline: leave_one_out": "use_leave_one_out_baseline",
    "algorithm.gamma": "gamma",
    "algorithm.group_size": "num_generations num_generations_per_prompt rollout_repeat_n",
    "algorithm.loss": "loss_fn loss_type",
    "algorithm.loss_config.beta": "beta kl_coef reference_policy_kl_penalty",
    "algorithm.loss_config.epsilon": "clip_range epsilon ratio_clip_min",
    "algorithm.loss_config.epsilon_high": "epsilon_high ratio_clip_max",
    "algorithm.mismatch": (
        "truncated_importance_sampling use_importance_sampling_correction "
        "vllm_importance_sampling_correction vllm_importance_sampling_mode"
    ),
    "algorithm.mismatch.high": (
        "truncated_importance_sampling_ratio truncated_importance_sampling_ratio_max "
        "vllm_importance_sampling_cap vllm_importance_sampling_clip_max"
    ),
    "algorithm.mismatch.low": (
        "truncated_importance_sampling_ratio_min vllm_importance_sampling_clip_min"
    ),
    "algorithm.mismatch.type": "truncated_importance_sampling_type",
    "algorithm.scale (group | batch | none)": "normalize_rewards scale_rewards",
    "backend.beta1": "adam_beta1 beta1",
    "backend.beta2": "adam_beta2 beta2",
    "backend.eps": "adam_epsilon",
    "backend.learning_rate": "learning_rate lr",
    "backend.lora": "peft_config",
    "backend.lora.alpha": "lora_alpha",
    "backend.lora.dropout": "lora_dropout",
    "backend.lora.r": "lora_r lora_rank rank",
    "backend.max_grad_norm": "grad_clip_norm max_grad_norm",
    "checkpoint.every": "save_period save_steps",
    "checkpoint.keep": "keep_top_k save_total_limit",
    "environment": "env",
    "environment.type, as path/file.py:Class": (
        "custom_rollout_worker_class_name custom_rollout_worker_module_path"
    ),
    "eval.every": "eval_steps val_period validate_freq",
    "loggers": "report_to",
    "model": "base_model model_name model_name_or_path",
    "name": "experiment_name",
    "prompts": "dataset",
    "prompts.path": "dataset_name file_path",
    "prompts.system": "system_prompt",
    "rewards": "reward reward_fn reward_funcs reward_functions",
    _REWARDS: "rollout_reward_configs step_reward_configs",
    "rollout.max_sequence_length": "max_sequence_length max_total_sequence_length",
    "rollout.max_turns": "max_rollout_turns",
    "rollout.slots": "num_workers",
    "run_dir": "checkpoint_dir output_dir",
    "sampling.max_tokens": "max_completion_length max_new_tokens max_tokens_per_llm_turn",
    "staleness.max": "max_trajectory_age_steps staleness_threshold",
    "the argument --resume": "resume resume_from_checkpoint",
    "train.groups_per_step": "batch_size num_prompts_per_step per_device_train_batch_size",
    "train.no_signal: refill": "use_dynamic_sampling",
    "train.total_train_steps": "max_epochs max_num_steps max_steps num_train_epochs total_steps",
}
HOMES: Mapping[str, str] = {
    name: home for home, names in _SYNONYMS.items() for name in names.split()
}
"""The last part of a path, in any section, and the equivalent here."""
