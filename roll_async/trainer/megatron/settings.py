"""What a Megatron rank is built from, independent of the YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
    """AdamW and its schedule. Steps are optimizer steps."""

    learning_rate: float
    weight_decay: float = 0.0
    schedule: str = "constant"
    """constant, linear or cosine, from learning_rate to 0 over `total_steps`."""
    warmup_steps: int = 0
    total_steps: int = 1
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


@dataclass(frozen=True, kw_only=True, slots=True)
class LossSettings:
    """The policy loss; names as in roll_async.algorithms."""

    pg_variant: str
    pg_options: object
    loss_agg_mode: str = "token-mean"
    normalizer_length: int = 1
    entropy_coef: float = 0.0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    ppo_epochs: int = 1


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
    extra: Mapping[str, object] = field(default_factory=dict)
    """Handed to TransformerConfig unchanged."""
