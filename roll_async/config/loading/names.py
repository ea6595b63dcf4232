"""Other names of keys (accepted, warning W01) and the keys of ROLL and verl that are refused with the reason (C002)."""

from dataclasses import fields

from roll_async.config.schema import ROLES, AlgorithmConfig

_ASYNC = "async_training"
PG_OPTIONS = _PG = "algorithm.pg_options"
_ACTOR = "actor_rollout_ref.actor"

_ALIASES: dict[str, tuple[str, ...]] = {
    f"{_ASYNC}.staleness_threshold": (f"{_ASYNC}.staleness.soft_versions",),
    f"{_ASYNC}.max_staleness_allowed": (f"{_ASYNC}.staleness.max_versions",),
    f"{_ASYNC}.min_batch_count": (f"{_ASYNC}.require_batches",),
    "staleness_threshold": (f"{_ASYNC}.staleness.soft_versions",),
    "max_staleness_allowed": (f"{_ASYNC}.staleness.max_versions",),
    "max_queue_size": (f"{_ASYNC}.max_queue_size",),
    "min_batch_count": (f"{_ASYNC}.require_batches",),
    "batch_timeout": (f"{_ASYNC}.batch_timeout",),
    "generation_timeout": (f"{_ASYNC}.generation_timeout",),
    "max_sync_retries": (f"{_ASYNC}.max_sync_retries",),
    "sync_timeout": (f"{_ASYNC}.sync_timeout",),
    "sync_retry_delay": (f"{_ASYNC}.sync_retry_delay",),
    f"{_ASYNC}.batch_generation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "batch_generation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "batch_creation_interval": (f"{_ASYNC}.batch_creation_interval",),
    "max_concurrent_per_server": (f"{_ASYNC}.max_concurrent_per_server",),
    "max_running_requests": (f"{_ASYNC}.max_concurrent_per_server",),
    f"{_ACTOR}.loss_agg_mode": ("algorithm.loss_agg_mode",),
    "data.train_batch_size": ("rollout_batch_size",),
    "data.gen_batch_size": ("algorithm.filter_groups.gen_batch_size",),
    "data.max_prompt_length": ("prompt_length",),
    "data.max_response_length": ("response_length",),
    "reward_model.overlong_buffer": ("algorithm.overlong_buffer",),
    "actor_train.pg_variant": ("algorithm.pg_variant",),
    "actor_train.model_update_frequency": (f"{_ASYNC}.trigger_parameter_sync_step",),
    "max_grad_norm": ("actor_train.training_args.max_grad_norm",),
    "track_with": ("tracking.track_with",),
    "tracker_kwargs": ("tracking.tracker_kwargs",),
    "rollout_dump_dir": ("tracking.rollout_dump_dir",),
    "resume_from_checkpoint": ("checkpoint.resume_from",),
    "max_ckpt_to_keep": ("checkpoint.max_to_keep",),
    "checkpoint_config.output_dir": ("checkpoint.output_dir",),
    "model_update_buffer_size_mb": ("weight_sync.bucket_size_mb",),
    "rpc_timeout": ("fault.rpc_timeout",),
}
for _place in ("", "algorithm.", f"{_ACTOR}."):
    for _prefix in ("clip_ratio", "pg_clip"):
        _ALIASES[f"{_place}{_prefix}_low"] = (f"{_PG}.clip_low",)
        _ALIASES[f"{_place}{_prefix}_high"] = (f"{_PG}.clip_high",)
    _ALIASES[f"{_place}pg_clip"] = (f"{_PG}.clip_low", f"{_PG}.clip_high")
for _place in ("", "algorithm."):
    _ALIASES[f"{_place}gamma"] = ("algorithm.adv_options.gamma",)
    _ALIASES[f"{_place}lambd"] = ("algorithm.adv_options.lam",)
for _role in ROLES:
    _ALIASES[f"{_role}.model_args.flash_attn"] = (f"{_role}.model_args.attn_implementation",)

ALIAS_VALUES: dict[str, dict[bool, str | None]] = {"resume_from_checkpoint": {False: None, True: "latest"}}
"""Values of another name that are written in another way under the canonical one."""

_SGLANG = "actor_infer.strategy_args"
SGLANG_ALIASES = {
    f"{_SGLANG}.strategy_config.tp_size": (f"{_SGLANG}.strategy_config.tensor_parallel_size",),
    f"{_SGLANG}.strategy_config.pp_size": (f"{_SGLANG}.strategy_config.pipeline_parallel_size",),
}
LOSS_PREFIXES = ("tis_", "topr_", "cispo_", "kimi15_")
ALGORITHM_FIELDS = frozenset(f.name for f in fields(AlgorithmConfig))

_DERIVED = "derived; use algorithm.proximal_logprobs: recompute or behaviour"
_KL = "set kl_loss_coef > 0 or token_kl_coef > 0; kl_estimator (kl = k1, mse = k2)"
_RATIO = "use algorithm.pg_options.ratio_level (seq = sequence)"
_DIFFICULTY = "use algorithm.difficulty_low and difficulty_high"
_PACKING = "use micro_batching and max_tokens_per_microbatch"
_NO_CHOICE = "no choice to make here; remove it"
_OFFLOAD = "weights stay on their devices; remove it, or use optimizer_cpu_offload for the optimizer's state"
_NEVER_READ = "was never read; remove it"
_FOLLOWS = "follows from the role, pg_variant and strategy; remove it"

_REASONS: dict[str, tuple[str, ...]] = {
    _FOLLOWS: ("worker_cls", "env_manager_cls", "num_gpus_per_worker"),
    "use async_training.interrupt.mode: resume (true) or wait (false)": ("partial_rollout",),
    "set algorithm.pg_options.clip_low and clip_high": ("use_pg_clip_range",),
    "set algorithm.pg_options.dual_clip to a number (ROLL's is 1 + 2*pg_clip) or null": ("dual_clip_loss",),
    _KL: ("use_kl_loss", "add_token_level_kl", "init_kl_coef", "kl_penalty"),
    _RATIO: ("importance_sampling", "ratio_type"),
    _DERIVED: (
        "enable_reference", "enable_old_logprobs_recompute", "force_disable_old_logprobs_recompute",
        "use_rollout_log_probs", "compute_prox_log_prob",
    ),
    "use algorithm.correction": ("train_infer_correction", "rollout_correction"),
    "use algorithm.filter_groups": ("query_filter_config", "response_filter_config"),
    _DIFFICULTY: ("difficulty_mask", "difficulty_low_threshold", "difficulty_high_threshold"),
    "use norm_mean_type and norm_std_type: batch": ("whiten_rewards",),
    "use algorithm.filter_groups.gen_batch_size": (
        "is_use_additional_prompts", "use_additional_prompts", "max_additional_running_prompts",
    ),
    _PACKING: (
        "use_dynamic_batching_in_train", "use_dynamic_batching_in_infer", "use_sequence_packing",
        "max_tokens_per_microbatch_in_train", "max_tokens_per_microbatch_in_infer",
    ),
    _NO_CHOICE: (
        "generate_opt_level", "user_defined_rollout_loop_cls", "router_args", "transfer_backend", "rollout_mock",
        "partial_gpu_mode", "batch_adjust_mode", "num_nodes", "local_rank", "checkpoint_config.type", "logging_dir",
        "base_dir", "hydra",
    ),
    _OFFLOAD: ("is_offload_states", "is_offload_optimizer_states_in_train_step", "offload_nccl"),
    _NEVER_READ: (
        "l2", "use_reward_scaling", "add_len_reward", "use_reward_norm", "report_length_and_rewards", "val_greedy",
        "val_n_sample", "mask_type", "balance_length", "postive_loss_coef", "use_topr_loss", "dataset_filter",
        "render_save_dir", "dirty_data_mask", "use_token_reward",
    ),
    "was never read; put it in env_config": ("train_env_manager.format_penalty", "val_env_manager.format_penalty"),
    "write paths in file_name": ("data_args.dataset_dir",),
    "use domain_interleave_probs": ("data_args.interleave_probs",),
    "temperature 0 is greedy": ("do_sample",),
    "max_new_tokens is the limit": ("generating_args.max_length",),
    "no beam search": ("length_penalty",),
    "max_steps ends the run": ("num_train_epochs",),
    "use model_args.dtype": (
        "training_args.bf16", "training_args.fp16", "strategy_config.bf16", "strategy_config.fp16",
    ),
    "use norm_mean_type and norm_std_type (batch or group), or adv_estimator grpo": (
        "reward_normalization", "reward_norm",
    ),
    "use algorithm.adv_options": ("step_reward_gamma", "episode_reward_weight", "step_reward_weight"),
    "follows from the model": (
        "model_args.model_type", "apply_rope_fusion", "bias_activation_fusion", "moe_grouped_gemm",
        "moe_layer_recompute",
        "moe_shared_expert_overlap", "moe_router_dtype", "moe_router_fusion", "moe_permute_fusion", "moe_use_upcycling",
        "variable_seq_lengths", "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    ),
    "the loss is not weighed by length or difficulty; difficulty_low and difficulty_high take groups out": (
        "difficulty_loss_weight", "length_loss_weight",
    ),
    "max_len_mask takes responses that were cut out of the loss": ("error_max_len_clip", "error_max_len_threshold"),
    "prompts use actor_train.data_args.template": ("global_template",),
    "engines sleep whenever the trainer takes their devices": ("sleep_level",),
    "use custom_envs.TAG.max_concurrent": ("max_env_step_concurrent",),
    "worlds run in processes of their own": ("use_thread_lock",),
    "use custom_envs.TAG.manager: traj or step": ("agent_runner_cls",),
    "use actor_infer.generating_args": ("train_env_manager.generating_args",),
    "set the top-level eval_steps": ("validation.eval_steps",),
    "use rewards.NAME.num_workers": ("rewards.*.world_size",),
    "rewards load no model here; an LLM judge is a server, rewards.NAME.judge": tuple(
        f"rewards.*.{key}" for key in (
            "model_args", "data_args", "generating_args", "strategy_args", "device_mapping", "infer_batch_size",
            "judge_model_type", "training_args", "num_gpus_per_worker",
        )
    ),
    "use rewards.NAME.judge, whose prompt is a text": ("judge_prompt",),
    "use rewards.NAME.sandbox": ("use_local", "test_case_type"),
    "scores are those of the reward; use algorithm.overlong_buffer for length": (
        "reward_type", "response_length_penalty_coef", "format_pattern",
    ),
}  # fmt: skip
REFUSED = {key: reason for reason, keys in _REASONS.items() for key in keys}
"""Key, or last two parts of its path, to the reason. Known keys are looked up in the schema first."""

LOST = frozenset((
    "judge_prompt", "difficulty_loss_weight", "length_loss_weight", "error_max_len_clip", "reward_type",
    "response_length_penalty_coef", "train_infer_correction", "rollout_correction", "response_filter_config",
))  # fmt: skip
"""Refused keys that say something which the rest of a ported config does not, unless they are switched off."""

FOREIGN_SECTIONS = ("actor_rollout_ref", "data", "trainer", "rollout", "reward_model")


def refusal(path: str) -> str | None:
    """Why a key of ROLL or verl is refused; None if it is a key of neither."""
    parts = path.split(".")
    if parts[-1].startswith("profiler_"):
        return _NO_CHOICE
    free = f"rewards.*.{parts[2]}" if parts[0] == "rewards" and len(parts) > 2 else ""
    return REFUSED.get(free) or REFUSED.get(".".join(parts[-2:])) or REFUSED.get(parts[-1])


def alias_table(kind: str) -> dict[str, tuple[str, ...]]:
    """Accepted names by dotted path, to the canonical ones."""
    group = "num_return_sequences_in_group" if kind == "rlvr" else "train_env_manager.group_size"
    return {**_ALIASES, "n_resp_per_prompt": (group,), "actor_rollout_ref.rollout.n": (group,)}
