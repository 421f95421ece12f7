"""Which GRPOConfig keys `backend.args` may carry, and where the others are set.

`PASSED | OWNED` is exactly the set of TRL 1.16's GRPOConfig fields: a test holds it against the
installed TRL, so that a key which a later release adds is decided upon, not passed by accident.
Nothing here imports TRL: a config is checked without it.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping

PASSED = frozenset(
    {
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "cast_lm_head_to_fp32",
        "disable_dropout",
        "full_determinism",
        "activation_checkpointing_kwargs",
        "lr_scheduler_kwargs",
        "optim",
        "optim_args",
        "optim_target_modules",
        "router_aux_loss_coef",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "torch_compile_mode",
        "torch_empty_cache_steps",
    }
)
"""Keys that change how TRL updates and nothing that the pipe decides."""

_ONE_PROCESS = "nothing here sets it: a run is one process on one device"
_OWN_SAMPLER = "nothing here sets it: completions come from this adapter's own sampler"
_OWN_DATA = "nothing here sets it: the pipe feeds the trainer, TRL reads no data set"
_OWN_MODEL = "nothing here sets it: the adapter loads `model` itself"

_HOMES: Mapping[str, str] = {
    "set `algorithm`'s own keys": "scale_rewards multi_objective_aggregation",
    "set algorithm.group_size": "num_generations num_generations_eval",
    "set algorithm.loss": "loss_type",
    "set algorithm.loss_config": (
        "beta epsilon epsilon_high delta sapo_temperature_neg sapo_temperature_pos vespo_k_pos "
        "vespo_lambda_pos vespo_k_neg vespo_lambda_neg importance_sampling_level entropy_coef "
        "use_adaptive_entropy entropy_coef_min entropy_coef_max "
        "entropy_coef_delta entropy_target off_policy_mask_threshold use_bias_correction_kl"
    ),
    "set backend.device": "use_cpu",
    "set backend.dtype": "bf16 fp16 bf16_full_eval fp16_full_eval",
    "set backend.gradient_checkpointing": (
        "gradient_checkpointing activation_checkpointing gradient_checkpointing_kwargs"
    ),
    "set backend.learning_rate": "learning_rate",
    "set backend.lr_scheduler": "lr_scheduler_type",
    "set backend.max_grad_norm": "max_grad_norm",
    "set backend.micro_batch_rows": (
        "gradient_accumulation_steps steps_per_generation auto_find_batch_size pad_to_multiple_of"
    ),
    "set backend.warmup_steps": "warmup_steps",
    "set backend.weight_decay": "weight_decay",
    "set chat.arguments": "chat_template_kwargs",
    "set checkpoint.every and checkpoint.keep": (
        "save_strategy save_steps save_total_limit save_on_each_node save_only_model "
        "enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better"
    ),
    "pass --resume": (
        "resume_from_checkpoint ignore_data_skip restore_callback_states_from_checkpoint"
    ),
    "set `eval`": (
        "eval_strategy eval_steps eval_delay eval_on_start eval_accumulation_steps "
        "eval_do_concat_batches eval_use_gather_object per_device_eval_batch_size do_eval "
        "do_predict prediction_loss_only include_for_metrics batch_eval_metrics"
    ),
    "set `loggers`": (
        "report_to run_name project trackio_space_id trackio_bucket_id trackio_static_space_id "
        "logging_strategy logging_steps logging_first_step log_on_each_node logging_nan_inf_filter "
        "log_level log_level_replica disable_tqdm log_completions log_multimodal "
        "num_completions_to_print log_unique_prompts log_completions_hub_repo "
        "include_num_input_tokens_seen skip_memory_metrics debug"
    ),
    "set `rewards`": "reward_weights",
    "set rollout.max_turns": "max_tool_calling_iterations",
    "set run_dir": "output_dir",
    "set sampling.max_tokens": "max_completion_length",
    "set sampling.temperature": "temperature",
    "set sampling.top_k": "top_k",
    "set sampling.top_p": "top_p",
    "set train.groups_per_step": "per_device_train_batch_size generation_batch_size",
    "set train.seed": "seed data_seed",
    "set train.shuffle": "shuffle_dataset",
    "set train.total_train_steps": "max_steps num_train_epochs do_train",
    "nothing here sets it: each batch is trained once": "num_iterations",
    "nothing here sets it: a rollout that is cut short is the reward's business": (
        "mask_truncated_completions"
    ),
    "nothing here sets it: a reference that moves isn't in TRL's checkpoint": (
        "sync_ref_model ref_model_mixup_alpha ref_model_sync_steps"
    ),
    "nothing here sets it: its quantile would be a micro-batch's, not the batch's": (
        "top_entropy_quantile"
    ),
    "nothing here sets it: it would train another policy than the sampled one": (
        "neftune_noise_alpha label_smoothing_factor"
    ),
    "nothing here sets it: no model is uploaded": (
        "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push "
        "hub_revision"
    ),
    _ONE_PROCESS: (
        "accelerator_config parallelism_config average_tokens_across_devices "
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph "
        "ddp_backend ddp_timeout fsdp fsdp_config deepspeed local_rank ds3_gather_for_generation"
    ),
    _OWN_SAMPLER: (
        "min_p repetition_penalty generation_kwargs cache_implementation use_cache use_vllm "
        "vllm_mode vllm_model_impl vllm_enable_sleep_mode vllm_structured_outputs_regex "
        "vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
        "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
        "vllm_tensor_parallel_size vllm_importance_sampling_correction "
        "vllm_importance_sampling_mode vllm_importance_sampling_clip_max "
        "vllm_importance_sampling_clip_min vllm_importance_sampling_cap "
        "use_transformers_continuous_batching transformers_continuous_batching_config "
        "use_transformers_paged"
    ),
    _OWN_DATA: (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory "
        "dataloader_persistent_workers dataloader_prefetch_factor dataloader_in_order "
        "dataloader_multiprocessing_context remove_unused_columns label_names "
        "train_sampling_strategy length_column_name"
    ),
    _OWN_MODEL: "model_init_kwargs trust_remote_code use_liger_kernel liger_kernel_config",
}

OWNED: Mapping[str, str] = {key: home for home, keys in _HOMES.items() for key in keys.split()}
"""Every other key, with what to do instead."""

SCHEDULERS = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""transformers' schedules that need nothing but the step number."""


def refusal(key: str) -> str | None:
    """Why `backend.args` can't carry `key`; None when it can."""
    if key in PASSED:
        return None
    if key in OWNED:
        return f"{key} can't be set in args: {OWNED[key]}"
    close = difflib.get_close_matches(key, [*PASSED, *OWNED], n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return f"{key} is no key of TRL's GRPOConfig{hint}"
