"""What a Megatron rank is built from, independent of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from roll_async.algorithms.objective import LossSettings
from roll_async.config.schema import (
    MEGATRON_DROPOUTS,
    GeneratingArguments,
    MegatronInferConfig,
    MegatronTrainConfig,
    PipelineConfig,
    RunConfig,
    SupervisedConfig,
    WorkerConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelSizes:
    """Ranks per dimension; data parallel is what is left."""

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    virtual_pipeline: int | None = None
    """Model parts per pipeline rank (interleaved schedule)."""
    sequence_parallel: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerSettings:
    """AdamW and its schedule. Steps are optimizer steps as planned, one row for each sample of a batch."""

    learning_rate: float
    weight_decay: float = 0.0
    schedule: str = "constant"
    """constant, linear or cosine, from learning_rate to 0 over `total_steps`."""
    warmup_steps: int = 0
    total_steps: int = 1
    """Of the run, without those in which the critic warms up and the role waits."""
    steps_per_update: int = 1
    """On what the learner is given at a time: a batch, or a part of it (require_batches)."""
    steps_per_training_step: int = 1
    rows_per_training_step: int = 0
    """Of a run that ends with its rows (num_train_epochs); 0 = it ends with its steps."""
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_grad_norm: float = 1.0
    distributed: bool = False
    """Shard the optimizer over data-parallel ranks (only where there is more than one)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients bucket by bucket while the backward pass goes on."""
    overlap_param_gather: bool = False
    """Gather updated parameters during the next forward pass; needs `distributed` and overlap_grad_reduce."""
    cpu_offload: bool = False
    """Keep the optimizer's state in host memory between steps."""

    @classmethod
    def of(cls, config: RunConfig, role: WorkerConfig, strategy: MegatronTrainConfig) -> OptimizerSettings:
        """As the config has it."""
        args = role.training_args
        parts, per_update, rows, waits = 1, 1, 0, 0
        if isinstance(config, PipelineConfig):
            parts = max(1, config.mini_batches_per_batch // config.async_training.require_batches)
            epochs = 1 if role is config.critic else config.algorithm.ppo_epochs
            mini_batch = max(1, role.mini_batch_size)  # none where the role only scores
            per_update = max(1, config.samples_per_batch // parts // mini_batch) * epochs
            if config.critic is not None and role is not config.critic:
                waits = config.algorithm.critic_warmup
        elif isinstance(config, SupervisedConfig) and config.num_train_epochs is not None:
            rows = config.train_batch_size
        return cls(
            learning_rate=args.learning_rate,
            weight_decay=args.weight_decay,
            schedule=args.lr_scheduler_type,
            warmup_steps=args.warmup_steps,
            total_steps=(config.max_steps - waits) * parts * per_update,
            steps_per_update=per_update,
            steps_per_training_step=parts * per_update,
            rows_per_training_step=rows,
            beta1=args.adam_beta1,
            beta2=args.adam_beta2,
            epsilon=args.adam_epsilon,
            max_grad_norm=args.max_grad_norm,
            distributed=strategy.use_distributed_optimizer,
            overlap_grad_reduce=strategy.overlap_grad_reduce,
            overlap_param_gather=strategy.overlap_param_gather,
            cpu_offload=strategy.optimizer_cpu_offload,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MegatronSettings:
    """One role on its ranks."""

    model_folder: str
    dtype: str = "bf16"
    parallel: ParallelSizes = field(default_factory=ParallelSizes)
    lora_rank: int = 0
    """0 = all parameters train; else adapters of this rank on frozen weights."""
    lora_alpha: float = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
    lora_dropout: float = 0.0
    frozen: tuple[str, ...] = ()
    """Parameters whose Hugging Face or Megatron name begins with one of these do not train."""
    optimizer: OptimizerSettings | None = None
    """None: the role only scores."""
    loss: LossSettings | None = None
    with_value_head: bool = False
    value_clip: float | None = None
    micro_batch_rows: int = 1
    mini_batch_rows: int = 1
    """Rows of one optimizer step over all data-parallel ranks."""
    scoring_rows: int = 16
    """Rows per forward pass when scoring."""
    longest_row: int = 0
    """Tokens of the longest row; 0 = not known."""
    micro_batching: str = "fixed"
    max_tokens_per_microbatch: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    moe_dispatcher: str = "alltoall"
    """How tokens reach experts: alltoall or allgather."""
    router_replay: bool = False
    """Routers take the experts that rows carry a record of."""
    moe_aux_loss_coeff: float = 0.0
    """Weight of the routers' load-balancing loss, per token; 0 = off."""
    recompute: Mapping[str, object] = field(default_factory=dict)
    transformer_impl: str = "auto"
    seed: int = 42
    flash_attention: bool = False
    """Transformer Engine takes its flash kernel and no other (attn_implementation fa2)."""
    extra: Mapping[str, object] = field(default_factory=dict)
    """Handed to TransformerConfig unchanged."""

    @property
    def drops_out(self) -> bool:
        """Whether a training step leaves out activations at random."""
        return bool(self.lora_dropout) or any(self.extra.get(name) for name in MEGATRON_DROPOUTS)

    @classmethod
    def of(cls, config: RunConfig, role: WorkerConfig) -> MegatronSettings:
        """One Megatron role as the config has it; with an optimizer and a loss when it trains."""
        strategy = role.strategy_args.strategy_config
        assert isinstance(strategy, MegatronTrainConfig | MegatronInferConfig)
        samples = config if isinstance(config, PipelineConfig) else None
        sampling = GeneratingArguments() if samples is None else samples.actor_infer.generating_args
        trains = isinstance(strategy, MegatronTrainConfig)
        recompute: dict[str, object] = {}
        if trains and strategy.recompute_granularity is not None:
            recompute["recompute_granularity"] = strategy.recompute_granularity
            if strategy.recompute_granularity == "full":
                recompute |= {
                    "recompute_method": strategy.recompute_method,
                    "recompute_num_layers": strategy.recompute_num_layers,
                }
        return cls(
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
            optimizer=OptimizerSettings.of(config, role, strategy) if trains else None,
            loss=LossSettings.of(samples) if trains and samples is not None else None,
            with_value_head=samples is not None and role is samples.critic,
            value_clip=None if samples is None else samples.algorithm.value_clip,
            temperature=sampling.temperature,
            top_k=max(0, sampling.top_k),  # -1 means off in the config
            top_p=sampling.top_p,
            lora_rank=role.model_args.lora_rank if trains else 0,
            lora_alpha=float(role.model_args.lora_alpha or 0),
            lora_targets=tuple(role.model_args.lora_target),
            lora_dropout=role.model_args.lora_dropout,
            frozen=tuple(role.model_args.freeze_module_prefix) if trains else (),
            micro_batch_rows=role.training_args.per_device_train_batch_size,
            mini_batch_rows=role.mini_batch_size if trains else 1,
            scoring_rows=role.infer_batch_size,
            longest_row=config.longest_sequence,
            micro_batching=role.micro_batching,
            max_tokens_per_microbatch=role.max_tokens_per_microbatch,
            moe_dispatcher=strategy.moe_token_dispatcher_type,
            router_replay=role.router_replay,
            moe_aux_loss_coeff=strategy.moe_aux_loss_coeff if trains else 0.0,
            recompute=recompute,
            transformer_impl=strategy.transformer_impl,
            seed=config.seed,
            flash_attention=role.model_args.attn_implementation == "fa2",
            extra=strategy.extra,
        )


def _interleaved(strategy: MegatronTrainConfig | MegatronInferConfig) -> int | None:
    """Model parts per pipeline rank; None for the plain schedule."""
    parts = strategy.virtual_pipeline_model_parallel_size if isinstance(strategy, MegatronTrainConfig) else None
    return parts if parts and parts > 1 else None
