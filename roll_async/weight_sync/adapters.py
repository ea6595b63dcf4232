"""Whether low-rank adapters are pushed alone, to engines that hold them beside frozen weights, or merged into them.

    version 1        frozen weights and adapters, both proved by the digest
    version 2, 3     adapters alone; the digest is that of the adapters plus that of the frozen weights proved before
    a replica joins  frozen weights and adapters again, for every replica of that push

No torch here: the choice is made where configs are checked.
"""

from __future__ import annotations

from dataclasses import dataclass

from roll_async.checkpoint.known_models import known_config
from roll_async.checkpoint.lora_targets import target_projections
from roll_async.config.schema import PipelineConfig

PLAIN_LAYERS = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
"""Architectures whose checkpoints store adapter layers unfused, and whose engines were seen to take adapters alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterShape:
    """The adapters that an engine holds beside its weights."""

    rank: int
    layers: tuple[str, ...]
    """Names of the layers that have one: q_proj, ..., in every block of the model."""


def adapters_of(config: PipelineConfig) -> AdapterShape | None:
    """The adapters that engines hold beside their weights; None = they are merged, or there are none."""
    return choose_adapters(config)[0]


def choose_adapters(config: PipelineConfig) -> tuple[AdapterShape | None, str]:
    """(what `adapters_of` says, the reason). Raises ValueError when `weight_sync.adapters: alone` is not possible."""
    wanted = config.weight_sync.adapters
    if wanted == "merged":
        return None, "as configured"
    reason = _unsupported_reason(config)
    if reason is not None:
        if wanted == "alone":
            raise ValueError(f"weight_sync.adapters=alone: {reason}; use auto, which merges them")
        return None, reason
    if wanted == "auto" and config.actor_infer.device_mapping is not None:
        return None, "no run has proved adapters beside the weights on GPUs; weight_sync.adapters: alone tries it"
    model = config.actor_train.model_args
    shape = AdapterShape(rank=model.lora_rank, layers=target_projections(model.lora_target))
    return shape, "as configured" if wanted == "alone" else "the engine holds them beside the weights"


def _unsupported_reason(config: PipelineConfig) -> str | None:
    """Why adapters cannot travel alone."""
    engine, rank = config.actor_infer.engine, config.actor_train.model_args.lora_rank
    title, largest = engine.traits.title, engine.traits.max_adapter_rank
    if not rank:
        return "actor_train.model_args.lora_rank is 0, there are no adapters"
    if config.weight_sync.sparse == "on":
        return "weight_sync.sparse: on sends what changed of merged weights"
    if largest == 0:
        return f"{title} was never shown to compute with adapters whose weights are pushed, too"
    if engine.quantization is not None:
        return f"quantization {engine.quantization} below adapters was never tried"
    if engine.pipeline_parallel_size > 1:
        return "an engine of several pipeline stages was never tried with adapters"
    if largest is not None and rank > largest:
        return f"{title}'s adapters have a rank of at most {largest}"
    return _unknown_layers(config.actor_train.model_args.model_name_or_path)


def _unknown_layers(model: str) -> str | None:
    """Why the engines' names of a model's linear layers are not those of its adapters."""
    config = known_config(model)
    if config is None or (family := config.architecture()) in PLAIN_LAYERS:  # a run has it as a folder
        return None
    return f"{family} has experts or fused projections, or its engines were not tried; known: {', '.join(PLAIN_LAYERS)}"
