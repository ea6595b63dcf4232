"""Parallel sizes against the model: sizes that do not divide it evenly are refused before anything starts."""

from __future__ import annotations

from collections.abc import Iterator

from roll_async.checkpoint.model_sizes import ModelSizes, sizes_of
from roll_async.config.schema import (
    MegatronInferConfig,
    MegatronTrainConfig,
    PipelineConfig,
    SglangConfig,
    VllmConfig,
)

Refusal = tuple[str, str]
"""(key, message)."""


def mismatches(config: PipelineConfig) -> Iterator[Refusal]:
    """Parallel sizes that do not divide the models of the roles. Raises ValueError for an unreadable config.json."""
    for role, worker in config.roles():
        sizes = sizes_of(worker.model_args.model_name_or_path)
        if sizes is None:
            continue
        settings, key = worker.strategy_args.strategy_config, f"{role}.strategy_args.strategy_config"
        match settings:
            case MegatronTrainConfig() | MegatronInferConfig():
                yield from _megatron(sizes, settings, key)
                if role == "actor_train" and worker.router_replay and not sizes.num_experts:
                    yield "actor_train.router_replay", f"true, but {sizes.source} has no experts; set it to false"
            case VllmConfig() | SglangConfig():
                heads = sizes.num_attention_heads
                yield from _uneven(
                    f"{key}.tensor_parallel_size", settings.tensor_parallel_size, sizes, num_attention_heads=heads
                )
                if settings.pipeline_parallel_size > sizes.num_hidden_layers:
                    message = f"{settings.pipeline_parallel_size} exceeds the {sizes.num_hidden_layers} layers of"
                    yield f"{key}.pipeline_parallel_size", f"{message} {sizes.source}; use 1"


def _megatron(sizes: ModelSizes, settings: MegatronTrainConfig | MegatronInferConfig, key: str) -> Iterator[Refusal]:
    tp, pp, ep = (
        settings.tensor_model_parallel_size,
        settings.pipeline_model_parallel_size,
        settings.expert_model_parallel_size,
    )
    chunks = (settings.virtual_pipeline_model_parallel_size or 1) if isinstance(settings, MegatronTrainConfig) else 1
    yield from _uneven(
        f"{key}.tensor_model_parallel_size", tp, sizes,
        num_attention_heads=sizes.num_attention_heads, num_key_value_heads=sizes.num_key_value_heads,
        intermediate_size=sizes.intermediate_size, vocab_size=sizes.vocab_size,
    )  # fmt: skip
    layers = sizes.num_hidden_layers
    if layers % pp:
        yield from _uneven(f"{key}.pipeline_model_parallel_size", pp, sizes, num_hidden_layers=layers)
    elif layers % (pp * chunks):
        yield from _uneven(
            f"{key}.virtual_pipeline_model_parallel_size", chunks, sizes, num_hidden_layers_per_stage=layers // pp
        )
    if not sizes.num_experts:
        if ep > 1:
            yield f"{key}.expert_model_parallel_size", f"{ep}, but {sizes.source} has no experts; use 1"
        return
    yield from _uneven(f"{key}.expert_model_parallel_size", ep, sizes, num_experts=sizes.num_experts)
    etp = settings.expert_tensor_parallel_size
    yield from _uneven(
        f"{key}.expert_tensor_parallel_size", etp, sizes, moe_intermediate_size=sizes.moe_intermediate_size
    )
    if tp > 1 and not settings.sequence_parallel:
        message = f"false, but {sizes.source} has experts and tensor_model_parallel_size is {tp}; set it to true"
        yield f"{key}.sequence_parallel", message


def _uneven(key: str, ranks: int, sizes: ModelSizes, **counts: int) -> Iterator[Refusal]:
    broken = [f"{name} {count}" for name, count in counts.items() if count % ranks]
    if broken:
        # A divisor of the configured size divides the devices, too.
        fitting = [n for n in range(1, ranks) if not ranks % n and not any(count % n for count in counts.values())]
        yield key, f"{ranks} does not divide {' and '.join(broken)} of {sizes.source}; use {fitting[-1]}"
