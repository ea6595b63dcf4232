"""Settings that a checked config may hold and this version cannot honour: refused before anything starts, never
ignored.
"""

from __future__ import annotations

from roll_async.config.schema import (
    MegatronInferConfig,
    MegatronTrainConfig,
    PipelineConfig,
    SglangConfig,
    VllmConfig,
    WorkerConfig,
)
from roll_async.weight_sync.transports import SENDERS


def refuse_unsupported(config: PipelineConfig) -> None:
    """Raise ValueError naming key, value and remedy of the first such setting; docs_roll/status.md lists them."""
    problems = [*_roles(config), *_engine(config)]
    if problems:
        raise ValueError("; ".join(problems))


def _roles(config: PipelineConfig) -> list[str]:
    problems = []
    for name, role in config.roles():
        problems += _without_effect(name, role)
        strategy = role.strategy_args.strategy_config
        if isinstance(strategy, MegatronTrainConfig | MegatronInferConfig):
            problems += _megatron(name, role, strategy)
        elif name in ("reference", "teacher"):
            problems.append(
                f"{name}.strategy_args.strategy_name={role.strategy_args.strategy_name} is not there yet; "
                "use megatron_infer"
            )
    return problems


def _without_effect(name: str, role: WorkerConfig) -> list[str]:
    """Values that nothing would act on."""
    problems = []
    attention, strategy = role.model_args.attn_implementation, role.strategy_args.strategy_name
    flash = attention == "fa2" and _on_transformer_engine(role)
    if attention != "auto" and strategy != "hf_infer" and not flash:
        problems.append(
            f"{name}.model_args.attn_implementation={attention} has no effect, {strategy} chooses its own; use auto"
        )
    if not role.logits_in_fp32:
        problems.append(f"{name}.logits_in_fp32=false: log-probs always come from fp32 logits; remove it")
    return problems


def _on_transformer_engine(role: WorkerConfig) -> bool:
    """Whether the layers may be Transformer Engine's, which can be told to take its flash kernel."""
    strategy = role.strategy_args.strategy_config
    megatron = isinstance(strategy, MegatronTrainConfig | MegatronInferConfig)
    return megatron and strategy.transformer_impl != "local" and role.device_mapping is not None


def _megatron(name: str, role: WorkerConfig, strategy: MegatronTrainConfig | MegatronInferConfig) -> list[str]:
    problems = []
    if isinstance(strategy, MegatronTrainConfig):
        if strategy.overlap_param_gather and not (strategy.use_distributed_optimizer and strategy.overlap_grad_reduce):
            problems.append(
                f"{name}..overlap_param_gather=true needs use_distributed_optimizer and overlap_grad_reduce: true"
            )
        if role.model_args.lora_rank > 0 and strategy.transformer_impl == "transformer_engine":
            problems.append(
                f"{name}.strategy_args.strategy_config.transformer_impl=transformer_engine has no adapters "
                f"({name}.model_args.lora_rank={role.model_args.lora_rank}); use auto or local"
            )
    return problems


def _engine(config: PipelineConfig) -> list[str]:
    problems = []
    if config.actor_train.router_replay:
        problems += _cannot_record(config)
    problems += _quantized_on_cpu(config)
    if config.weight_sync.transport not in ("auto", *SENDERS):
        problems.append(
            f"weight_sync.transport={config.weight_sync.transport} is not there yet; use auto or {' or '.join(SENDERS)}"
        )
    return problems


def _quantized_on_cpu(config: PipelineConfig) -> list[str]:
    strategy = config.actor_infer.strategy_args.strategy_config
    if not isinstance(strategy, VllmConfig | SglangConfig) or strategy.quantization is None:
        return []
    if config.actor_infer.device_mapping is not None:
        return []
    key = "actor_infer.strategy_args.strategy_config.quantization"
    return [f"{key}={strategy.quantization}: the engines have no such kernels on CPU; remove it, or set device_mapping"]


def _cannot_record(config: PipelineConfig) -> list[str]:
    """Why vLLM could not tell which experts it took."""
    key, strategy = "actor_infer.strategy_args.strategy_config", config.actor_infer.strategy_args.strategy_config
    if not isinstance(strategy, VllmConfig):
        return []
    problems = []
    if not strategy.enable_prefix_caching:
        problems.append(f"{key}.enable_prefix_caching=false: vLLM records experts beside its prefix cache")
    if strategy.pipeline_parallel_size > 1:
        size = strategy.pipeline_parallel_size
        problems.append(f"{key}.pipeline_parallel_size={size}: vLLM records experts of one stage only")
    remedy = "set actor_train.router_replay: false"
    return [f"{problem}; change it, or {remedy}" for problem in problems]
