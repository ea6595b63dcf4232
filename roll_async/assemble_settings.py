"""From config sections to the option objects of each folder. Nothing here starts anything."""

from __future__ import annotations

from dataclasses import asdict, fields

from roll_async.algorithms.overlong import OverlongShaping
from roll_async.buffer.staleness import StalenessPolicy
from roll_async.buffer.states import QueueOptions
from roll_async.config.schema import (
    DataArguments,
    GeneratingArguments,
    MegatronInferConfig,
    MegatronTrainConfig,
    RLVRConfig,
    SglangConfig,
    VllmConfig,
    WorkerConfig,
)
from roll_async.inference.settings import EngineSettings
from roll_async.pipelines.train_loop import RunPlan
from roll_async.prompts.load import DataOptions
from roll_async.prompts.rows import Columns
from roll_async.rollout.chat_scheduler import SchedulerOptions
from roll_async.rollout.conversations import ScoringOptions
from roll_async.rollout.filter_budget import BudgetOptions
from roll_async.rollout.manager_options import ManagerOptions
from roll_async.schema import SamplingParams
from roll_async.trainer.learner import LearnerOptions
from roll_async.trainer.megatron.settings import LossSettings, MegatronSettings, OptimizerSettings, ParallelSizes
from roll_async.weight_sync.synchronizer import SyncOptions


def learner_options(config: RLVRConfig) -> LearnerOptions:
    """What shapes the training signal."""
    algorithm = config.algorithm
    same = {f.name for f in fields(LearnerOptions)} & {f.name for f in fields(type(algorithm))}
    values = {name: getattr(algorithm, name) for name in same - {"adv_options"}}
    staleness = config.async_training.staleness
    return LearnerOptions(
        **values,
        domains=tuple(config.rewards),
        response_length=config.response_length,
        adv_options=asdict(algorithm.adv_options),
        overlong_len=algorithm.overlong_buffer.len if algorithm.overlong_buffer.enable else 0,
        overlong_penalty_factor=algorithm.overlong_buffer.penalty_factor,
        router_replay=config.actor_train.router_replay,
        mask_older_than=staleness.max_versions if staleness.policy == "token_mask" else None,
        seed=config.seed,
    )


def megatron_settings(config: RLVRConfig, role: WorkerConfig) -> MegatronSettings:
    """One Megatron role; with an optimizer and a loss when it trains. Raises ValueError for what Megatron cannot do
    yet.
    """
    strategy = role.strategy_args.strategy_config
    assert isinstance(strategy, MegatronTrainConfig | MegatronInferConfig)
    sampling = config.actor_infer.generating_args
    trains = isinstance(strategy, MegatronTrainConfig)
    recompute: dict[str, object] = {}
    if trains and strategy.recompute_granularity is not None:
        recompute["recompute_granularity"] = strategy.recompute_granularity
        if strategy.recompute_granularity == "full":
            recompute |= {
                "recompute_method": strategy.recompute_method,
                "recompute_num_layers": strategy.recompute_num_layers,
            }
    return MegatronSettings(
        model_folder=role.model_args.model_name_or_path,
        dtype=role.model_args.dtype,
        parallel=ParallelSizes(
            tensor=strategy.tensor_model_parallel_size,
            pipeline=strategy.pipeline_model_parallel_size,
            context=strategy.context_parallel_size,
            expert=strategy.expert_model_parallel_size,
            expert_tensor=strategy.expert_tensor_parallel_size,
            virtual_pipeline=_interleaved(strategy),
            sequence_parallel=strategy.sequence_parallel,
        ),
        optimizer=_optimizer(config, role, strategy) if trains else None,
        loss=_loss(config) if trains else None,
        with_value_head=role is config.critic,
        lora_rank=role.model_args.lora_rank if trains else 0,
        lora_alpha=float(role.model_args.lora_alpha or 0),
        lora_targets=tuple(role.model_args.lora_target),
        lora_dropout=role.model_args.lora_dropout,
        frozen=tuple(role.model_args.freeze_module_prefix) if trains else (),
        value_clip=config.algorithm.value_clip,
        micro_batch_rows=role.training_args.per_device_train_batch_size,
        mini_batch_rows=role.mini_batch_size if trains else 1,
        scoring_rows=role.infer_batch_size,
        micro_batching=role.micro_batching,
        max_tokens_per_microbatch=role.max_tokens_per_microbatch,
        temperature=sampling.temperature,
        top_k=max(0, sampling.top_k),
        top_p=sampling.top_p,
        moe_dispatcher=strategy.moe_token_dispatcher_type,
        router_replay=role.router_replay,
        moe_aux_loss_coeff=strategy.moe_aux_loss_coeff if trains else 0.0,
        recompute=recompute,
        transformer_impl=strategy.transformer_impl,
        seed=config.seed,
        extra=strategy.extra,
    )


def _interleaved(strategy: MegatronTrainConfig | MegatronInferConfig) -> int | None:
    """Model parts per pipeline rank; None for the plain schedule."""
    parts = strategy.virtual_pipeline_model_parallel_size if isinstance(strategy, MegatronTrainConfig) else None
    return parts if parts and parts > 1 else None


def _optimizer(config: RLVRConfig, role: WorkerConfig, strategy: MegatronTrainConfig) -> OptimizerSettings:
    args = role.training_args
    return OptimizerSettings(
        learning_rate=args.learning_rate,
        weight_decay=args.weight_decay,
        schedule=args.lr_scheduler_type,
        warmup_steps=args.warmup_steps,
        total_steps=config.max_steps * config.optimizer_steps_per_batch,
        beta1=args.adam_beta1,
        beta2=args.adam_beta2,
        epsilon=args.adam_epsilon,
        max_grad_norm=args.max_grad_norm,
        distributed=strategy.use_distributed_optimizer,
        overlap_grad_reduce=strategy.overlap_grad_reduce,
        overlap_param_gather=strategy.overlap_param_gather,
        cpu_offload=strategy.optimizer_cpu_offload,
    )


def _loss(config: RLVRConfig) -> LossSettings:
    algorithm = config.algorithm
    return LossSettings(
        pg_variant=algorithm.pg_variant,
        pg_options=algorithm.pg_options,
        loss_agg_mode=algorithm.loss_agg_mode,
        normalizer_length=config.response_length,
        entropy_coef=algorithm.entropy_loss_coef,
        kl_coef=algorithm.kl_loss_coef,
        kl_estimator=algorithm.kl_estimator,
        ppo_epochs=algorithm.ppo_epochs,
    )


def _all_generating_args(config: RLVRConfig) -> list[GeneratingArguments]:
    validation = [] if config.validation is None else [config.validation.generating_args]
    return [config.actor_infer.generating_args, *validation]


def engine_settings(config: RLVRConfig) -> EngineSettings:
    """One replica of actor_infer."""
    role = config.actor_infer
    strategy = role.strategy_args.strategy_config
    common: dict[str, object] = {
        "model_folder": role.model_args.model_name_or_path,
        "dtype": role.model_args.dtype,
        "device": "cpu" if role.device_mapping is None else "cuda",
        "max_model_len": config.sequence_length,
        "seed": config.seed,
        "attention": "flash_attention_2" if role.model_args.attn_implementation == "fa2" else "sdpa",
        "max_running": config.async_training.max_concurrent_per_server,
        "stop_strings": any(a.stop_strings for a in _all_generating_args(config)),
        "truncated_sampling": any(a.top_k > 0 or a.top_p < 1 for a in _all_generating_args(config)),
        "record_experts": config.actor_train.router_replay,
        "extra": strategy.extra,
    }
    match strategy:
        case VllmConfig():
            common |= {
                "tensor_parallel_size": strategy.tensor_parallel_size,
                "pipeline_parallel_size": strategy.pipeline_parallel_size,
                "memory_fraction": strategy.gpu_memory_utilization,
                "block_size": strategy.block_size,
                "random_weights": strategy.load_format == "dummy",
                "max_model_len": strategy.max_model_len,
                "max_running": strategy.max_num_seqs or config.async_training.max_concurrent_per_server,
                "max_num_batched_tokens": strategy.max_num_batched_tokens,
                "enforce_eager": strategy.enforce_eager,
                "enable_prefix_caching": strategy.enable_prefix_caching,
                "quantization": strategy.quantization,
            }
        case SglangConfig():
            common |= {
                "tensor_parallel_size": strategy.tensor_parallel_size,
                "pipeline_parallel_size": strategy.pipeline_parallel_size,
                "memory_fraction": strategy.mem_fraction_static,
                "random_weights": strategy.load_format == "dummy",
                "max_model_len": strategy.context_length,
                "enable_prefix_caching": not strategy.disable_radix_cache,
                "quantization": strategy.quantization,
            }
        case _:
            common["max_running"] = role.infer_batch_size
    return EngineSettings(**common)  # type: ignore[arg-type]


def sampling_params(args: GeneratingArguments) -> SamplingParams:
    """How one request samples."""
    return SamplingParams(
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        top_p=args.top_p,
        top_k=args.top_k,
        repetition_penalty=args.repetition_penalty,
        stop_strings=tuple(args.stop_strings),
        include_stop_str_in_output=args.include_stop_str_in_output,
    )


def scheduler_options(config: RLVRConfig) -> SchedulerOptions:
    """How prompts become groups."""
    groups = config.algorithm.filter_groups
    return SchedulerOptions(
        samples_per_group=config.samples_per_group,
        sampling=sampling_params(config.actor_infer.generating_args),
        filter_enabled=groups.enable,
        filter_metric=groups.metric,
        shaping=overlong_shaping(config),
        variance_threshold=groups.variance_threshold,
        singletons=groups.singletons,
        max_num_gen_batches=groups.max_num_gen_batches,
        gen_batch_size=groups.gen_batch_size,
        scoring=ScoringOptions(
            reward_retries=config.fault.sample_retries,
            reward_timeout_s=config.fault.stall_timeout,
            outage_patience_s=config.fault.stall_timeout,
        ),
        greedy_baseline=config.algorithm.adv_estimator == "remax",
        spread_samples=config.is_num_return_sequences_expand,
    )


def overlong_shaping(config: RLVRConfig) -> OverlongShaping | None:
    """The penalty of long responses; None = off."""
    buffer = config.algorithm.overlong_buffer
    if not buffer.enable:
        return None
    return OverlongShaping(max_length=config.response_length, buffer_length=buffer.len, factor=buffer.penalty_factor)


def manager_options(config: RLVRConfig) -> ManagerOptions:
    """How requests reach replicas."""
    return ManagerOptions(
        max_concurrent_per_server=config.async_training.max_concurrent_per_server,
        generation_timeout_s=config.async_training.generation_timeout,
        request_retries=config.fault.request_retries,
        interrupt_timeout_s=config.async_training.interrupt.timeout,
        batch_creation_interval_s=config.async_training.batch_creation_interval,
    )


def queue_options(config: RLVRConfig) -> QueueOptions:
    """Admission and staleness."""
    a, groups = config.async_training, config.algorithm.filter_groups
    extra = groups.gen_batch_size - config.groups_per_batch if groups.enable else 0
    return QueueOptions(
        groups_per_batch=config.groups_per_batch,
        async_generation_ratio=config.async_generation_ratio,
        trigger_parameter_sync_step=a.trigger_parameter_sync_step,
        max_versions=a.staleness.max_versions,
        policy=StalenessPolicy(a.staleness.policy),
        soft_versions=a.staleness.soft_versions,
        max_queue_size=a.max_queue_size,
        oversample_groups=max(0, extra),
        samples_per_group=config.samples_per_group,
        batch_timeout_s=a.batch_timeout,
        stall_timeout_s=config.fault.stall_timeout,
        max_failed_groups=config.fault.max_failed_groups,
    )


def filter_budget(config: RLVRConfig) -> BudgetOptions | None:
    """How much may be generated for one batch; None without dynamic sampling."""
    groups = config.algorithm.filter_groups
    if not groups.enable or groups.max_num_gen_batches <= 0:
        return None
    return BudgetOptions(
        groups_per_batch=config.groups_per_batch,
        gen_batch_size=groups.gen_batch_size,
        max_num_gen_batches=groups.max_num_gen_batches,
    )


def run_plan(config: RLVRConfig, *, first_step: int) -> RunPlan:
    """How long the loop runs, and how often it does what."""
    a = config.async_training
    return RunPlan(
        first_step=first_step,
        max_steps=config.max_steps,
        sync_every=a.trigger_parameter_sync_step,
        save_every=config.save_steps,
        eval_every=config.eval_steps,
        groups_per_batch=config.groups_per_batch,
        samples_per_group=config.samples_per_group,
        groups_per_part=config.groups_per_batch * a.require_batches // config.mini_batches_per_batch,
        rescue_timeout_s=config.fault.stall_timeout,
    )


def sync_options(config: RLVRConfig, transport: str) -> SyncOptions:
    """How a weight push goes."""
    a = config.async_training
    return SyncOptions(
        transport=transport,
        verify=config.weight_sync.verify,
        interrupt_mode=a.interrupt.mode,
        interrupt_timeout_s=a.interrupt.timeout,
        max_retries=a.max_sync_retries,
        timeout_s=a.sync_timeout,
        retry_delay_s=a.sync_retry_delay,
    )


def data_options(config: RLVRConfig, data: DataArguments) -> DataOptions:
    """Which prompts."""
    return DataOptions(
        files=tuple(data.file_name),
        columns=Columns(
            messages=data.messages, prompt=data.prompt, id=data.id, tag=data.tag, ground_truth=data.ground_truth
        ),
        template=data.template,
        prompt_length=config.prompt_length,
        domains={name: tuple(r.tag_included) for name, r in config.rewards.items()},
        tokenizer_folder=config.pretrain,
        num_workers=data.preprocessing_num_workers,
    )
